"""Reward, reference and critic side by side: queues, versions, seats and settings, without a model."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import MistralConfig

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.messages import RolloutBundle, annotated, joined, placed
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.parts import (
    build_runtime,
    placement_plan,
    reference_spec,
    service_notes,
)  # fmt: skip
from asyncrlhf.cluster.placement import Plan
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.recording.resume import fingerprint
from asyncrlhf.orchestrator.rollouts.annotate import Annotator, References, Rewards
from asyncrlhf.orchestrator.rollouts.assembly import Assembly
from asyncrlhf.orchestrator.rollouts.critics import Critics, CriticVersions
from asyncrlhf.orchestrator.state import GroupInProgress
from asyncrlhf.readahead.outlook import reference_note
from asyncrlhf.readahead.owners import PATIENCE_SECONDS, ChunkInfo, Prefilled
from asyncrlhf.types import Annotation, Payload, Prompt, RolloutInfo
from tests.unit.learner.worlds import samples

LOCAL = ("runtime=local", "num_generations=4", "batch_size=8")
REFERENCE = (*LOCAL, "algorithm=online_dpo", "reference=service")
CRITIC = (*LOCAL, "algorithm=ppo", "critic=service")
BOTH = (*CRITIC, "reference=service", "algorithm.kl=reward", "algorithm.beta=0.1")
SERVED = {"reference": REFERENCE, "critic": CRITIC}
CHUNKS = "fusion=chunk"


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("KIND=nowhere", ["KIND=nowhere is not known", "learner, service"]),
        ("KIND.wrokers=2", ["KIND.wrokers is not a setting", "did you mean KIND.workers?"]),
        ("KIND.threads=2", ["KIND.threads=2 has no effect", "allowed: KIND.workers >= 1"]),
        ("KIND.workers=-1", ["KIND.workers=-1", ">= 0"]),
        ("KIND=service KIND.gpus=4", ["KIND.gpus=4", "0 to 1", "learner.zero_stage=3"]),
        ("KIND=service KIND.gpus=-1", ["KIND.gpus=-1", ">= 0"]),
        ("KIND=service KIND.token_budget=many", ["KIND.token_budget=many", "a whole number"]),
    ],
)
def test_nonsense_is_one_sentence(kind: str, typed: str, words: list[str]) -> None:
    assert_refused(typed.replace("KIND", kind), [word.replace("KIND", kind) for word in words])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("reference=service reference.dtype=int4", ["reference.dtype=int4", "auto, float32, bfloat16, float16"]),
        (
            "critic=service algorithm=ppo learner.sharding=fsdp2",
            ["critic.workers=1", "learner.sharding=fsdp2", "allowed: critic.workers=0"],
        ),
        (
            "critic=service algorithm=ppo learner=deepspeed learner.zero_stage=3",
            ["critic.workers=1", "learner.zero_stage=3", "allowed: critic.workers=0"],
        ),
    ],
)
def test_what_only_one_of_them_refuses_is_one_sentence(typed: str, words: list[str]) -> None:
    assert_refused(typed, words)


def assert_refused(typed: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(typed.split(" "))
    assert [word for word in words if word not in str(error.value)] == [], error.value


@pytest.mark.parametrize("kind", SERVED)
def test_an_algorithm_that_needs_none_starts_no_worker_and_says_so(kind: str) -> None:
    config = load_config(["runtime=local", "algorithm=rloo", f"{kind}=service", f"{kind}.workers=3"])
    assert f"No {kind} worker is started: algorithm=rloo" in service_notes(config)[0]
    assert not [name for name in placement_plan(config).seats if name.startswith(kind)]
    assert service_notes(load_config([*SERVED[kind]])) == []
    load_config(["algorithm=rloo", f"{kind}=service", "learner.sharding=fsdp2"])  # nothing to hand out


@pytest.mark.parametrize("kind", SERVED)
def test_the_workers_have_seats_beside_the_rewards(kind: str) -> None:
    def side_of(plan: Plan, part: str) -> str:
        return next(group.side for group in plan.groups if part in group.seats)

    served = [*SERVED[kind], f"{kind}.workers=2"]
    plan = placement_plan(load_config([*served, f"{kind}.threads=3", "cluster.placement=interleave"]))
    assert {side_of(plan, f"{kind}-{i}") for i in range(2)} == {side_of(plan, "reward-0")} == {"rewards"}
    assert [plan.seats[f"{kind}-{i}"].demand() for i in range(2)] == [{"CPU": 3.0}] * 2
    assert len({plan.seats[name].group for name in ("reward-0", f"{kind}-0", f"{kind}-1", "generator-0")}) == 4
    assert placement_plan(load_config(served)).seats[f"{kind}-0"].demand() == {"CPU": 1.0}
    assert side_of(placement_plan(load_config([*served, "cluster.placement=separate"])), f"{kind}-0") == "generators"
    gpus = load_config([*served, f"{kind}.gpus=0.5", "cluster.placement=interleave"])
    assert placement_plan(gpus).total("GPU") == 1


def test_the_learner_is_told_what_it_need_not_compute(tmp_path: Path) -> None:
    runtime: Any = build_runtime(load_config([*BOTH]), tmp_path)
    assert runtime._specs.learner.reference_served and runtime._specs.reference.temperature == 1.0
    assert runtime._specs.learner.critic_served and runtime._specs.critic.settings.workers == 1
    runtime = build_runtime(load_config([*BOTH, "reference=learner", "critic=learner"]), tmp_path)
    assert not runtime._specs.learner.reference_served and runtime._specs.reference is None
    assert not runtime._specs.learner.critic_served and runtime._specs.critic is None


def assert_same(one: Any, other: Any) -> None:
    assert (one.rollout_id, one.critic_version) == (other.rollout_id, other.critic_version)
    for name in ("response_ids", "ref_logprobs", "values"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name  # of None, too


def test_a_bundle_travels_with_the_arrays_that_its_rollouts_have() -> None:
    rollouts = [sample.rollout for sample in samples(groups=2, size=3)]
    numbers = [np.arange(len(r.response_ids), dtype=np.float32) for r in rollouts]
    rollouts[0] = replace(rollouts[0], ref_logprobs=numbers[0])
    rollouts[1] = replace(rollouts[1], values=numbers[1], critic_version=0)
    rollouts[4] = replace(rollouts[4], values=-numbers[4], critic_version=7, ref_logprobs=numbers[4] + 9)
    for given in (rollouts, [rollouts[0]], [rollouts[2]], [rollouts[1], rollouts[4]], []):
        back = list(pickle.loads(pickle.dumps(RolloutBundle(given))))
        for one, other in zip(given, back, strict=True):
            assert_same(one, other)


def test_arrays_travel_without_their_rollouts_and_meet_them_again() -> None:
    rollouts = [sample.rollout for sample in samples(groups=2, size=2)]
    numbers = [np.arange(len(r.response_ids), dtype=np.float32) + i for i, r in enumerate(rollouts)]
    valued = [replace(r, values=of, critic_version=4) for r, of in zip(rollouts, numbers, strict=True)]
    annotations, arrays = annotated("values", rollouts, [numbers[0], "no values", *numbers[2:]], 4)
    annotations = placed(annotations, pickle.loads(pickle.dumps(arrays)))
    assert [a.rollout_id for a in annotations] == [r.rollout_id for r in rollouts]
    assert (annotations[1].arrays, annotations[1].error) == (None, "no values")
    for i in (0, 2, 3):
        place = annotations[i].arrays
        assert place is not None
        assert_same(joined(rollouts[i], [place.ref[place.index]]), valued[i])
    assert len(annotated("values", rollouts[:1], ["none"], 4)[1].flat) == 0


class PaperWorker:
    """Answers after ``seconds``, by a place in a bundle that bears its kind's name; ``failing`` rollouts it fails."""

    def __init__(self, kind: str, seconds: float = 1.0, failing: Sequence[int] = ()) -> None:
        self.kind, self.seconds, self.failing, self.name = kind, seconds, failing, f"{kind}-{id(self)}"
        self.calls: list[list[int]] = []
        self.versions: list[int] = []
        self.read: list[int] = []
        self.released: list[int] = []

    async def annotate(self, payloads: Sequence[Payload], ticket: Any = None) -> list[Annotation]:
        assert {p.ref for p in payloads} == {"as sampled"}, "each worker gets the rollouts as they were sampled"
        ids = [p.index for p in payloads]
        self.calls.append(ids)
        self.versions += [] if ticket is None else [ticket.version]
        await asyncio.sleep(self.seconds)
        return [self.answer(i) for i in ids]

    def answer(self, i: int) -> Annotation:
        if i in self.failing:
            return Annotation(i, error=f"no answer of the {self.kind}")
        return Annotation(i, float(i)) if self.kind == "reward" else Annotation(i, arrays=Payload(self.kind, i))

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        self.released += released
        self.read += [chunk.rollout_id for chunk in chunks]
        return Prefilled(True)


@dataclass(frozen=True)
class PaperTicket:
    version: int


class PaperRuntime:
    """The learner's snapshot is of whichever version the test says."""

    version = 0

    @property
    def learner(self) -> PaperRuntime:
        return self

    async def call(self, seconds: float, method: Any) -> PaperTicket:
        assert method is LearnerWorker.critic_ticket
        return PaperTicket(self.version)


class World:
    """Two groups of four under way, the second sampled by version 1 where there is a critic, and workers of paper."""

    def __init__(self, *typed: str, workers: int = 1) -> None:
        config = load_config([*typed, "fusion.max_wait_ms=0"])
        self.state = build_state(config)
        self.second_version = int(config.critic_served)
        prompt = Prompt("p", "p", np.arange(3))
        self.discarded: list[tuple[int, str]] = []
        for group in range(2):
            ids = set(range(group * 4, group * 4 + 4))
            if not self.state.scheduled:  # whose gate would ask for a whole run's order
                self.state.gate.admit(group * self.second_version)
            step, version = 0 if self.state.scheduled else None, group * self.second_version
            self.state.groups[group] = GroupInProgress(group, prompt, 0.0, step, version, set(ids), set(ids))
            for i in sorted(ids):
                self.state.ledger.admit(i, group, prompt, 0.0)
                self.state.ledger.start(i, "generator-0", 0)
        self.state.buffer.reserve(8)
        self.messages: list[str] = []
        self.state.message = self.messages.append
        self.assembly = Assembly(
            self.state, lambda i, *rest: self.discarded.append((i, rest[-1])), PromptSource(lambda _: prompt, 1, 0)
        )
        self.runtime: Any = PaperRuntime()
        self.versions = CriticVersions(self.state, self.runtime)
        self.workers = {
            kind: [PaperWorker(kind) for _ in range(workers)]
            for kind, served in (("reference", config.reference_served), ("critic", config.critic_served))
            if served
        }
        self.annotators: dict[str, Annotator] = {}
        for kind, of_kind in self.workers.items():
            alive: Any = list(of_kind)
            self.annotators[kind] = (
                References(self.state, self.assembly, alive)
                if kind == "reference"
                else Critics(self.state, self.assembly, alive, self.versions)
            )

    def only(self, kind: str) -> PaperWorker:
        (worker,) = self.workers[kind]
        return worker

    async def publish(self, version: int) -> None:
        self.runtime.version = version
        await self.versions.hand_over()

    def info(self, i: int) -> RolloutInfo:
        version = i // 4 * self.second_version
        return RolloutInfo(
            i, i // 4, "g", 3, 7, version, version, "stop", self.state.now(), Payload("as sampled", i)
        )  # fmt: skip

    def finish(self, *ids: int, score: bool = False) -> None:
        for i in ids:
            assert self.assembly.generated(self.info(i))
            for annotator in self.annotators.values():
                annotator.arrived([self.info(i)])
        self.state.progressed()
        self.score(*(ids if score else ()))

    def arrive(self, *ids: int, start: int = 0, length: int = 8) -> None:
        self.annotators["reference"].chunks_arrived([ChunkInfo(i, start, length, Payload("chunks", i)) for i in ids])

    def give(self, kind: str, i: int, **annotation: Any) -> None:
        self.assembly.annotated(kind, self.info(i), Annotation(i, **annotation))

    def score(self, *ids: int) -> None:
        for i in ids:
            self.give("reward", i, reward=float(i))


def play(story: Callable[[World], Any], *typed: str, workers: int = 1) -> World:
    async def main() -> World:
        world = World(*typed, workers=workers)
        tasks = [
            asyncio.create_task(annotator.serve(worker))  # type: ignore[arg-type]
            for kind, annotator in world.annotators.items()
            for worker in world.workers[kind]
        ]
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


def finishing(*ids: int) -> Callable[[World], Any]:
    async def story(world: World) -> None:
        world.finish(*ids)

    return story


def test_calls_hold_what_fits_the_budget_oldest_first() -> None:
    story = finishing(3, 0, 1, 2, 4, 5)  # ten tokens each

    def calls(budget: int) -> list[list[int]]:
        return play(story, *REFERENCE, f"reference.token_budget={budget}").only("reference").calls

    assert calls(25) == [[3, 0], [1, 2], [4, 5]]
    assert calls(5) == [[3], [0], [1], [2], [4], [5]], "one that is too long goes alone"
    assert calls(1000) == [[3, 0, 1, 2, 4, 5]]


def test_what_ends_at_one_time_is_spread_over_all_workers() -> None:
    world = play(finishing(0, 1, 2, 3, 4, 5), *REFERENCE, workers=3)
    assert sorted(worker.calls for worker in world.workers["reference"]) == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_a_group_is_complete_with_all_in_any_order() -> None:
    async def story(world: World) -> None:
        world.finish(0, 1, 2, 3)
        world.score(0, 1)
        await asyncio.sleep(1.5)
        assert world.state.buffer.held == 0 and len(world.state.groups[0].scored) == 2
        world.score(2, 3)

    world = play(story, *REFERENCE)
    (group,) = world.state.buffer.groups()
    assert [r.payload for r in group.rollouts] == [
        Payload("as sampled", i, (Payload("reference", i),)) for i in range(4)
    ]
    assert [r.reward for r in group.rollouts] == [0.0, 1.0, 2.0, 3.0]
    assert [r.referenced_at for r in group.rollouts] == [1.0] * 4
    assert [r.scored_at for r in group.rollouts] == [0.0, 0.0, 1.5, 1.5], "the reward's latency is its own"


def test_reference_and_critic_answer_side_by_side() -> None:
    """The latency is that of the slower one, and a rollout that one of them failed is nobody's concern any more."""

    async def story(world: World) -> None:
        world.only("reference").seconds, world.only("critic").seconds = 2.0, 3.0
        world.only("reference").failing = [5]
        await world.publish(1)
        world.finish(0, 1, 2, 3, 4, 5, score=True)

    world = play(story, *BOTH)
    assert world.only("reference").calls == world.only("critic").calls == [[0, 1, 2, 3, 4, 5]]
    assert world.discarded == [(5, "no answer of the reference")]
    (group,) = world.state.buffer.groups()
    assert [(r.scored_at, r.referenced_at, r.valued_at) for r in group.rollouts] == [(0.0, 2.0, 3.0)] * 4
    assert [r.payload for r in group.rollouts] == [
        Payload("as sampled", i, (Payload("reference", i), Payload("critic", i))) for i in range(4)
    ]
    (other,) = world.state.groups.values()
    assert [r.rollout_id for r in other.scored] == [4] and other.unscored == {6, 7}


def test_what_nobody_wants_any_more_is_not_computed() -> None:
    async def story(world: World) -> None:
        world.finish(0, 1)
        await asyncio.sleep(0.5)  # these two are in hand
        world.finish(2, 3, 4, 5)
        world.give("reward", 3, error="the reward failed")
        world.assembly.cancel([1], "stale")

    world = play(story, *REFERENCE)
    assert world.only("reference").calls == [[0, 1], [2]]
    assert world.annotators["reference"].queued == []
    assert (3, "the reward failed") in world.discarded
    world.state.ledger.check()


@pytest.mark.parametrize("kind", SERVED)
def test_failures_of_both_count_once_and_leave_nothing_behind(kind: str) -> None:
    async def story(world: World) -> None:
        await world.publish(0)
        world.finish(0, 1, 2, 3)
        world.give(kind, 1, error="no arrays")
        world.give("reward", 1, error="no reward")
        world.score(0, 2, 3)

    world = play(story, *SERVED[kind])
    assert world.discarded == [(1, "no arrays")]
    assert world.state.ledger.counts()["failed"] == 1
    (group,) = world.state.buffer.groups()
    assert [r.rollout_id for r in group.rollouts] == [0, 2, 3]


@pytest.mark.parametrize("granularity", ["rollout", "group", "batch"])
def test_a_reward_waits_for_what_fusion_says_but_not_for_what_failed_or_was_dropped(granularity: str) -> None:
    async def main() -> list[list[int]]:
        world = World(*LOCAL, "algorithm=rloo", f"fusion={granularity}")
        worker = PaperWorker("reward", seconds=0.0)
        rewards = Rewards(world.state, world.assembly, [worker])  # type: ignore[list-item]
        serving = asyncio.create_task(rewards.serve(worker))  # type: ignore[arg-type]

        async def finish(*ids: int) -> None:
            rewards.arrived([world.info(i) for i in ids if world.assembly.generated(world.info(i))])
            world.state.progressed()
            await asyncio.sleep(0.1)

        await finish(0, 4)
        await finish(1, 2)
        world.assembly.failed(3, 0, "not sampled", None)
        await finish()
        world.assembly.cancel([1], "stale")
        await finish()
        assert rewards.queued == []
        serving.cancel()
        return worker.calls

    expected = {"rollout": [[0, 4], [1, 2]], "group": [[0, 1, 2]], "batch": [[0, 1, 2]]}
    assert run_virtual(main()) == expected[granularity]


def test_a_call_costs_the_same_however_many_rollouts_wait() -> None:
    def looks(waiting: int) -> float:
        """At the assembly, of one rollout, until a queue of this length is empty; every third is wanted no more."""
        asked: list[int] = []

        class Paper:
            def awaits(self, info: RolloutInfo) -> bool:
                asked.append(info.rollout_id)
                return info.rollout_id % 3 != 0

            def annotated(self, *annotation: Any) -> None:
                pass

        async def main() -> None:
            world, worker = World(*LOCAL), PaperWorker("reward", seconds=0.01)
            rewards = Rewards(world.state, Paper(), [worker])  # type: ignore[arg-type, list-item]
            rewards.arrived([world.info(i) for i in range(waiting)])
            asked.clear()
            serving = asyncio.create_task(rewards.serve(worker))  # type: ignore[arg-type]
            await asyncio.sleep(waiting)
            assert [i for call in worker.calls for i in call] == [i for i in range(waiting) if i % 3]
            assert max(map(len, worker.calls)) == world.state.config.fusion.max_batch
            serving.cancel()

        run_virtual(main())
        return len(asked) / waiting

    assert looks(4096) < 1.2 * looks(256)


async def _young_before_old(world: World) -> None:
    await world.publish(0)
    world.finish(4, 0, 5, 1)
    await asyncio.sleep(5.0)
    assert world.only("critic").calls == [[0, 1]]
    await world.publish(1)
    world.finish(2)


@pytest.mark.parametrize(
    ("mode", "calls", "versions"),
    [
        pytest.param("async", [[0, 1], [4, 5, 2]], [0, 1], id="a free run asks the newest"),
        pytest.param("one_step", [[0, 1], [4, 5], [2]], [0, 1, 0], id="a schedule asks the version that sampled"),
    ],
)
def test_a_rollout_waits_for_a_critic_no_older_than_itself(
    mode: str, calls: list[list[int]], versions: list[int]
) -> None:
    world = play(_young_before_old, *CRITIC, f"async.mode={mode}")
    assert (world.only("critic").calls, world.only("critic").versions) == (calls, versions)
    assert world.annotators["critic"].queued == []


def test_versions_are_kept_for_as_long_as_a_schedule_wants_them() -> None:
    held: list[list[int]] = []

    async def story(world: World) -> None:
        held.clear()
        for version in (0, 1, 2):
            world.state.published_version = version - 1
            await world.publish(version)
            held.append(sorted(world.versions._tickets))
            if version == 0:
                world.finish(0, 1, 2, 3, score=True)
                await asyncio.sleep(5.0)

    play(story, *CRITIC, "async.mode=fixed_lag", "async.lag=2")
    assert held == [[0], [0, 1], [1, 2]], (
        "version 0 has no group left, but replicas that hold it until version 1 is published"
    )
    play(story, *CRITIC)
    assert held == [[0], [1], [2]]


def test_what_a_worker_has_begun_it_ends_and_the_rest_is_spread() -> None:
    """Rollouts of ten tokens, eight of which were read ahead: a call of six tokens ends three of them."""

    async def story(world: World) -> None:
        world.arrive(0, 1, 2, 3, 4, 5, 6, 7)
        await asyncio.sleep(0.5)
        for worker in world.workers["reference"]:
            worker.seconds = 0.3 * PATIENCE_SECONDS
        world.finish(0, 1, 2, 3, 4, 5, 6, 7)

    world = play(story, *REFERENCE, CHUNKS, "reference.token_budget=6", workers=2)
    shares = [set(worker.read) for worker in world.workers["reference"]]
    assert [len(share) for share in shares] == [4, 4] and not shares[0] & shares[1]
    for worker, share in zip(world.workers["reference"], shares, strict=True):
        assert [len(call) for call in worker.calls] == [3, 1] and {i for call in worker.calls for i in call} == share
    totals = world.state.reference_prefill
    assert (totals.scored, totals.early, totals.evicted) == (80, 64, 0)
    assert world.state.prefill.scored == 0, "the reward model's figures are its own"
    spread = play(finishing(0, 1, 2, 3), *REFERENCE, CHUNKS, workers=2)
    assert sorted(worker.calls for worker in spread.workers["reference"]) == [[[0, 1]], [[2, 3]]]


def test_what_has_its_logprobs_is_forgotten_though_its_reward_is_still_to_come() -> None:
    async def story(world: World) -> None:
        world.arrive(0, 1, 2, 4)
        await asyncio.sleep(0.1)
        assert world.assembly.generated(world.info(0))
        world.give("reference", 0, arrays=Payload("by another worker", 0))
        assert world.assembly.generated(world.info(1))
        world.score(1)  # its log-probs are still to come
        world.assembly.cancel([1], "stale")
        world.arrive(2, start=8)
        await asyncio.sleep(0.1)
        assert sorted(world.only("reference").released) == [0, 4]

    play(story, *REFERENCE, CHUNKS)


def test_without_chunks_nobody_is_asked_to_read_ahead() -> None:
    async def story(world: World) -> None:
        world.arrive(0, 1)
        world.finish(0, 1)

    assert play(story, *REFERENCE).only("reference").read == []


def test_the_settings_of_chunks_reach_the_workers_and_no_checkpoint() -> None:
    config = load_config([*REFERENCE, CHUNKS, "fusion.cache_tokens=777"])
    spec, plain = reference_spec(config), reference_spec(load_config([*REFERENCE]))
    assert spec is not None and plain is not None
    assert (spec.cache_tokens, plain.cache_tokens) == (777, 0)
    assert fingerprint(config) == plain.fingerprint
    assert reference_note(config) is None


def test_a_reference_that_cannot_be_continued_is_named_at_the_start(tmp_path: Path) -> None:
    MistralConfig(sliding_window=8).save_pretrained(tmp_path)
    typed = [*REFERENCE, f"model.path={tmp_path}"]
    sentence = str(reference_note(load_config([*typed, CHUNKS])))
    assert "has a sliding window" in sentence and str(tmp_path) in sentence and "whole rollouts" in sentence
    assert reference_note(load_config(typed)) is None
    assert reference_note(load_config([*typed, CHUNKS, "reference=learner"])) is None
