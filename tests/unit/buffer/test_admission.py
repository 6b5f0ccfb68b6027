"""Gates: how much may start, for which step, and which settings are refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from asyncrlhf.buffer.admission import LagGate, StalenessGate, resolve_capacity
from asyncrlhf.buffer.async_config import AsyncConfig, BufferConfig
from asyncrlhf.buffer.checks import validate_flow
from asyncrlhf.errors import ConfigError, StaleBatchError


@pytest.mark.parametrize("eta", range(4))
def test_staleness_gate_admits_up_to_the_formula(eta: int) -> None:
    gate = StalenessGate(12, eta, num_generations=4)
    for version in range(5):
        while gate.room(version):
            gate.admit(version)
        assert gate.state_dict()["places"] * 4 == (version + eta + 1) * 12
        with pytest.raises(StaleBatchError, match=f"max_staleness={eta}"):
            gate.admit(version)


def test_oldest_first_consumption_meets_the_bound_exactly() -> None:
    """With every place used, a group admitted at h is consumed at h + eta at the latest, and some are."""
    gate, eta, born = StalenessGate(3, 2), 2, []
    worst = 0
    for version in range(10):
        while gate.room(version):
            gate.admit(version)
            born.append(version)
        worst = max([worst, *(version - born[version * 3 + i] for i in range(3))])
    assert worst == eta


def test_an_old_replica_gets_less_room() -> None:
    gate = StalenessGate(4, 1, num_generations=2)
    assert [gate.room(v) for v in (0, 1, 2)] == [8, 12, 16]


def test_a_lead_closes_the_gate_before_the_bound_and_never_opens_it_beyond() -> None:
    gate = StalenessGate(8, 3, num_generations=2)
    gate.pace(6)  # a batch and a half
    assert [gate.room(v) for v in (0, 1)] == [20, 28]
    for _ in range(10):
        gate.admit(0)
    assert gate.ahead(0) == 10 and gate.ahead(1) == 6 and gate.room(0) == 0 and gate.room(1) == 8
    gate.pace(100)
    assert gate.room(0) == 32 - 20, "the bound's"


def test_lost_groups_free_their_places_and_reuse_takes_several() -> None:
    gate = StalenessGate(4, 2, max_reuse=3)
    assert gate.room(0) == 4
    for _ in range(4):
        gate.admit(0)
    assert gate.room(0) == 0
    gate.release(2)
    assert gate.room(0) == 0  # one place short of a group's three uses
    gate.release(1)
    assert gate.room(0) == 1
    gate.release()
    assert gate.room(0) == 2


def test_lag_gate_schedules_each_step_for_its_version() -> None:
    gate = LagGate(6, 2, num_generations=3)
    made: list[tuple[int, int]] = []
    for version in range(6):
        while gate.room(version):
            step = gate.admit(version)
            made.append((step, version))
    assert made == [(t, max(0, t - 2)) for t in range(8) for _ in range(2)]


def test_lag_gate_refuses_a_late_version_and_keeps_failed_places() -> None:
    gate = LagGate(2, 1)
    gate.admit(0)
    gate.release()
    assert gate.room(0) == 3
    with pytest.raises(
        StaleBatchError, match="step 0 was admitted on a replica at version 1; a lag of 1 needs version 0"
    ):
        gate.admit(1)


def test_a_resumed_lag_gate_makes_unfinished_steps_with_the_checkpoint() -> None:
    gate = LagGate(1, 2)
    for version in (0, 1):
        while gate.room(version):
            gate.admit(version)
    other = LagGate(1, 2)
    other.load_state_dict(gate.state_dict(), version=3)
    assert [other.admit(3) for _ in range(2)] == [4, 5]
    assert other.admit(4) == 6
    with pytest.raises(StaleBatchError):
        other.admit(6)


def test_known_steps_end_admission() -> None:
    for gate in (StalenessGate(4, 3, steps=2), LagGate(4, 3, steps=2)):
        assert gate.room(0) == gate.room(50) == 8


def test_replay_takes_places_from_fresh_groups() -> None:
    """Three groups a step, one of them replay's from step 2 on, fresh ones asked for up to staleness 3."""
    gate = StalenessGate(3, 3, replay_groups=1, warmup_steps=2)
    assert gate.room(0) == 3 + 3 + 2 + 2
    for _ in range(10):
        gate.admit(0)
    assert gate.room(0) == 0
    gate.follow(2, 0, 3)  # the batch of step 2 finds nothing to replay and takes three fresh groups
    assert gate.room(2) == 6 + 3 + 3 * 2 - 10
    gate.follow(2, 1, 3)
    assert gate.room(2) == 6 + 2 + 3 * 2 - 10
    assert gate.room(0) == 0
    gate.follow(2, 1, 0)
    assert gate.room(2) == 0, "a bound that shrank"


@pytest.mark.parametrize("found", [0, 1])
def test_with_replay_too_the_last_group_is_consumed_at_the_bound(found: int) -> None:
    """Oldest first, whether replay finds its group in each step or never does."""
    gate, eta, born, taken, replayed, worst = StalenessGate(3, 2, replay_groups=1), 2, [], 0, 0, 0
    for version in range(12):
        gate.follow(version, replayed + (found if version else 0), eta)
        while gate.room(version):
            gate.admit(version)
            born.append(version)
        fresh = 3 - (found if version else 0)
        worst = max(worst, *(version - b for b in born[taken : taken + fresh]))
        taken, replayed = taken + fresh, replayed + 3 - fresh
        assert taken <= len(born), "starved"
    assert worst == eta


@pytest.mark.parametrize(
    ("config", "buffer", "sentence"),
    [
        (AsyncConfig(), {"max_reuse": 1}, "buffer.max_reuse=1 can never replay; allowed: max_reuse >= 2"),
        (AsyncConfig(max_staleness=0), {}, "async.max_staleness=0 can never replay"),
        (AsyncConfig(), {"max_age": 3}, "buffer.max_age=3 passes async.max_staleness=2"),
        (AsyncConfig(), {"replay_fraction": 0.2}, "of a batch of 4 groups is less than one whole group"),
        (AsyncConfig(), {"capacity": 15}, "buffer.capacity=15 leaves replay no room .* or >= 16"),
        (AsyncConfig(), {"replay_fraction": 0.0, "max_age": 1}, "buffer.max_age=1 has nothing to hold back"),
        (AsyncConfig(), {"replay_fraction": 0.0, "warmup_steps": 1}, "buffer.warmup_steps=1 has nothing to hold back"),
        (AsyncConfig(), {"sampling_correction": 0.5}, "buffer.sampling_correction=0.5 has nothing to correct"),
        (AsyncConfig(mode="one_step"), {"max_reuse": 1}, "replay_fraction, max_age and warmup_steps break the exact"),
        (AsyncConfig(adaptive=True, min_staleness=0), {"replay_fraction": 0.0}, "passes async.min_staleness=0"),
    ],
)
def test_replay_that_cannot_be_is_refused(config: AsyncConfig, buffer: dict[str, Any], sentence: str) -> None:
    settings = BufferConfig(**{"replay_fraction": 0.5, "max_reuse": 2, **buffer})
    with pytest.raises(ConfigError, match=sentence):
        validate_flow(config, settings, batch_size=8, num_generations=2, publish_every=1)


def test_publishing_must_keep_up_with_what_replay_leaves_of_the_bound() -> None:
    settings = BufferConfig(replay_fraction=1.0, max_reuse=2)
    validate_flow(AsyncConfig(max_staleness=4), settings, batch_size=8, num_generations=2, publish_every=3)
    with pytest.raises(ConfigError, match=r"publish_every=4 .* keeps half of it for replay.* that half"):
        validate_flow(AsyncConfig(max_staleness=4), settings, batch_size=8, num_generations=2, publish_every=4)


def test_a_purge_after_every_step_leaves_nothing_to_reuse() -> None:
    shape: dict[str, Any] = {"batch_size": 8, "num_generations": 2, "purge_on_publish": True}
    config, settings = AsyncConfig(max_staleness=4), BufferConfig(max_reuse=2)
    validate_flow(config, settings, **shape, publish_every=2)
    with pytest.raises(ConfigError, match="purge_on_publish empties the buffer after every step"):
        validate_flow(config, settings, **shape, publish_every=1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"adaptive": True, "mode": "sync"}, "async.adaptive=true has no bound to move in async.mode=sync"),
        ({"adaptive": True, "min_staleness": 2}, "min_staleness=2 and async.max_staleness=2; allowed: min_staleness <"),
        ({"ess_floor": 0.0}, "async.ess_floor=0.0 is out of range; allowed: > 0 and <= 1"),
        ({"min_staleness": -1}, "async.min_staleness=-1 is out of range"),
    ],
)
def test_controller_settings_are_checked(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        AsyncConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"replay_fraction": -0.1}, "buffer.replay_fraction=-0.1 is out of range; allowed: >= 0"),
        ({"max_age": -1}, "buffer.max_age=-1 is out of range"),
        ({"warmup_steps": -1}, "buffer.warmup_steps=-1 is out of range"),
        ({"sampling_correction": 1.5}, "buffer.sampling_correction=1.5 is out of range; allowed: >= 0 and <= 1"),
        ({"sampling": "advantages"}, "did you mean advantage"),
    ],
)
def test_buffer_settings_are_checked(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        BufferConfig(**settings)


@pytest.mark.parametrize(("fraction", "groups", "expected"), [(0.5, 3, 1), (0.5, 16, 5), (1.0, 4, 2), (2e9, 4, 3)])
def test_the_share_of_replay(fraction: float, groups: int, expected: int) -> None:
    assert BufferConfig(replay_fraction=fraction).replay_groups(groups) == expected


@pytest.mark.parametrize(
    ("config", "buffer", "publish_every", "sentence"),
    [
        (AsyncConfig(max_staleness=1), BufferConfig(), 3, "weights.publish_every=3 with async.max_staleness=1"),
        (AsyncConfig(max_staleness=1), BufferConfig(max_reuse=3), 1, "buffer.max_reuse=3 with"),
        (AsyncConfig(max_staleness=2), BufferConfig(max_reuse=2), 3, "buffer.max_reuse=2 with"),
        (AsyncConfig(), BufferConfig(capacity=7), 1, "buffer.capacity=7 cannot hold one batch"),
        (AsyncConfig(mode="sync"), BufferConfig(), 2, "breaks the exact schedule of async.mode=sync; allowed: 1"),
        (AsyncConfig(mode="one_step"), BufferConfig(max_reuse=2), 1, "buffer.max_reuse=2 breaks the exact schedule"),
        (
            AsyncConfig(mode="one_step"),
            BufferConfig(sampling="lifo"),
            1,
            "has nothing to choose in async.mode=one_step",
        ),
        (AsyncConfig(mode="fixed_lag", lag=4), BufferConfig(capacity=39), 1, "allowed: 0 .automatic. or >= 40"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    config: AsyncConfig, buffer: BufferConfig, publish_every: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        validate_flow(config, buffer, batch_size=8, num_generations=4, publish_every=publish_every)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (AsyncConfig(mode="one_step"), True),
        (AsyncConfig(mode="fixed_lag", lag=4), True),
        (AsyncConfig(mode="fixed_lag", lag=0), False),
        (AsyncConfig(mode="sync"), False),
        (AsyncConfig(), False),
    ],
)
def test_a_curriculum_needs_all_answers_or_promises_no_order(config: AsyncConfig, refused: bool) -> None:
    shape: Any = {"batch_size": 8, "num_generations": 4, "publish_every": 1, "curriculum": "regret"}
    with pytest.raises(ConfigError, match=f"mode={config.mode} see alike") if refused else nullcontext():
        validate_flow(config, BufferConfig(), **shape)


def test_batches_hold_whole_groups() -> None:
    with pytest.raises(ConfigError, match="batch_size=10 is not a multiple of num_generations=4"):
        validate_flow(AsyncConfig(), BufferConfig(), batch_size=10, num_generations=4, publish_every=1)


@pytest.mark.parametrize(
    ("config", "buffer"),
    [
        (AsyncConfig(max_staleness=1), BufferConfig(max_reuse=2)),
        (AsyncConfig(max_staleness=3), BufferConfig(max_reuse=2, sampling="reward_spread", capacity=8)),
        (AsyncConfig(mode="fixed_lag", lag=4), BufferConfig(capacity=40)),
        (AsyncConfig(mode="sync"), BufferConfig(capacity=8)),
    ],
)
def test_the_edge_of_what_is_allowed(config: AsyncConfig, buffer: BufferConfig) -> None:
    validate_flow(config, buffer, batch_size=8, num_generations=4, publish_every=1)


def test_automatic_capacity() -> None:
    assert resolve_capacity(BufferConfig(), AsyncConfig(max_staleness=3), 8) == 64
    assert resolve_capacity(BufferConfig(), AsyncConfig(mode="sync"), 8) == 16
    assert resolve_capacity(BufferConfig(capacity=20), AsyncConfig(), 8) == 20
