"""The critic service's queue, versions, seats and settings, without a model."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.actors.messages import RolloutBundle
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.parts import build_runtime, critic_notes, placement_plan
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.critics import Critics, CriticVersions
from asyncrlhf.orchestrator.references import References
from asyncrlhf.orchestrator.service import Waiting
from asyncrlhf.orchestrator.state import GroupInProgress
from asyncrlhf.types import Payload, Prompt, RewardResult, RolloutInfo, ServiceResult
from tests.unit.learner.worlds import samples

SERVED = ("runtime=local", "algorithm=ppo", "critic=service", "num_generations=4", "batch_size=8")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("critic=nowhere", ["critic=nowhere is not known", "learner, service"]),
        ("critic.where=servce", ["critic.where=servce", "did you mean service?", "allowed: learner, service"]),
        ("critic.wrokers=2", ["critic.wrokers is not a setting", "did you mean critic.workers?"]),
        ("critic.workers=2", ["critic.workers=2 has no effect", "allowed: critic.where=service"]),
        ("critic=service critic.workers=0", ["critic.workers=0", ">= 1"]),
        ("critic=service critic.gpus=4", ["critic.gpus=4", "0 to 1", "learner.zero_stage=3"]),
        ("critic=service critic.max_restarts=-1", ["critic.max_restarts=-1", ">= 0"]),
        ("critic=service critic.token_budget=many", ["critic.token_budget=many", "a whole number"]),
        (
            "critic=service algorithm=ppo learner.sharding=fsdp2",
            ["critic.where=service", "learner.sharding=fsdp2", "allowed: critic.where=learner"],
        ),
        (
            "critic=service algorithm=ppo learner=deepspeed learner.zero_stage=3",
            ["critic.where=service", "learner.zero_stage=3", "allowed: critic.where=learner"],
        ),
    ],
)
def test_nonsense_is_one_sentence(typed: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(typed.split(" "))
    assert [word for word in words if word not in str(error.value)] == [], error.value


def test_an_algorithm_without_a_critic_starts_no_worker_and_says_so() -> None:
    config = load_config(["runtime=local", "algorithm=rloo", "critic=service", "critic.workers=3"])
    assert "algorithm=rloo has no critic" in critic_notes(config)[0]
    assert not [name for name in placement_plan(config).seats if name.startswith("critic")]
    assert critic_notes(load_config([*SERVED])) == []
    load_config(["algorithm=rloo", "critic=service", "learner.sharding=fsdp2"])  # nothing to hand out


def test_the_workers_have_seats_beside_the_rewards() -> None:
    config = load_config([*SERVED, "critic.workers=2", "critic.threads=3", "cluster.placement=interleave"])
    plan = placement_plan(config)
    assert {plan.side_of(f"critic-{i}") for i in range(2)} == {plan.side_of("reward-0")} == {"rewards"}
    assert [plan.seats[f"critic-{i}"].demand() for i in range(2)] == [{"CPU": 3.0}] * 2
    gpus = load_config([*SERVED, "critic.gpus=0.5", "critic.workers=2", "cluster.placement=interleave"])
    assert placement_plan(gpus).total("GPU") == 1


def test_learner_and_workers_are_told_of_each_other(tmp_path: Path) -> None:
    runtime: Any = build_runtime(load_config([*SERVED]), tmp_path)
    assert runtime._learner_spec.critic_served and runtime._critic_spec.critic.workers == 1
    runtime = build_runtime(load_config([*SERVED, "critic=learner"]), tmp_path)
    assert not runtime._learner_spec.critic_served and runtime._critic_spec is None


def test_a_bundle_travels_with_the_values_that_it_has() -> None:
    rollouts = [sample.rollout for sample in samples(groups=2, size=3)]
    numbers = [np.arange(len(r.response_ids), dtype=np.float32) for r in rollouts]
    rollouts[1] = replace(rollouts[1], values=numbers[1], critic_version=0)
    rollouts[4] = replace(rollouts[4], values=-numbers[4], critic_version=7, ref_logprobs=numbers[4] + 9)
    for given in (rollouts, [rollouts[0]], [rollouts[1], rollouts[4]]):
        back = list(pickle.loads(pickle.dumps(RolloutBundle(given))))
        assert [(r.rollout_id, r.critic_version) for r in back] == [(r.rollout_id, r.critic_version) for r in given]
        for one, other in zip(given, back, strict=True):
            for name in ("values", "ref_logprobs", "response_ids"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name  # of None, too


@dataclass(frozen=True)
class PaperTicket:
    version: int


class PaperLearner:
    """Its snapshot is of whichever version the test says."""

    version = 0

    async def critic_ticket(self) -> PaperTicket:
        await asyncio.sleep(0.1)
        return PaperTicket(self.version)


class PaperRuntime:
    def __init__(self) -> None:
        self.learner = PaperLearner()


class PaperCritic:
    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int]]] = []

    async def value(self, payloads: Sequence[Payload], ticket: PaperTicket) -> list[ServiceResult]:
        self.calls.append((ticket.version, [p.index for p in payloads]))
        await asyncio.sleep(1.0)
        return [ServiceResult(p.index, Payload([*p.ref, "values"], p.index)) for p in payloads]


class PaperReference:
    async def complete(self, payloads: Sequence[Payload]) -> list[ServiceResult]:
        await asyncio.sleep(2.0)
        return [
            ServiceResult(p.index, None, error="no log-probs")
            if p.index == 5
            else ServiceResult(p.index, Payload([*p.ref, "log-probs"], p.index))
            for p in payloads
        ]


class World:
    """Two groups of four under way; the first was sampled by version 0 and the second by version 1."""

    def __init__(self, *overrides: str) -> None:
        config = load_config([*SERVED, "fusion.max_wait_ms=0", *overrides])
        self.state = build_state(config)
        prompt = Prompt("p", "p", np.arange(3))
        self.discarded: list[tuple[int, str]] = []
        for group in range(2):
            ids = set(range(group * 4, group * 4 + 4))
            if not self.state.scheduled:  # whose gate would ask for a whole run's order
                self.state.gate.admit(group)
            step = 0 if self.state.scheduled else None
            self.state.groups[group] = GroupInProgress(group, prompt, 0.0, step, group, set(ids), set(ids))
            for i in sorted(ids):
                self.state.ledger.admit(i, group, prompt, 0.0)
                self.state.ledger.start(i, "generator-0", 0)
        self.state.buffer.reserve(8)
        self.assembly = Assembly(self.state, lambda i, *rest: self.discarded.append((i, rest[-1])), lambda _: None)
        self.runtime = PaperRuntime()
        self.versions = CriticVersions(self.state, self.runtime)  # type: ignore[arg-type]
        self.worker = PaperCritic()
        self.critics = Critics(self.state, self.assembly, [self.worker], self.versions)
        reference = PaperReference()
        self.references = References(self.state, self.assembly, [reference], self.critics)
        self.loops = [self.critics.serve(self.worker), self.references.serve(reference)]

    async def publish(self, version: int) -> None:
        self.runtime.learner.version = version
        await self.versions.hand_over()

    def info(self, i: int) -> RolloutInfo:
        return RolloutInfo(i, i // 4, "g", 3, 7, i // 4, i // 4, "stop", self.state.now(), Payload([], i))

    def finish(self, *ids: int) -> None:
        first = self.references if self.state.config.reference_served else self.critics
        for i in ids:
            assert self.assembly.generated(self.info(i))
            first.arrived(Waiting(self.info(i), 0))
            self.assembly.scored(self.info(i), 0, RewardResult(i, float(i)))
        self.state.progressed()


def play(story: Callable[[World], Any], *overrides: str) -> World:
    async def main() -> World:
        world = World(*overrides)
        tasks = [asyncio.create_task(served) for served in world.loops]
        try:
            await story(world)
            await asyncio.sleep(20.0)
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
        return world

    made: World = run_virtual(main())
    return made


async def _young_before_old(world: World) -> None:
    await world.publish(0)
    world.finish(4, 0, 5, 1)
    await asyncio.sleep(5.0)
    world.asked_before = list(world.worker.calls)  # type: ignore[attr-defined]
    await world.publish(1)
    world.finish(2)


def test_a_rollout_waits_for_a_critic_no_older_than_itself() -> None:
    world: Any = play(_young_before_old)
    assert world.asked_before == [(0, [0, 1])]
    assert world.worker.calls[1:] == [(1, [4, 5, 2])], "a free run asks the newest"
    assert world.critics.queued == []


def test_in_a_schedule_the_version_that_sampled_answers() -> None:
    world: Any = play(_young_before_old, "async.mode=one_step")
    assert world.asked_before == [(0, [0, 1])]
    assert world.worker.calls[1:] == [(1, [4, 5]), (0, [2])]


def test_versions_are_kept_for_as_long_as_a_schedule_wants_them() -> None:
    async def story(world: World) -> None:
        world.held = []  # type: ignore[attr-defined]
        for version in (0, 1, 2):
            world.state.published_version = version - 1
            await world.publish(version)
            world.held.append(sorted(world.versions._tickets))  # type: ignore[attr-defined]
            if version == 0:
                world.finish(0, 1, 2, 3)
                await asyncio.sleep(5.0)

    held: Any = play(story, "async.mode=fixed_lag", "async.lag=2")
    assert held.held == [[0], [0, 1], [1, 2]], (
        "version 0 has no group left, but replicas that hold it until version 1 is published"
    )
    free: Any = play(story)
    assert free.held == [[0], [1], [2]]


def test_behind_a_reference_a_rollout_has_what_both_gave() -> None:
    async def story(world: World) -> None:
        await world.publish(1)
        world.finish(0, 1, 2, 3, 4, 5)

    world = play(story, "reference=service", "algorithm.kl=reward", "algorithm.beta=0.1")
    assert world.worker.calls == [(1, [0, 1, 2, 3, 4])]
    assert world.discarded == [(5, "no log-probs")]
    (group,) = world.state.buffer.groups()
    assert [r.info.payload.ref for r in group.rollouts] == [["log-probs", "values"]] * 4
    assert [(r.referenced_at, r.valued_at) for r in group.rollouts] == [(2.1, 3.1)] * 4
    (other,) = world.state.groups.values()
    assert [r.info.rollout_id for r in other.scored] == [4] and other.unscored == {6, 7}


def test_failures_of_both_count_once_and_leave_nothing_behind() -> None:
    async def story(world: World) -> None:
        await world.publish(0)
        world.assembly.generated(world.info(0))
        world.assembly.valued(world.info(0), ServiceResult(0, None, error="no values"))
        world.assembly.scored(world.info(0), 0, RewardResult(0, None, error="no reward"))

    world = play(story)
    assert world.discarded == [(0, "no values")]
    assert world.state.ledger.counts()["failed"] == 1
