"""A curriculum in a whole run: prompts come again, and more groups have something to learn from."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrlhf.buffer.replay import SURPLUS
from tests.loop import FAKE, Finished, run

FEW = ("steps=12", "batch_size=32", "num_generations=8")


def asked(done: Finished) -> tuple[int, float]:
    """The groups that were admitted, and the share of them whose prompt had come before."""
    prompts = done.rollouts.groupby("group_id").prompt.first()
    return len(prompts), 1 - prompts.nunique() / len(prompts)


@pytest.mark.parametrize("mode", ["async.max_staleness=2", "async.mode=sync"])
def test_prompts_come_again(tmp_path: Path, mode: str) -> None:
    again = {
        kind: asked(run(tmp_path / kind, *FAKE, *FEW, mode, f"task.curriculum={kind}"))[1]
        for kind in ("off", "difficulty", "regret")
    }
    assert again["off"] < 0.05 and min(again["difficulty"], again["regret"]) > 0.25, again


def test_groups_that_the_filter_drops_are_heard_of(tmp_path: Path) -> None:
    """Else a prompt that is never solved would count as one whose answers are still under way."""
    known = (
        "generator.fake.correct_probability=0.02",
        "buffer.filter_zero_spread=true",
        "generator.fake.length_mean=4",
    )
    done = run(tmp_path, *FAKE, *FEW, *known, "task.curriculum=difficulty")
    groups, again = asked(done)
    assert groups > 2 * 12 * 4 and again > 0.25


@pytest.mark.more
@pytest.mark.in_turn
def test_a_task_that_cannot_be_solved_ends(tmp_path: Path) -> None:
    """Ten times as many answers as without the filter, and no end without a bound. Now and then a fake one is right."""
    known = ("generator.fake.correct_probability=0", "buffer.filter_zero_spread=true")
    done = run(tmp_path, *FAKE, *FEW, *known)
    done.assert_ledger_whole()
    dropped = (done.rollouts.drop_reason == "untrainable").sum()
    flat = [row["zero_spread_groups"] for row in done.metrics]
    assert len(flat) == 12 and sum(flat) > 0.8 * 12
    assert 10 * 32 * SURPLUS <= dropped <= 12 * 32 * SURPLUS


@pytest.mark.thorough
def test_more_groups_have_unequal_rewards(tmp_path: Path) -> None:
    learning = ("steps=40", "batch_size=64", "num_generations=8")
    flat = {}
    for kind in ("off", "difficulty"):
        done = run(tmp_path / kind, *learning, f"task.curriculum={kind}")
        flat[kind] = sum(row["zero_spread_groups"] for row in done.metrics)
    assert flat["difficulty"] < 0.8 * flat["off"], flat
