"""A run's own evaluations of several sets with pass@k: metrics, records and refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pandas as pd
import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.show.progress import RunView
from asyncrlhf.report.frames import Run
from tests.loop import QUIET, run

SAMPLED = (
    "batch_size=16", "num_generations=4", "generator.slots=32", "steps=2", "eval_every=1",
    "generator.max_completion_length=4", "evaluation.temperature=1", "evaluation.num_generations=4",
    "evaluation.pass_k=[1,3]",
)  # fmt: skip
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in [(7, 5), (70, 51)]]


def rows_file(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_every_set_is_measured_and_its_answers_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart: list[dict[str, float]] = []  # what the sinks get of the first and last evaluation
    monkeypatch.setattr(RunView, "evaluated_apart", lambda self, step, seconds, metrics: apart.append(metrics))
    own = f"evaluation.sets={{rows:{{path:{rows_file(tmp_path)}}},minus:{{path:{rows_file(tmp_path)},heldout_size:1}}}}"
    reward = ("reward.kind=python", "reward.target=tests.reward_functions:one_for_digits")
    done = run(tmp_path / "run", *SAMPLED, own, *reward, "evaluation.pass_reward=0.3")

    answers = Run(done.folder).evaluations
    assert answers.groupby(["step", "set"]).size().to_dict() == {
        (step, name): size for step in (0, 1, 2) for name, size in (("", 32), ("rows", 8), ("minus", 4))
    }
    assert set(answers[answers["set"] == "rows"].answer) == {"12", "121"} and answers.response.str.len().gt(0).any()

    def figures(step: int, name: str) -> list[float]:
        """Mean reward, pass@1 and pass@3 by enumeration of all subsets."""
        groups = [
            g.reward.ge(0.3).tolist()
            for _, g in answers[(answers.step == step) & (answers["set"] == name)].groupby("prompt")
        ]
        passed = [[max(c) for g in groups for c in itertools.combinations(g, k)] for k in (1, 3)]
        of_set = answers[(answers.step == step) & (answers["set"] == name)]
        return [of_set.reward.mean(), *(sum(p) / len(p) for p in passed)]

    keys = {"": "heldout_", "rows": "heldout/rows/", "minus": "heldout/minus/"}
    found = {0: apart[0], 1: done.metrics[0], 2: apart[1]}
    for step, (name, key) in itertools.product(found, keys.items()):
        told = [found[step][f"{key}{figure}"] for figure in ("accuracy", "pass_at_1", "pass_at_3")]
        assert told == pytest.approx(figures(step, name)), (step, name)
    assert done.summary["evaluations"]["heldout/rows/pass_at_3"] == {
        "before": pytest.approx(figures(0, "rows")[2]), "after": pytest.approx(figures(2, "rows")[2]),
    }  # fmt: skip
    again = run(tmp_path / "again", *SAMPLED, own, *reward, "evaluation.pass_reward=0.3")
    assert Run(again.folder).evaluations.equals(answers), (
        "an evaluation's answers depend on something else than its seed"
    )


@pytest.mark.parametrize(
    "entry, sentence",
    [
        (
            "{path:rows.jsonl}",
            "needs the rule of another task (task.kind=prompts) than the run's (task.kind=arithmetic)",
        ),
        ("{path:none.jsonl}", "In evaluation.sets.x: "),
        ("{digitz:3}", "evaluation.sets.x.digitz is not a setting"),
    ],
)
def test_a_set_that_cannot_be_measured_is_refused_before_the_start(
    entry: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    reward = ("reward.kind=python", "reward.target=tests.reward_functions:one_for_digits") if "none" in entry else ()
    with pytest.raises(ConfigError) as refused:
        train(
            load_config(
                [f"run_dir={tmp_path / 'run'}", "runtime=local", *QUIET, f"evaluation.sets={{x:{entry}}}", *reward]
            )
        )
    assert sentence in str(refused.value) and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_another_set_of_the_same_task_needs_no_reward_of_its_own(tmp_path: Path) -> None:
    done = run(tmp_path / "run", *SAMPLED[:4], "steps=1", "evaluation.sets={one:{digits:1,heldout_size:3}}")
    answers: pd.DataFrame = Run(done.folder).evaluations
    assert answers.groupby("set").size().to_dict() == {"": 16, "one": 6}
