"""Batches of the buffer against a reference that sorts all that is held, at every look, as the definitions say."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from asyncrlhf.buffer.async_config import AsyncConfig, BufferConfig
from asyncrlhf.buffer.replay import ReplayBuffer
from asyncrlhf.buffer.sampling import PRIORITY, priority
from asyncrlhf.errors import StaleBatchError
from asyncrlhf.types import RolloutGroup
from tests.unit.buffer.world import make_group


@dataclass
class Entry:
    group: RolloutGroup
    uses: int = 0

    @property
    def number(self) -> int:
        return self.group.group_id


class Sorted:
    """Groups in the order of arrival in a list; every question is answered by sorting and counting them."""

    def __init__(self, config: BufferConfig, flow: AsyncConfig, groups: int, seed: int) -> None:
        self.config, self.flow, self.groups = config, flow, groups
        self.held: list[Entry] = []
        self.rng = np.random.Generator(np.random.PCG64(seed))

    def over(self, entry: Entry, version: int) -> bool:
        eta, age = self.flow.bound, version - min(r.min_version for r in entry.group.rollouts)
        if self.config.replays and entry.uses:
            return age > min(self.config.max_age or eta, eta)
        if self.flow.over_stale == "downweight":
            return False
        if self.flow.over_stale == "mask":
            return all(version - r.max_version > eta for r in entry.group.rollouts)
        return age > eta

    def must_wait(self, version: int, flying: list[int]) -> bool:
        """For any k: over k batches of unfinished groups must be trained within the k steps after this one."""
        eta = self.flow.bound
        return any(
            sum(v - (version - eta) <= k for v in flying if v <= version) > k * self.groups for k in range(eta + 1)
        )

    def due(self, version: int, flying: list[int]) -> int:
        """Groups that must be in this batch so that no later one overflows."""
        eta = self.flow.bound
        begun = [e.group.min_version for e in self.held if not e.uses] + flying
        return max(
            0, *(sum(v <= version - eta + k for v in begun) - k * self.groups for k in range(max(1, eta)))
        )  # fmt: skip

    def take(self, version: int, flying: list[int]) -> list[int] | None:
        urgent: list[Entry] = []
        if self.flow.over_stale == "wait":
            if self.must_wait(version, flying):
                return None
            unused = sorted((e for e in self.held if not e.uses), key=lambda e: e.group.min_version)
            need = self.due(version, flying)
            if need > self.groups or any(self.over(e, version) for e in unused):
                raise StaleBatchError("the bound cannot be kept")
            urgent = unused[:need]
        able = [e for e in self.held if not self.over(e, version)]
        again = [e for e in able if self.config.replays and e.uses]
        rest = [e for e in able if e not in again and e not in urgent]
        share = self.config.replay_groups(self.groups) if version >= self.config.warmup_steps else 0
        replayed = min(share, len(again), self.groups - len(urgent))
        fresh = self.groups - len(urgent) - replayed
        if len(rest) < fresh:
            return None
        chosen = urgent + self.draw("fifo" if self.config.replays else self.config.sampling, rest, fresh, version)
        chosen += self.draw(self.config.sampling, again, replayed, version) if replayed else []
        for entry in chosen:
            entry.uses += 1
        self.held = [e for e in self.held if e.uses < self.config.max_reuse]
        return sorted(e.number for e in chosen)

    def draw(self, sampling: str, entries: list[Entry], count: int, version: int) -> list[Entry]:
        if sampling in ("fifo", "lifo"):
            return (entries if sampling == "fifo" else list(reversed(entries)))[:count]
        entries = sorted(entries, key=lambda e: e.number)
        if sampling == "uniform":
            return [entries[i] for i in self.rng.permutation(len(entries))[:count]]
        rates = [PRIORITY[sampling](e.group, version) for e in entries]
        return [entries[i] for i, _ in priority(rates, count, self.rng)]


def outcome(take: Any, *arguments: Any) -> Any:
    try:
        return take(*arguments)
    except StaleBatchError:
        return "stale"


@pytest.mark.more
@pytest.mark.in_turn
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_batches_are_those_of_the_sorted_reference(data: st.DataObject) -> None:
    draw = data.draw
    reuse = draw(st.integers(1, 3))
    config = BufferConfig(
        capacity=1000,
        sampling=draw(st.sampled_from(["fifo", "lifo", "uniform", "reward_spread", "age"])),
        max_reuse=reuse,
        replay_fraction=draw(st.sampled_from([0.0, 1.0])) if reuse > 1 else 0.0,
        max_age=draw(st.integers(0, 2)),
        warmup_steps=draw(st.integers(0, 2)),
    )
    over_stale = draw(st.sampled_from(["drop", "mask", "wait", "downweight"]))
    flow = AsyncConfig(max_staleness=draw(st.integers(0, 3)), over_stale=over_stale)
    groups = draw(st.integers(1, 3))
    buffer = ReplayBuffer(config, flow, batch_size=2 * groups, num_generations=2, seed=3)
    reference = Sorted(config, flow, groups, seed=3)
    ids = iter(draw(st.permutations(range(24))))
    version = 0
    for _ in range(draw(st.integers(1, 12))):
        for _ in range(draw(st.integers(0, 4))):
            if (group_id := next(ids, None)) is None:
                break
            low = draw(st.integers(max(0, version - 2), version))
            rewards = (0.0, draw(st.sampled_from([0.5, 1.0, 2.0])))
            group = make_group(group_id, low, draw(st.integers(low, version)), rewards)
            buffer.reserve(2)
            buffer.add(group)
            reference.held.append(Entry(group))
        flying = draw(st.lists(st.integers(0, version), max_size=4))
        before = copy.deepcopy(buffer.state_dict())
        ready = buffer.ready(version, flying)
        assert buffer.state_dict() == before, "a look changes nothing"
        expected = outcome(reference.take, version, flying)
        taken = outcome(buffer.take, version, flying)
        assert (taken if taken in (None, "stale") else [t.group_id for t in taken]) == expected
        if ready or expected != "stale":
            assert ready == (expected is not None)
        if expected == "stale":
            return
        if expected is not None:
            version += 1
            gone = {evicted.group_id for evicted in buffer.evict_stale(version)}
            reference.held = [e for e in reference.held if e.number not in gone]
