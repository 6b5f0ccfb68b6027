"""Episodes in ``evaluate``: the same as those of a run's own evaluation, from the command line and from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import asyncrlhf
from asyncrlhf.cli.main import main
from asyncrlhf.episodes.higher_lower import HigherLower

QUIET = {"runtime": "local", "logging": "quiet", "batch_size": 8, "num_generations": 4}
TOOL = ("experiment=tool_arithmetic", "task.heldout_size=24", "runtime=local", "logging=quiet")


def test_the_episodes_of_a_run_and_of_its_evaluation_are_the_same(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "task.heldout_size": 12,
        "generator.max_completion_length": 40,
        "episode.max_turn_tokens": 4,
    }
    run = asyncrlhf.train(
        "tiny", environment_factory=HigherLower, run_dir=str(tmp_path / "run"), steps=1, overrides=given, **QUIET
    )
    found = asyncrlhf.evaluate(run)
    assert found.figures["reward_mean"] == pytest.approx(run.summary["heldout_accuracy"]["after"])
    assert found.figures["failed"] == 0 and 1 < found.figures["turns_mean"] <= 4
    again = asyncrlhf.evaluate(
        "tiny", environment_factory=HigherLower, overrides={**given, "model.path": str(run.model)}
    )
    assert again.samples.response.tolist() == found.samples.response.tolist()


def test_the_command_line_shows_turns_and_tool_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", *TOOL, "steps=1", "batch_size=8", f"run_dir={tmp_path / 'run'}", "checkpoint.at_end=false"]) == 0
    )
    capsys.readouterr()
    assert main(["evaluate", *TOOL]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["reward_mean"] == pytest.approx(summary["heldout_accuracy"]["before"])
    assert found["turns_mean"] == pytest.approx(1 + found["tool_calls_mean"]) and found["tool_calls_mean"] > 0
    assert "turns" in out and "tool calls" in out


def fails(expression: str) -> str:
    """
    Fail.

    Args:
        expression: Anything.
    """
    raise RuntimeError("no result")


def test_tools_of_pythons_caller_and_their_failures(capsys: pytest.CaptureFixture[str]) -> None:
    fails.__name__ = "calculator"
    task = {"task.operations": ["*"], "task.chat_template": True, "task.heldout_size": 24}
    found = asyncrlhf.evaluate("tiny_tools", tools=[fails], overrides=task, logging="quiet")
    assert found.figures["tool_failures_mean"] == found.figures["tool_calls_mean"] > 0


def test_only_sampled_tokens_are_compared_with_the_reference() -> None:
    """A model's distance to itself is 0, and its perplexity is that of what it sampled itself."""
    task = {"task.operations": ["*"], "task.chat_template": True, "task.heldout_size": 24}
    judged = {"evaluation.reference": "tiny_tools", "evaluation.temperature": 1.0}
    found = asyncrlhf.evaluate(
        "tiny_tools", tools=["calculator"], overrides={**task, **judged}, logging="quiet"
    ).figures
    assert found["kl"]["k1_token"] == pytest.approx(0.0, abs=1e-5)
    assert found["perplexity"] < 3.0


def test_a_failed_episode_is_told_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"task.heldout_size": 24, "generator.max_completion_length": 40, "episode.max_turn_tokens": 4}
    found = asyncrlhf.evaluate(
        "tiny", "arithmetic", environment_factory="tests.worlds:Raises", logging="quiet", overrides=given
    )
    failed = found.figures["failed"]
    assert 0 < failed < 24 and len(found.samples) == 24 - failed
    assert f"{failed} episodes failed: The environment failed: RuntimeError: the world" in capsys.readouterr().err


@pytest.mark.more
def test_agents_are_evaluated_too() -> None:
    found = asyncrlhf.evaluate(
        "tiny", logging="quiet", reward=None, overrides={"episode.agent": "tests.agents:sums", "task.heldout_size": 6,
        "reward.kind": "environment"},
    )  # fmt: skip
    assert found.figures["turns_mean"] == 2 and found.figures["failed"] == 0


def test_pairs_of_episodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preferences", *TOOL]) == 2
    assert "preferences pairs answers" in capsys.readouterr().err
