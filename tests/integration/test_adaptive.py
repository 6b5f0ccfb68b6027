"""The staleness bound that follows the effective sample size, through the whole loop on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.cluster.local_runtime import LocalLearner
from asyncrlhf.orchestrator import adaptive
from asyncrlhf.records.show.progress import Progress
from tests.integration.test_local_loop import interrupt_after
from tests.loop import FAKE, run, train_nothing

ADAPTIVE = (
    *FAKE,
    "generator.replicas=8",
    "generator.slots=4",
    "generator.fake.tail_probability=0.02",
    "generator.fake.latency_max_ratio=30",
    "generator.fake.latency_median=0.05",
    "learner.virtual_step_seconds=0.1",
    "async=adaptive",
)


def forced(monkeypatch: pytest.MonkeyPatch, ess: Callable[[int], float]) -> None:
    """Have the learner report this ESS, by the version that the step began with."""
    train_nothing(monkeypatch)
    monkeypatch.setattr(adaptive, "STEPS", 2)
    monkeypatch.setattr(adaptive, "GOOD_LOOKS", 2)
    original = LocalLearner.train

    async def train(self: LocalLearner, items: Sequence[Any]) -> Any:
        version = self.worker.backend.policy_version
        result = await original(self, items)
        return replace(result, metrics={**result.metrics, "ess_fraction_seq": ess(version)})

    monkeypatch.setattr(LocalLearner, "train", train)


def low_from_10_to_16(version: int) -> float:
    return 0.1 if 10 <= version < 16 else 0.9


@pytest.mark.in_turn
@pytest.mark.parametrize("policy", ["drop", "mask", "wait", "downweight"])
@pytest.mark.more_but(every=4)
def test_the_bound_shrinks_under_a_low_ess_and_grows_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Progress, "message", lambda self, text: told.append(text))
    forced(monkeypatch, low_from_10_to_16)
    done = run(tmp_path, *ADAPTIVE, "steps=50", f"async.over_stale={policy}")
    done.assert_ledger_whole()
    bounds = [row["staleness_bound"] for row in done.metrics]
    # Looks after steps 12, 14 and 16 halve 8 to 1; from then on every fourth step adds one.
    expected = (
        [8] * 12 + [4] * 2 + [2] * 2 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4 + [6] * 4 + [7] * 4 + [8] * 6
    )
    assert bounds == expected
    changes = [text for text in told if text.startswith("Staleness bound ")]
    assert len(changes) == 10
    assert changes[0] == ("Staleness bound 8 -> 4: ess_fraction_seq was 0.10 over 2 steps, under async.ess_floor=0.5.")
    ages = [row["staleness_max"] for row in done.metrics]
    assert max(ages[:12]) > 4, "the first bound was meant to be used"
    assert max(ages) <= 8 or policy in ("mask", "downweight")
    if policy == "drop":
        assert all(age <= bound for age, bound in zip(ages, bounds, strict=True))
        assert done.summary["ledger"]["dropped"]["stale"] > 0
    if policy == "wait":
        assert done.summary["ledger"]["dropped"].get("stale", 0) == 0
        # What was begun under the old bound is trained first; then the new one holds.
        assert all(age <= bound for age, bound in zip(ages[24:], bounds[24:], strict=True))
    if policy == "mask":
        for _, group in done.trained.groupby("group_id"):
            newest = max(max(versions) for versions in group.policy_versions)
            assert all(newest >= at[-1] - bounds[at[-1]] for at in group.consumed_at_version)


def test_a_good_ess_leaves_the_bound_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, lambda version: 0.9)
    done = run(tmp_path, *ADAPTIVE, "steps=20", "async.max_staleness=3")
    assert {row["staleness_bound"] for row in done.metrics} == {3}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "extra",
    [
        ("buffer=fresh_replay", "buffer.warmup_steps=4"),
        ("buffer.max_reuse=2", "async.min_staleness=1"),
        ("weights.publish_every=2", "async.min_staleness=1", "async.on_weight_update=drain"),
        ("async.over_stale=wait", "buffer.sampling=lifo"),
    ],
)
@pytest.mark.more_but(every=4)
def test_the_least_bound_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...]) -> None:
    forced(monkeypatch, lambda version: 0.1 if version % 20 < 12 else 1.0)
    done = run(tmp_path, *ADAPTIVE, "steps=40", *extra)
    done.assert_ledger_whole()
    least = 1 if any(option.startswith("async.min_staleness") for option in extra) else 0
    assert min(row["staleness_bound"] for row in done.metrics) == least
    assert len(done.metrics) == 40
    if "async.over_stale=wait" not in extra:
        assert all(row["staleness_max"] <= row["staleness_bound"] for row in done.metrics)


def test_a_resumed_run_goes_on_with_the_bound_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, low_from_10_to_16)
    options = (*ADAPTIVE, "steps=26", "checkpoint.resume=auto")
    interrupt_after(tmp_path, 17, *options)
    resumed = run(tmp_path, *options)
    resumed.assert_ledger_whole()
    bounds = [row["staleness_bound"] for row in resumed.metrics]
    assert bounds == [8] * 12 + [4] * 2 + [2] * 2 + [1] * 4 + [2] * 4 + [3] * 2
    assert all(row["staleness_max"] <= row["staleness_bound"] for row in resumed.metrics)
