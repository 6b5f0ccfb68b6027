"""The reference service's queue, seats and settings, without a model."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.actors.messages import RolloutBundle
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.clock import run_virtual
from asyncrlhf.orchestrator.compose import load_config
from asyncrlhf.orchestrator.config import RunConfig
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.parts import build_runtime, placement_plan
from asyncrlhf.orchestrator.references import References, reference_notes, reference_spec
from asyncrlhf.orchestrator.scoring import Waiting
from asyncrlhf.orchestrator.state import GroupInProgress
from asyncrlhf.types import Payload, Prompt, RewardResult, RolloutInfo, ServiceResult
from tests.unit.learner.worlds import samples

SERVED = ("runtime=local", "algorithm=online_dpo", "reference=service", "num_generations=4", "batch_size=8")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("reference=nowhere", ["reference=nowhere is not known", "learner, service"]),
        ("reference.where=servce", ["reference.where=servce", "did you mean service?", "allowed: learner, service"]),
        ("reference.wrokers=2", ["reference.wrokers is not a setting", "did you mean reference.workers?"]),
        ("reference.workers=2", ["reference.workers=2 has no effect", "allowed: reference.where=service"]),
        ("reference=service reference.workers=0", ["reference.workers=0", ">= 1"]),
        ("reference=service reference.gpus=4", ["reference.gpus=4", "0 to 1", "learner.zero_stage=3"]),
        ("reference=service reference.gpus=-1", ["reference.gpus=-1", ">= 0"]),
        ("reference=service reference.dtype=int4", ["reference.dtype=int4", "auto, float32, bfloat16, float16"]),
        ("reference=service reference.token_budget=many", ["reference.token_budget=many", "a whole number"]),
    ],
)
def test_nonsense_is_one_sentence(typed: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(typed.split(" "))
    assert [word for word in words if word not in str(error.value)] == [], error.value


def test_an_algorithm_without_a_reference_starts_no_worker_and_says_so() -> None:
    config = load_config(["runtime=local", "algorithm=rloo", "reference=service", "reference.workers=3"])
    assert reference_spec(config) is None and "algorithm=rloo" in reference_notes(config)[0]
    assert not [name for name in placement_plan(config).seats if name.startswith("reference")]
    assert reference_notes(load_config([*SERVED])) == [] and reference_spec(load_config([*SERVED])) is not None


def test_the_workers_have_seats_beside_the_rewards() -> None:
    config = load_config([*SERVED, "reference.workers=2", "reference.threads=3", "cluster.placement=interleave"])
    plan = placement_plan(config)
    assert {plan.side_of(f"reference-{i}") for i in range(2)} == {plan.side_of("reward-0")} == {"rewards"}
    assert [plan.seats[f"reference-{i}"].demand() for i in range(2)] == [{"CPU": 3.0}] * 2
    assert len({plan.seats[name].group for name in ("reward-0", "reference-0", "reference-1", "generator-0")}) == 4
    assert placement_plan(load_config([*SERVED])).seats["reference-0"].demand() == {"CPU": 1.0}
    apart = placement_plan(load_config([*SERVED, "cluster.placement=separate"]))
    assert apart.side_of("reference-0") == "generators"
    gpus = load_config([*SERVED, "reference.gpus=0.5", "reference.workers=2", "cluster.placement=interleave"])
    assert placement_plan(gpus).total("GPU") == 1


def test_the_learner_is_told_that_it_needs_no_model(tmp_path: Path) -> None:
    runtime: Any = build_runtime(load_config([*SERVED]), tmp_path)
    assert runtime._learner_spec.reference_served and runtime._reference_spec.temperature == 1.0
    runtime = build_runtime(load_config([*SERVED, "reference=learner"]), tmp_path)
    assert not runtime._learner_spec.reference_served and runtime._reference_spec is None


def test_a_bundle_travels_with_the_logprobs_that_it_has() -> None:
    rollouts = [sample.rollout for sample in samples(groups=2, size=3)]
    rollouts[1] = replace(rollouts[1], ref_logprobs=np.arange(len(rollouts[1].response_ids), dtype=np.float32))
    rollouts[4] = replace(rollouts[4], ref_logprobs=-np.arange(len(rollouts[4].response_ids), dtype=np.float32))
    for given in (rollouts, [rollouts[0]], [rollouts[1], rollouts[4]], []):
        back = list(pickle.loads(pickle.dumps(RolloutBundle(given))))
        assert [r.rollout_id for r in back] == [r.rollout_id for r in given]
        for one, other in zip(given, back, strict=True):
            assert np.array_equal(one.response_ids, other.response_ids)
            if one.ref_logprobs is None:
                assert other.ref_logprobs is None
            else:
                assert np.array_equal(one.ref_logprobs, other.ref_logprobs)


class PaperWorker:
    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    async def complete(self, payloads: Sequence[Payload]) -> list[ServiceResult]:
        self.calls.append([p.index for p in payloads])
        await asyncio.sleep(1.0)
        return [ServiceResult(p.index, Payload("with log-probs", p.index)) for p in payloads]


class World:
    """Two groups of four under way, and workers that take a second for a call."""

    def __init__(self, budget: int, workers: int) -> None:
        config: RunConfig = load_config([*SERVED, f"reference.token_budget={budget}", "fusion.max_wait_ms=0"])
        self.state = build_state(config)
        prompt = Prompt("p", "p", np.arange(3))
        self.discarded: list[tuple[int, str]] = []
        for group in range(2):
            ids = set(range(group * 4, group * 4 + 4))
            self.state.gate.admit(0)
            self.state.groups[group] = GroupInProgress(group, prompt, 0.0, None, 0, set(ids), set(ids))
            for i in sorted(ids):
                self.state.ledger.admit(i, group, prompt, 0.0)
                self.state.ledger.start(i, "generator-0", 0)
        self.state.buffer.reserve(8)
        self.assembly = Assembly(self.state, lambda i, *rest: self.discarded.append((i, rest[-1])), lambda _: None)
        self.workers = [PaperWorker() for _ in range(workers)]
        self.worker = self.workers[0]
        self.references = References(self.state, self.assembly, list(self.workers))  # type: ignore[arg-type]

    def info(self, i: int) -> RolloutInfo:
        return RolloutInfo(i, i // 4, "g", 3, 7, 0, 0, "stop", self.state.now(), Payload("as sampled", i))

    def finish(self, *ids: int) -> None:
        for i in ids:
            assert self.assembly.generated(self.info(i))
            self.references.arrived(Waiting(self.info(i), 0))
        self.state.progressed()

    def score(self, *ids: int) -> None:
        for i in ids:
            self.assembly.scored(self.info(i), 0, RewardResult(i, float(i)))


def play(budget: int, story: Callable[[World], Any], workers: int = 1) -> World:
    async def main() -> World:
        world = World(budget, workers)
        tasks = [asyncio.create_task(world.references.serve(worker)) for worker in world.workers]  # type: ignore[arg-type]
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


def test_calls_hold_what_fits_the_budget_oldest_first() -> None:
    async def story(world: World) -> None:
        world.finish(3, 0, 1, 2, 4, 5)  # ten tokens each

    assert play(25, story).worker.calls == [[3, 0], [1, 2], [4, 5]]
    assert play(5, story).worker.calls == [[3], [0], [1], [2], [4], [5]], "one that is too long goes alone"
    assert play(1000, story).worker.calls == [[3, 0, 1, 2, 4, 5]]


def test_what_ends_at_one_time_is_spread_over_all_workers() -> None:
    async def story(world: World) -> None:
        world.finish(0, 1, 2, 3, 4, 5)

    world = play(1000, story, workers=3)
    assert sorted(worker.calls for worker in world.workers) == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_a_group_is_complete_with_both_in_either_order() -> None:
    async def story(world: World) -> None:
        world.finish(0, 1, 2, 3)
        world.score(0, 1)
        await asyncio.sleep(1.5)
        assert world.state.buffer.held == 0 and len(world.state.groups[0].scored) == 2
        world.score(2, 3)

    world = play(1000, story)
    (group,) = world.state.buffer.groups()
    assert [r.info.payload.ref for r in group.rollouts] == ["with log-probs"] * 4
    assert [r.info.payload.index for r in group.rollouts] == [r.info.rollout_id for r in group.rollouts]
    assert [r.reward for r in group.rollouts] == [0.0, 1.0, 2.0, 3.0]
    assert [r.referenced_at for r in group.rollouts] == [1.0] * 4
    assert [r.scored_at for r in group.rollouts] == [0.0, 0.0, 1.5, 1.5], "the reward's latency is its own"


def test_what_nobody_wants_any_more_is_not_computed() -> None:
    async def story(world: World) -> None:
        world.finish(0, 1)
        await asyncio.sleep(0.5)  # these two are in hand
        world.finish(2, 3, 4, 5)
        world.assembly.scored(world.info(3), 0, RewardResult(3, None, error="the reward failed"))
        world.assembly.abandon([1], "stale")

    world = play(1000, story)
    assert world.worker.calls == [[0, 1], [2]]
    assert world.references.queued == []
    assert (3, "the reward failed") in world.discarded
    world.state.ledger.check()


def test_failures_of_both_count_once() -> None:
    async def story(world: World) -> None:
        world.finish(0, 1, 2, 3)
        world.assembly.referenced(world.info(1), ServiceResult(1, None, error="no log-probs"))
        world.assembly.scored(world.info(1), 0, RewardResult(1, None, error="no reward"))
        world.score(0, 2, 3)

    world = play(1000, story)
    assert world.discarded == [(1, "no log-probs")]
    assert world.state.ledger.counts()["failed"] == 1
    (group,) = world.state.buffer.groups()
    assert [r.info.rollout_id for r in group.rollouts] == [0, 2, 3]
