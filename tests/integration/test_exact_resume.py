"""On the local runtime a run that was killed, at any moment and more than once, ends as one that never was."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.cluster.local_runtime import LocalRuntime
from tests.integration.test_local_loop import TAIL
from tests.loop import FAKE, Finished, meddle, run

MODES = {
    "sync": ("async.mode=sync",),
    "one_step": ("async.mode=one_step",),
    "fixed_lag": ("async=fixed_lag", "async.lag=2"),
    "async": ("async.max_staleness=3",),
    "drain": ("async.max_staleness=3", "async.on_weight_update=drain", "weights.publish_every=2"),
    "interrupt": ("async.max_staleness=3", "async.on_weight_update=interrupt", "async.over_stale=wait"),
    "pull": ("async.max_staleness=3", "async.on_weight_update=pull", "weights.transport=relay"),
    "curriculum": ("async.max_staleness=3", "task.curriculum=difficulty"),
    "paced": ("async.max_staleness=3", "async.pacing=just_in_time"),
    "replay": (
        "async.max_staleness=6",
        "buffer.replay_fraction=1",
        "buffer.max_reuse=3",
        "buffer.sampling=reward_spread",
    ),
}
FAKED = (*FAKE, *TAIL, "generator.replicas=3", "learner.virtual_step_seconds=0.1", "steps=14", "checkpoint.every=4")
SAMPLED = ("batch_size=16", "learner.learning_rate=1e-4", "steps=5", "checkpoint.every=2", "generator.slots=12")


class Killed(SystemExit):
    """As ``kill -9``: of what a callback raises asyncio hands on this kind alone."""


def told(done: Finished) -> tuple[Any, ...]:
    """All that a run computed; a start audits the weights once more, and so knows a newer mismatch_kl."""
    metrics = [{k: v for k, v in row.items() if k != "mismatch_kl"} for row in done.untimed_metrics]
    columns = ["rollout_id", "group_id", "prompt", "response", "reward", "staleness", "drop_reason", "state"]
    rows = done.rollouts.sort_values("rollout_id")
    lists = [[list(value) for value in rows[name]] for name in ("policy_versions", "behavior_logprobs")]
    uses = [None if value is None else list(value) for value in rows["consumed_at_version"]]
    return metrics, rows[columns].astype(str).to_numpy().tolist(), lists, uses, done.weights_digest()


def killed_and_resumed(folder: Path, whole: Finished, seed: int, *options: str) -> Finished:
    """Killed at two random moments of virtual time, of which the first may come before any checkpoint."""
    draw = random.Random(seed)
    length = whole.metrics[-1]["wall_time"]
    for moment in sorted(draw.uniform(0.02, 0.9) * length for _ in range(2)):

        def strike(runtime: LocalRuntime, moment: float = moment) -> None:
            loop = asyncio.get_running_loop()

            def kill() -> None:
                raise Killed

            loop.call_at(moment, kill)

        with pytest.MonkeyPatch.context() as patch:
            meddle(patch, strike)
            with pytest.raises(Killed):
                run(folder, *options)
        for left in ("summary.json", "error.txt"):
            (folder / left).unlink(missing_ok=True)
    return run(folder, *options)


QUICK = ("sync", "async", "curriculum")  # fixed_lag: tests/integration/test_local_loop.py, too


@pytest.mark.in_turn
@pytest.mark.parametrize("mode", [m if m in QUICK else pytest.param(m, marks=pytest.mark.thorough) for m in MODES])
@pytest.mark.more_but("async")
def test_killed_runs_end_as_unbroken_ones(tmp_path: Path, mode: str) -> None:
    options = (*FAKED, *MODES[mode], "checkpoint.resume=auto")
    whole = run(tmp_path / "whole", *options)
    again = killed_and_resumed(tmp_path / "killed", whole, list(MODES).index(mode), *options)
    again.assert_ledger_whole()
    for one, other in zip(told(again), told(whole), strict=True):
        assert one == other


PART = "generator.cache={policy:heavy_hitters,share:0.5,window:4,every:2,compare_every:4}"


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("mode", "cache"),
    [
        ("async", "generator.cache=full"),
        *(pytest.param(mode, PART, marks=pytest.mark.thorough) for mode in ("async", "drain")),
    ],
)
@pytest.mark.more
def test_with_a_model_that_samples(tmp_path: Path, mode: str, cache: str) -> None:
    options = (*SAMPLED, *MODES[mode], cache, "checkpoint.resume=auto")
    whole = run(tmp_path / "whole", *options)
    again = killed_and_resumed(tmp_path / "killed", whole, 1, *options)
    for one, other in zip(told(again), told(whole), strict=True):
        assert one == other
