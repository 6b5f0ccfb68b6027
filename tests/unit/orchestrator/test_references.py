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
from transformers import MistralConfig

from asyncrlhf.actors.messages import RolloutBundle
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.handles import WorkerLostError
from asyncrlhf.cluster.parts import build_runtime, placement_plan, reference_notes, reference_spec
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError, ReplicaError
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.references import References, fingerprint
from asyncrlhf.orchestrator.scoring import Waiting
from asyncrlhf.orchestrator.state import GroupInProgress
from asyncrlhf.readahead.messages import ChunkInfo, Prefilled
from asyncrlhf.readahead.outlook import reference_note
from asyncrlhf.readahead.owners import PATIENCE_SECONDS, SWEEP_SECONDS
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
        self.read: list[int] = []
        self.released: list[int] = []
        self.seconds = 1.0
        self.error: ReplicaError | None = None
        self.answer = Prefilled(True)

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        self.released += released
        self.read += [chunk.rollout_id for chunk in chunks]
        if self.error is not None:
            raise self.error
        return self.answer

    async def complete(self, payloads: Sequence[Payload]) -> list[ServiceResult]:
        self.calls.append([p.index for p in payloads])
        await asyncio.sleep(self.seconds)
        return [ServiceResult(p.index, Payload("with log-probs", p.index)) for p in payloads]


class World:
    """Two groups of four under way, and workers that take a second for a call."""

    def __init__(self, budget: int, workers: int, *settings: str) -> None:
        typed = [*SERVED, f"reference.token_budget={budget}", "fusion.max_wait_ms=0", *settings]
        config: RunConfig = load_config(typed)
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
        self.messages: list[str] = []
        self.assembly = Assembly(
            self.state, lambda i, *rest: self.discarded.append((i, rest[-1])), self.messages.append
        )
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

    def arrive(self, *ids: int, start: int = 0, length: int = 8) -> None:
        self.references.chunks_arrived([ChunkInfo(i, start, length, Payload("chunks", i)) for i in ids])

    def score(self, *ids: int) -> None:
        for i in ids:
            self.assembly.scored(self.info(i), 0, RewardResult(i, float(i)))


def play(budget: int, story: Callable[[World], Any], workers: int = 1, *settings: str) -> World:
    async def main() -> World:
        world = World(budget, workers, *settings)
        tasks = [asyncio.create_task(world.references.serve(worker)) for worker in world.workers]  # type: ignore[arg-type]
        try:
            await story(world)
            await asyncio.sleep(20.0)
            for task in tasks:
                assert not task.done() or task.exception() is None
            assert sum(not task.done() for task in tasks) == len(world.references._workers)
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


CHUNKS = "fusion=chunk"


def test_what_a_worker_has_begun_it_ends_and_the_rest_is_spread() -> None:
    """Rollouts of ten tokens, eight of which were read ahead: a call of six tokens ends three of them."""

    async def story(world: World) -> None:
        world.arrive(0, 1, 2, 3, 4, 5, 6, 7)
        await asyncio.sleep(0.5)
        for worker in world.workers:
            worker.seconds = 0.3 * PATIENCE_SECONDS
        world.finish(0, 1, 2, 3, 4, 5, 6, 7)

    world = play(6, story, 2, CHUNKS)
    shares = [set(worker.read) for worker in world.workers]
    assert [len(share) for share in shares] == [4, 4] and not shares[0] & shares[1]
    for worker, share in zip(world.workers, shares, strict=True):
        assert [len(call) for call in worker.calls] == [3, 1] and {i for call in worker.calls for i in call} == share
    totals = world.state.reference_prefill
    assert (totals.scored, totals.early, totals.evicted) == (80, 64, 0)
    assert world.state.prefill.scored == 0, "the reward model's figures are its own"
    assert world.references._chunks is not None and not world.references._chunks._owner
    spread = play(1000, lambda world: _finish(world, 0, 1, 2, 3), 2, CHUNKS)
    assert sorted(worker.calls for worker in spread.workers) == [[[0, 1]], [[2, 3]]]


async def _finish(world: World, *ids: int) -> None:
    world.finish(*ids)


def test_what_is_finished_comes_first_and_another_worker_takes_it_when_its_own_is_held_up() -> None:
    async def story(world: World) -> None:
        world.arrive(0)
        await asyncio.sleep(0.1)
        (owner,) = (worker for worker in world.workers if worker.read)
        (other,) = (worker for worker in world.workers if not worker.read)
        other.seconds = 0.2
        owner.seconds = 100.0
        world.finish(4, 5)  # one for each
        await asyncio.sleep(0.3)
        world.arrive(1)  # for the other one, which has fewer
        world.arrive(0, start=8)
        world.finish(0)
        assert other.calls in ([[4]], [[5]])
        await asyncio.sleep(0.9 * PATIENCE_SECONDS)
        assert len(other.calls) == 1 and other.read == [1]
        await asyncio.sleep(0.2 * PATIENCE_SECONDS)
        assert other.calls[1:] == [[0]], "nobody took it"
        owner.seconds = 0.0

    world = play(1000, story, 2, CHUNKS)
    assert world.state.reference_prefill.early == 0, "it was answered without what its worker had read"


def test_what_has_its_logprobs_is_forgotten_though_its_reward_is_still_to_come() -> None:
    async def story(world: World) -> None:
        world.arrive(0, 1, 2, 4)
        await asyncio.sleep(0.1)
        assert world.assembly.generated(world.info(0))
        world.assembly.referenced(world.info(0), ServiceResult(0, Payload("by another worker", 0)))
        assert world.assembly.generated(world.info(1))
        world.score(1)  # its log-probs are still to come
        world.assembly.abandon([1], "stale")
        await asyncio.sleep(2 * SWEEP_SECONDS)
        world.state.progressed()
        await asyncio.sleep(0.1)
        assert sorted(world.worker.released) == [0, 4]

    play(1000, story, 1, CHUNKS)


def test_a_death_while_reading_ahead_costs_what_was_read_and_nothing_else() -> None:
    async def story(world: World) -> None:
        world.arrive(0)
        await asyncio.sleep(0.1)
        world.worker.error = ReplicaError("reference-0 died.")
        world.arrive(1)
        await asyncio.sleep(0.1)
        world.worker.error = None
        world.arrive(0, start=8)  # whose beginning is gone
        world.arrive(2)
        await asyncio.sleep(0.1)
        world.finish(0, 1, 2)

    world = play(1000, story, 1, CHUNKS)
    assert world.worker.read == [0, 1, 2] and world.state.reference_prefill.early == 8
    assert world.messages == ["reference-0 died. So what it read ahead is lost."]
    assert sorted(i for call in world.worker.calls for i in call) == [0, 1, 2]


def test_a_worker_that_is_lost_while_reading_leaves_its_rollouts_to_the_others() -> None:
    async def story(world: World) -> None:
        world.workers[0].error = WorkerLostError("gone.")
        world.arrive(0, 1)
        await asyncio.sleep(0.1)
        world.finish(0, 1)

    world = play(1000, story, 2, CHUNKS)
    assert len(world.references._workers) == 1
    assert sorted(i for call in world.workers[1].calls for i in call) == [0, 1]


def test_a_worker_whose_model_takes_no_chunks_is_asked_once() -> None:
    async def story(world: World) -> None:
        world.worker.answer = Prefilled(False)
        world.arrive(0)
        await asyncio.sleep(0.1)
        world.arrive(1)
        await asyncio.sleep(0.1)
        world.finish(0, 1)

    world = play(1000, story, 1, CHUNKS)
    assert world.worker.read == [0] and world.worker.calls == [[0, 1]]
    assert [m for m in world.messages if m.startswith("The reference model reads a text in pieces")] == world.messages


def test_without_chunks_nobody_is_asked_to_read_ahead() -> None:
    async def story(world: World) -> None:
        world.arrive(0, 1)
        world.finish(0, 1)

    assert play(1000, story).worker.read == []


def test_the_settings_of_chunks_reach_the_workers_and_no_checkpoint() -> None:
    config = load_config([*SERVED, CHUNKS, "fusion.cache_tokens=777"])
    spec, plain = reference_spec(config), reference_spec(load_config([*SERVED]))
    assert spec is not None and plain is not None
    assert (spec.cache_tokens, plain.cache_tokens) == (777, 0)
    assert fingerprint(config) == plain.fingerprint
    assert reference_note(config) is None


def test_a_reference_that_cannot_be_continued_is_named_at_the_start(tmp_path: Path) -> None:
    MistralConfig(sliding_window=8).save_pretrained(tmp_path)
    typed = [*SERVED, f"model.path={tmp_path}"]
    sentence = str(reference_note(load_config([*typed, CHUNKS])))
    assert "has a sliding window" in sentence and str(tmp_path) in sentence and "whole rollouts" in sentence
    assert reference_note(load_config(typed)) is None
    assert reference_note(load_config([*typed, CHUNKS, "reference=learner"])) is None
