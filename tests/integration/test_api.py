"""The Python API as a notebook uses it: rows, closures and callbacks in, data frames out; light until it is called."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import transformers

import asyncrlhf
from asyncrlhf import api
from asyncrlhf.errors import AsyncRLHFError, ConfigError

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {
    "logging": "quiet", "runtime": "local", "steps": 2, "batch_size": 16, "num_generations": 4,
    "overrides": {"task.heldout_size": 4, "generator.slots": 16, "generator.engine": "fake"},
}  # fmt: skip
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": "easy"} for a in range(5) for b in range(5)]


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    overrides = {**SMALL["overrides"], "run_dir": folder, **changes.pop("overrides", {})}
    return {**SMALL, **changes, "overrides": overrides}


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, asyncrlhf; from asyncrlhf import train, evaluate, sweep, load_runs\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'wandb') if m in sys.modules], sorted(dir(asyncrlhf))[-3:])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == "[] ['load_runs', 'sweep', 'train']\n", done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        asyncrlhf.trian  # noqa: B018


def test_rows_a_closure_and_callbacks_in_and_frames_out(tmp_path: Path) -> None:
    bonus = 0.25  # of the closure, which travels to the sandbox's process
    heard: list[tuple[str, Any]] = []

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [bonus + len(text) * 0 for text in completions]

    class Heard:
        def on_step(self, metrics: dict[str, Any]) -> None:
            heard.append(("step", metrics["step"]))

        def on_publish(self, version: int) -> None:
            heard.append(("publish", version))

        def on_evaluation(self, step: int, accuracy: float) -> None:
            heard.append(("evaluation", (step, accuracy)))

        def on_end(self, summary: dict[str, Any]) -> None:
            heard.append(("end", summary["exit_reason"]))

    seen: list[float] = []
    callbacks = [Heard(), lambda metrics: seen.append(metrics["reward_mean"])]
    run = asyncrlhf.train("tiny", ROWS, reward, callbacks=callbacks, **small(tmp_path / "run"))
    assert seen == [0.25, 0.25] and list(run.metrics["reward_mean"]) == seen
    assert [what for name, what in heard if name == "step"] == [1, 2]
    assert [what for name, what in heard if name == "publish"] == [0, 1, 2]
    assert [what for name, what in heard if name == "evaluation"] == [(0, 0.25), (2, 0.25)]
    assert heard[-1] == ("end", "done") and run.summary["exit_reason"] == "done"
    assert set(run.rollouts[run.rollouts.state == "trained"].prompt) <= {row["prompt"] for row in ROWS}
    assert run.config["async.max_staleness"] == 2 and "done, 2 steps" in repr(run)
    assert transformers.AutoModelForCausalLM.from_pretrained(run.model).num_parameters() > 0


@pytest.mark.thorough
def test_functions_of_a_notebook_travel(tmp_path: Path) -> None:
    """One of ``__main__`` is in no module that a worker could import."""
    given = "[mine, lambda completions, **_: [weight for _ in completions]]"
    code = (
        "from asyncrlhf import train\nweight = 0.75\n"
        "def mine(prompts, completions, **columns):\n    return [weight] * len(completions)\n"
        f"run = train(reward={given}, **{small(tmp_path / 'run', steps=1)!r})\nprint(run.metrics.reward_mean.tolist())"
    ).replace("PosixPath", "str")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "[1.5]\n", done.stderr[-2000:]


def test_several_rewards_are_their_sum_and_a_frame_is_a_dataset(tmp_path: Path) -> None:
    def half(completions: list[str], **columns: Any) -> list[float]:
        return [0.5 for _ in completions]

    def level(completions: list[str], metadata: list[dict[str, Any]], **columns: Any) -> list[float]:
        return [1.0 if row.get("level") == "easy" else 0.0 for row in metadata]

    given = {"reward": [half, level], "reward_weights": [2, 0.5]}
    run = asyncrlhf.train(dataset=pd.DataFrame(ROWS), **given, **small(tmp_path / "run", steps=1))
    assert run.metrics.loc[0, ["reward_mean", "reward/half", "reward/level"]].tolist() == [1.5, 0.5, 1.0]


def test_in_a_notebooks_event_loop_and_stopped_by_a_callback(tmp_path: Path) -> None:
    async def cell() -> Any:
        def enough(metrics: dict[str, Any]) -> str | None:
            return "stop" if metrics["step"] == 2 else None

        return asyncrlhf.train(callbacks=enough, **small(tmp_path / "run", steps=50))

    run = asyncio.run(cell())
    assert run.summary["exit_reason"] == "interrupted" and 2 <= run.summary["steps"] <= 3
    assert run.model.is_dir()


@pytest.mark.parametrize("event", ["on_step", "on_publish", "on_evaluation"])
def test_a_callback_that_raises_ends_the_run_with_its_name(tmp_path: Path, event: str) -> None:
    def fail(self: Any, *facts: Any) -> None:
        raise ValueError("not today")

    ends: list[str] = []
    broken = type("Broken", (), {event: fail, "on_end": lambda self, summary: ends.append(summary["exit_reason"])})
    with pytest.raises(AsyncRLHFError, match=f"^The callback Broken.{event} raised ValueError: not today$"):
        asyncrlhf.train(callbacks=[broken()], **small(tmp_path / "run"))
    assert ends == [f"failed: The callback Broken.{event} raised ValueError: not today"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"stepz": 1}, "stepz is not a setting (did you mean steps?)"),
        ({"overrides": {"async.max_stale": 4}}, "async.max_stale is not a setting"),
        ({"callbacks": [3]}, "callbacks: 3 is not a callback; allowed: a function"),
        ({"callbacks": 3}, "callbacks: 3 is not a callback; allowed: a function"),
        ({"dataset": 7}, "dataset is of the type int; allowed: a path, a list of dictionaries"),
        ({"dataset": []}, "dataset is of the type list, and empty; allowed: a path"),
        (
            {"reward": ["a:f", "a:g"], "reward_weights": [1]},
            "reward_weights has 1 weights for the 2 functions of reward",
        ),
        ({"reward": "a:f", "reward_weights": [1]}, "reward_weights needs several functions, reward=[f, g]."),
        ({"seed": object}, "is not a setting's value; allowed: text, numbers, lists and dicts."),
        ({"reward": lambda wrong: [], "run_dir": "run"}, "cannot be called with prompts, completions"),
        ({"reward": [len, len], "run_dir": "run"}, "the functions' names must differ"),
    ],
)
def test_wrong_input_is_answered_in_a_sentence(
    arguments: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        asyncrlhf.train(**{"runtime": "local", "logging": "quiet", **arguments})
    assert sentence in str(refused.value)


def test_values_are_written_in_hydras_grammar() -> None:
    from asyncrlhf.config.compose import load_config

    given = {
        "name": "it's a, b", "steps": 3, "learner.learning_rate": 1e-5, "task.operations": ["+", "-"],
        "run_dir": "null", "logging.rollouts": False, "algorithm": "tis", "task.system_prompt": "",
        "logging.wandb_kwargs": {"notes": "a\\'b"},
    }  # fmt: skip
    config = load_config(api._overrides(given))
    assert config.name == "it's a, b" and config.run_dir == "null" and config.learner.learning_rate == 1e-5
    assert config.task.operations == ["+", "-"] and not config.logging.rollouts and config.algorithm.name == "tis"


def test_runs_are_loaded_as_frames_with_what_differs(tmp_path: Path) -> None:
    for seed in (0, 1):
        asyncrlhf.train(**small(tmp_path / f"seed-{seed}", seed=seed, steps=1))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("")
    runs = asyncrlhf.load_runs(tmp_path)
    assert len(runs) == 2 and runs.differing == ["seed"] and list(runs.unread) == [str(tmp_path / "broken")]
    assert runs.metrics[["seed", "step"]].values.tolist() == [[0, 1], [1, 1]]
    assert runs.summary.seed.tolist() == [0, 1] and set(runs.summary.exit_reason) == {"done"}
    assert runs[1].path == tmp_path / "seed-1"


@pytest.mark.more
@pytest.mark.in_turn
def test_evaluate_a_run_with_its_own_settings(tmp_path: Path) -> None:
    own = {"generator.engine": "hf", "generator.max_completion_length": 4}
    run = asyncrlhf.train(**small(tmp_path / "run", steps=1, overrides=own))
    found = asyncrlhf.evaluate(run, overrides={"evaluation.pass_k": [1]})
    assert found.figures["model"] == str(run.model) and found.figures["prompts"] == 4
    assert list(found.samples.columns[:2]) == ["prompt", "response"] and len(found.samples) > 0

    def easy(completions: list[str], level: list[str], **columns: Any) -> list[float]:
        return [0.25 * (name == "easy") for name in level]

    def one(completions: list[str], **columns: Any) -> list[float]:
        return [1.0 for _ in completions]

    for rows in (ROWS, datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))):
        found = asyncrlhf.evaluate(run, rows, [easy, one], reward_weights=[2, 1])
        assert found.samples.prompt.tolist() == [row["prompt"] for row in ROWS], "not every row was answered"
        assert set(found.samples.reward) == {1.5} and found.figures["reward_parts"]["easy"]["mean"] == 0.25


@pytest.mark.thorough
def test_a_sweep_comes_back_as_frames_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lags = {
        "async": "fixed_lag",
        "async.lag": [0, 2],
        "sweep.jobs": 1,
        "task.heldout_size": 32,
        "generator.engine": "hf",
    }
    settings = {**SMALL, "steps": 4, "overrides": {**SMALL["overrides"], **lags}, "seeds": 1}

    async def cell() -> Any:  # a notebook's event loop is running
        return asyncrlhf.sweep(**settings)

    found = asyncio.run(cell())
    assert found.path.resolve().parent == tmp_path / "runs" / "sweeps"
    # A run's config says what is in force: its bound is its lag.
    assert found.runs.differing == ["async.lag", "async.max_staleness"]
    assert set(found.runs.summary.exit_reason) == {"done"}
    means = found.runs.metrics.groupby("async.lag").staleness_mean.mean()
    assert found.table.setting.tolist() == ["lag 0", "lag 2"] and means[2] > means[0] == 0
    assert found.table.staleness.tolist() == pytest.approx([means[0], means[2]])
    quality = found.runs.summary.set_index("async.lag").heldout_after
    assert found.table.quality.tolist() == pytest.approx([quality[0], quality[2]])
    assert found.table.kept[1] == pytest.approx(quality[2] / quality[0]) and found.table.kept_error.isna().all()
    assert f"the run keeps {100 * found.table.kept[1]:.0f}% of the held-out accuracy" in found.sentences[0]

    written = [(run.path / "metrics.jsonl").stat().st_mtime_ns for run in found.runs]
    again = asyncrlhf.sweep(**settings)
    assert again.path == found.path
    assert [(run.path / "metrics.jsonl").stat().st_mtime_ns for run in again.runs] == written, "they were run again"


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"stepz": 1}, "stepz is not a setting (did you mean steps?)"),
        ({"steps": -1}, "steps=-1"),
        ({"overrides": {"model.path": "./no-such-folder"}}, "model.path=./no-such-folder"),
        ({"overrides": {"reward.kind": "python", "reward.target": "no_such:f"}}, "reward.target=no_such:f"),
    ],
)
def test_in_a_notebook_wrong_input_raises_and_exits_nothing(
    wrong: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def cell() -> None:
        asyncrlhf.train(**small(tmp_path / "run", **wrong))

    with pytest.raises(ConfigError) as refused:
        asyncio.run(cell())
    assert sentence in str(refused.value) and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_a_sweep_cannot_take_is_answered_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong, sentence in (
        ({"steps": [1, -1]}, "steps=-1"),
        ({"overrides": {"reward.target": len}}, "reward.target: a sweep takes package.module:function"),
        ({"run_dir": "here"}, "run_dir cannot be set for a sweep"),
    ):
        with pytest.raises(ConfigError) as refused:
            asyncrlhf.sweep(**{"runtime": "local", **wrong})
        assert sentence in str(refused.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_a_search_runs_what_is_missing_and_names_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna", reason="the extra optuna is not installed")
    monkeypatch.chdir(tmp_path)
    searched = {
        "generator.fake.correct_probability": "interval(0,1)", "sweep.search": "optuna", "sweep.jobs": 1,
        "sweep.objective": "reward_mean",
    }  # fmt: skip
    own = {**SMALL, "batch_size": 64, "overrides": {**SMALL["overrides"], **searched}}
    first = asyncrlhf.sweep(**{**own, "overrides": {**own["overrides"], "sweep.trials": 2}})
    kept = {run.path: (run.path / "metrics.jsonl").stat().st_mtime_ns for run in first.runs}
    found = asyncrlhf.sweep(**{**own, "overrides": {**own["overrides"], "sweep.trials": 4}})
    assert found.path == first.path and len(kept) == 2 and len(found.runs) == 4
    assert {path: (path / "metrics.jsonl").stat().st_mtime_ns for path in kept} == kept, "they were run again"
    rewards = {run.config["generator.fake.correct_probability"]: run.metrics.reward_mean.iloc[-1] for run in found.runs}
    assert max(rewards.values()) > 0
    best = max(rewards, key=lambda probability: rewards[probability])
    said = (
        f"Best of 4 trials: reward_mean {rewards[best]:.3f} (1 seed) with generator.fake.correct_probability={best:g}"
    )
    assert found.sentences[0].startswith(said)
