"""Scripts with TRL's tools and environments train here, and rewards are those of their functions and environments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import asyncrlhf
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.read.verify import verify
from tests import trl_agents
from tests.calling_model import call_text, calling_model
from tests.ray_run import part_processes, wait_until

SMALL: dict[str, Any] = {
    "logging": "quiet", "steps": 3, "batch_size": 16, "num_generations": 4,
    "overrides": {
        "task.heldout_size": 2, "generator.slots": 16, "generator.max_completion_length": 160, "generator.threads": 0,
        "task.max_prompt_length": 2048, "episode.max_turns": 3, "episode.max_turn_tokens": 2,
    },
}  # fmt: skip
ADDS = [call_text("add", json.dumps({"a": a, "b": b})) for a in range(10) for b in range(10)]
DOUBLES = [call_text("double", json.dumps({"a": a})) for a in range(50)]
STEPS = [call_text("increment", json.dumps({"step": step % 9})) + " " * (step // 9) for step in range(160)]

CALL = re.compile(r'"name": "(\w+)", "arguments": (.*)}')


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    overrides = {**SMALL["overrides"], "run_dir": folder / "run", **changes.pop("overrides", {})}
    return {**SMALL, **changes, "overrides": overrides}


def ended(run: Any, runtime: str) -> None:
    ledger = run.summary["ledger"]
    assert run.summary["exit_reason"] == "done" and ledger["trained"] == 48 and not any(ledger["failed"].values())
    assert verify(run.path) == []
    if runtime == "ray":
        wait_until(lambda: not part_processes(), "the end of every actor's process")


def trained(run: Any) -> Any:
    rollouts = run.rollouts
    return rollouts[rollouts.state == "trained"]


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.thorough)])
def test_tools(tmp_path: Path, runtime: str, request: pytest.FixtureRequest) -> None:
    if runtime == "ray":
        request.getfixturevalue("ray_local")
    model = calling_model(tmp_path / "model", ADDS + DOUBLES)
    functions = [trl_agents.solved, trl_agents.calls]
    run = asyncrlhf.train(
        model,
        trl_agents.build_dataset(),
        functions,
        reward_weights=[1.0, 0.1],
        tools=[trl_agents.add, trl_agents.double],
        **small(tmp_path, runtime=runtime),
    )
    called = 0
    for row in trained(run).itertuples():
        a, b = map(int, re.findall(r"\d+", row.prompt))
        made = [(name, *map(int, re.findall(r"\d+", given))) for name, given in CALL.findall(row.response)]
        extra = json.loads(row.extra)
        results = [text for text in extra["results"].split(",") if text]
        assert len(results) <= extra["called"] <= len(made), "a turn that was cut off is text"
        assert results == [str(sum(of) if name == "add" else 2 * of[0]) for name, *of in made][: len(results)]
        assert row.reward == pytest.approx((str(a + b) in results) + 0.1 * extra["called"])
        called += len(results)
    assert called > 48, "most turns were meant to call"
    ended(run, runtime)


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.thorough)])
def test_an_environment(tmp_path: Path, runtime: str, request: pytest.FixtureRequest) -> None:
    if runtime == "ray":
        request.getfixturevalue("ray_local")
    model = calling_model(tmp_path / "model", STEPS)
    run = asyncrlhf.train(
        model,
        trl_agents.build_dataset(),
        trl_agents.distance,
        environment_factory=trl_agents.Counter,
        **small(tmp_path, runtime=runtime),
    )
    for row in trained(run).itertuples():
        a, b, goal = map(int, re.findall(r"\d+", row.prompt))
        value, steps = json.loads(row.extra)["value"], [int(given[9:-1]) for _, given in CALL.findall(row.response)]
        assert goal == a + b and value == sum(steps), "the environment saw every call of the episode"
        own = 1.0 if value == goal else -0.25 * (value > goal)
        assert row.reward == pytest.approx(own - 0.01 * abs(value - goal))
    assert (run.metrics["reward/Counter"] != 0).any() and (run.metrics["reward/distance"] < 0).all()
    ended(run, runtime)


@pytest.mark.thorough
def test_a_dictionary_of_environments(tmp_path: Path) -> None:
    """The row chooses; one without a reward of its own leaves it to the others, and here no part has one for it."""
    model = calling_model(tmp_path / "model", STEPS)
    chosen = ["counter", "still"]
    rows = [
        {"environment": chosen[i % 2], "prompt": [{"role": "user", "content": ""}], "solution": i} for i in range(40)
    ]
    run = asyncrlhf.train(
        model,
        [{name: value for name, value in row.items() if name != "prompt"} for row in rows],
        lambda completions, **_: [0.5 for _ in completions],
        environment_factory={"counter": trl_agents.Counting, "still": trl_agents.Still},
        **small(tmp_path, runtime="local"),
    )
    seen = trained(run)
    ended(run, "local")
    assert set(seen.reward[seen.prompt.str.contains("Wait")]) == {0.5}
    assert set(seen.reward[seen.prompt.str.contains("Count")]) > {0.25, 0.5}


@pytest.mark.thorough
def test_an_environment_that_asks_itself(tmp_path: Path) -> None:
    """Without a dataset; the rollouts of a group are asked the same."""
    model = calling_model(tmp_path / "model", STEPS)
    run = asyncrlhf.train(model, environment_factory=trl_agents.Asking, **small(tmp_path, runtime="local"))
    ended(run, "local")
    asked = trained(run).groupby("group_id").prompt
    assert (asked.nunique() == 1).all() and asked.first().nunique() > 4


def test_what_cannot_be_played_is_answered_in_a_sentence(tmp_path: Path) -> None:
    def bare(a):  # type: ignore[no-untyped-def]
        return a

    model = calling_model(tmp_path / "model", STEPS)
    data = trl_agents.build_dataset()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": [bare]}, "episode.tools: bare cannot be described to the model"),
        ({"tools": bare}, "tools is a list of functions"),
        ({"tools": [trl_agents.add, trl_agents.add]}, "the functions' names must differ"),
        ({"environment_factory": 3}, "environment_factory is of the type int; allowed: a class"),
        ({"environment_factory": dict}, "has no method reset"),
        ({"environment_factory": {"a": trl_agents.Counter}, "dataset": None}, "needs a dataset, with a column environ"),
    ]
    for number, (given, sentence) in enumerate(wrong):
        with pytest.raises(ConfigError, match=sentence):
            asyncrlhf.train(
                **{"model": model, "dataset": data, "reward": trl_agents.calls, **given},
                **small(tmp_path / str(number), runtime="local"),
            )
