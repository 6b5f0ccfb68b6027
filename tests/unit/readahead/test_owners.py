"""Who reads which chunk, who scores what it belongs to, and what is told to whom: with workers of paper, on the virtual
clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.handles import WorkerLostError
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.rollouts.annotate import Rewards
from asyncrlhf.orchestrator.state import GroupInProgress, RunState
from asyncrlhf.readahead.owners import CALL_SECONDS, PATIENCE_SECONDS, ChunkInfo, Prefilled, ReadAhead, ReadTotals
from asyncrlhf.rewards.reward_config import FusionConfig, RewardConfig, RewardModelConfig
from asyncrlhf.types import Annotation, Payload, Prompt, RolloutInfo

SIZE = 4  # rollouts of a group
TOKENS_PER_SECOND = 2000.0


class PaperWorker:
    """Notes what it is asked, takes its time, and dies when it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[str, list[int]]] = []
        self.released: list[int] = []
        self.seconds: list[float] = []
        self.score_seconds = 0.0
        self.error: ReplicaError | None = None
        self.answer = Prefilled(True)

    async def annotate(self, payloads: Sequence[Payload], ticket: Any = None) -> list[Annotation]:
        ids = [payload.index for payload in payloads]
        self.calls.append(("score", ids))
        await asyncio.sleep(self.score_seconds)
        return [Annotation(i, float(i)) for i in ids]

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        self.calls.append(("prefill", [chunk.rollout_id for chunk in chunks]))
        self.released += released
        seconds = sum(chunk.length for chunk in chunks) / TOKENS_PER_SECOND
        self.seconds.append(seconds)
        await asyncio.sleep(seconds)
        if self.error is not None:
            raise self.error
        return self.answer

    async def close(self) -> None: ...

    def read(self) -> list[int]:
        return [i for what, ids in self.calls if what == "prefill" for i in ids]


class PaperAssembly:
    def __init__(self, state: RunState) -> None:
        self._state = state
        self.scores: dict[int, float] = {}
        self.messages: list[str] = []
        state.message = self.messages.append

    def awaits(self, info: RolloutInfo) -> bool:
        return info.group_id in self._state.groups and info.rollout_id in self._state.groups[info.group_id].unscored

    def annotated(self, kind: str, info: RolloutInfo, annotation: Annotation) -> None:
        self.scores[annotation.rollout_id] = float(annotation.reward or 0.0)
        self._state.groups[info.group_id].unscored.discard(annotation.rollout_id)


class World:
    """Two groups under way, and a scoring loop for each worker."""

    def __init__(self, workers: int) -> None:
        config = RunConfig(
            runtime="local",
            num_generations=SIZE,
            batch_size=8,
            reward=RewardConfig(kind="model", model=RewardModelConfig(path="paper")),
            fusion=FusionConfig(granularity="chunk", max_wait_ms=0),
        )
        self.state = build_state(config)
        for group in range(2):
            ids = set(range(group * SIZE, (group + 1) * SIZE))
            prompt = Prompt("p", "p", np.arange(3))
            self.state.groups[group] = GroupInProgress(group, prompt, 0.0, None, 0, set(ids), set(ids))
        self.workers = [PaperWorker(f"reward-{i}") for i in range(workers)]
        self.alive: list[Any] = list(self.workers)
        self.assembly = PaperAssembly(self.state)
        self.scoring = Rewards(self.state, self.assembly, self.alive)  # type: ignore[arg-type]
        self.chunks = self.scoring._ahead
        self.tasks = [asyncio.create_task(self.scoring.serve(worker)) for worker in self.workers]

    def arrive(self, *ids: int, start: int = 0, length: int = 10) -> None:
        self.chunks.arrived([ChunkInfo(i, start, length, Payload("chunks", i)) for i in ids])

    def finish(self, *ids: int, observed: int = 0) -> None:
        """``observed``: of the 27 tokens of each response."""
        for i in ids:
            self.state.groups[i // SIZE].unfinished.discard(i)
            info = RolloutInfo(i, i // SIZE, "g", 3, 27, 0, 0, "stop", self.state.now(), Payload("rollouts", i))
            self.scoring.arrived([replace(info, response_length=27 - observed, observed_length=observed)])
        self.state.progressed()

    async def idle(self) -> None:
        """Everything that can happen without further news has happened."""
        await asyncio.sleep(5 * PATIENCE_SECONDS)
        self.state.changed.notify()
        await asyncio.sleep(1)
        for task in self.tasks:
            if task.done():
                task.result()

    def owner(self, rollout_id: int) -> PaperWorker:
        found: Any = self.chunks._owner[rollout_id]
        return found  # type: ignore[no-any-return]


def play(story: Callable[[World], Awaitable[None]], workers: int = 1) -> World:
    async def main() -> World:
        world = World(workers)
        try:
            await story(world)
        finally:
            for task in world.tasks:
                task.cancel()
        return world

    made: World = run_virtual(main())
    return made


def test_what_is_finished_is_scored_before_anything_is_read_ahead() -> None:
    async def story(world: World) -> None:
        world.workers[0].score_seconds = 1.0
        world.finish(0)
        await asyncio.sleep(0.5)
        world.arrive(1, 2)
        world.finish(3)
        await world.idle()

    world = play(story)
    assert world.workers[0].calls == [("score", [0]), ("score", [3]), ("prefill", [1]), ("prefill", [2])]


def test_a_call_reads_no_longer_than_a_finished_rollout_may_wait() -> None:
    """Ten tokens take 0.005 s: the first call learns that, the others are full."""

    async def story(world: World) -> None:
        for start in range(0, 50, 10):
            world.arrive(*range(8), start=start)
        await world.idle()

    worker = play(story).workers[0]
    assert sorted(worker.read()) == sorted(5 * list(range(8)))
    assert worker.seconds[0] == 0.005 and max(worker.seconds) == pytest.approx(CALL_SECONDS)
    assert min(worker.seconds[1:-1]) > 0.7 * CALL_SECONDS


def test_what_arrives_while_the_piece_before_it_is_read_is_read_next() -> None:
    async def story(world: World) -> None:
        world.arrive(0, length=1000)
        await asyncio.sleep(0.5)
        world.arrive(0, start=1000)
        await world.idle()
        world.finish(0)
        await world.idle()

    world = play(story)
    assert world.workers[0].calls == [("prefill", [0]), ("prefill", [0]), ("score", [0])]
    assert world.state.prefill.early == 1010


def test_sequences_stay_with_the_worker_that_holds_their_beginning() -> None:
    async def story(world: World) -> None:
        world.arrive(*range(8))
        await world.idle()
        world.arrive(*range(8), start=10)
        await world.idle()
        world.finish(*range(4))
        world.finish(*range(4, 8), observed=20)  # which were read and scored too
        await world.idle()

    world = play(story, workers=2)
    shares = [set(worker.read()) for worker in world.workers]
    assert [len(share) for share in shares] == [4, 4] and not shares[0] & shares[1]
    for worker, share in zip(world.workers, shares, strict=True):
        assert sorted(worker.read()) == sorted(2 * list(share))
        assert {i for what, ids in worker.calls if what == "score" for i in ids} == share
    assert world.state.prefill.early == 8 * 20 and world.state.prefill.scored == 8 * 30
    assert not world.chunks._owner and not world.chunks._read


def test_when_its_worker_is_held_up_another_one_scores_a_rollout() -> None:
    async def story(world: World) -> None:
        world.arrive(0)
        await world.idle()
        busy = world.owner(0)
        busy.score_seconds = 1000.0
        world.chunks._owner[1] = busy  # type: ignore[assignment]
        world.finish(1)
        await asyncio.sleep(0.01)
        world.finish(0)
        await asyncio.sleep(0.9 * PATIENCE_SECONDS)
        assert 0 not in world.assembly.scores
        await asyncio.sleep(0.2 * PATIENCE_SECONDS)
        assert 0 in world.assembly.scores, "nobody took it"
        busy.score_seconds = 0.0

    world = play(story, workers=2)
    assert world.state.prefill.early == 0, "it was scored without what its worker had read"


def test_what_was_cancelled_or_scored_elsewhere_is_forgotten() -> None:
    async def story(world: World) -> None:
        world.arrive(0, 1, 4, 5)
        await world.idle()
        del world.state.groups[0]  # dropped
        world.state.groups[1].unscored.discard(4)  # scored by another worker, or failed
        world.arrive(0, 1, 5, start=10)
        await world.idle()
        assert sorted(world.workers[0].released) == [0, 1, 4]

    world = play(story)
    assert sorted(world.workers[0].read()) == [0, 1, 4, 5, 5], "and nothing more is read of it"


def test_chunks_of_what_ended_meanwhile_are_not_sent() -> None:
    async def story(world: World) -> None:
        world.workers[0].score_seconds = 1.0
        world.finish(7)
        await asyncio.sleep(0.1)
        world.arrive(0, 1)
        world.finish(0, 2)
        world.arrive(0, start=10)
        world.arrive(2)
        assert 2 not in world.chunks._owner
        await world.idle()

    world = play(story)
    assert world.workers[0].read() == [1]
    assert set(world.assembly.scores) == {0, 2, 7}


def test_a_worker_that_is_never_idle_gathers_no_chunks_of_what_has_ended() -> None:
    async def story(world: World) -> None:
        world.workers[0].score_seconds = 1000.0
        world.finish(0)
        await asyncio.sleep(0.1)
        for i in range(1, 7):
            world.arrive(i)
            world.arrive(i, start=10)
            world.finish(i)
        world.arrive(7)
        assert [len(waiting) for waiting in world.chunks._waiting.values()] == [1]

    assert play(story).workers[0].read() == []


def test_a_death_while_reading_ahead_costs_what_was_read_and_nothing_else() -> None:
    async def story(world: World) -> None:
        worker = world.workers[0]
        world.arrive(0)
        await world.idle()
        worker.error = ReplicaError("reward-0 died.")
        world.arrive(1)
        await world.idle()
        worker.error = None
        worker.calls.clear()
        world.arrive(0, 1, start=10)  # the one has no beginning there any more, the other was the death of it
        world.arrive(1, start=0)
        world.arrive(2)
        await world.idle()
        assert worker.read() == [2]
        world.finish(0, 1, 2)
        await world.idle()

    world = play(story)
    assert world.assembly.scores == {0: 0.0, 1: 1.0, 2: 2.0}
    assert len(world.assembly.messages) == 1 and "Its read-ahead is lost" in world.assembly.messages[0]


def test_a_worker_that_is_lost_while_reading_leaves_its_rollouts_to_the_others() -> None:
    async def story(world: World) -> None:
        world.arrive(0, 1)
        await world.idle()
        lost = world.owner(0)
        lost.error = WorkerLostError("gone.")
        world.arrive(0, start=10)
        await world.idle()
        assert lost not in world.alive
        world.finish(0, 1)
        await world.idle()

    world = play(story, workers=2)
    assert set(world.assembly.scores) == {0, 1}


def test_the_loss_of_the_last_worker_ends_the_run() -> None:
    async def story(world: World) -> None:
        world.workers[0].error = WorkerLostError("gone.")
        world.arrive(0)
        await world.idle()

    with pytest.raises(ReplicaError, match=r"No reward worker is left: gone\."):
        play(story)


def test_a_worker_whose_models_take_no_chunks_is_asked_once() -> None:
    async def story(world: World) -> None:
        world.workers[0].answer = Prefilled(False)
        world.arrive(0)
        await world.idle()
        world.arrive(1, 2)
        await world.idle()
        world.finish(0, 1)
        await world.idle()

    world = play(story)
    assert world.workers[0].read() == [0] and len(world.assembly.messages) == 1
    assert set(world.assembly.scores) == {0, 1}


def test_evictions_are_counted_and_count_as_not_read() -> None:
    async def story(world: World) -> None:
        world.arrive(0)
        await world.idle()
        world.workers[0].answer = Prefilled(True, [0])
        world.arrive(1)
        await world.idle()
        world.finish(0, 1)
        await world.idle()

    state = play(story).state
    assert (state.prefill.evicted, state.prefill.early, state.prefill.scored) == (1, 10, 60)


async def test_without_workers_nothing_is_read_ahead() -> None:
    """What a loop may ask, it may ask of a run in which no worker reads ahead."""
    totals, wakes, worker = ReadTotals(), [], PaperWorker("reward-0")
    ahead: ReadAhead[PaperWorker] = ReadAhead(
        "It", [], lambda _: True, lambda _: True, totals, print, lambda: wakes.append(1)
    )
    info = RolloutInfo(0, 0, "g", 3, 27, 0, 0, "stop", asyncio.get_running_loop().time(), Payload("rollouts", 0))
    ahead.arrived([ChunkInfo(0, 0, 10, Payload("chunks", 0))])
    ahead.promised([info])
    assert ahead.may_take(worker, info) and not ahead.owns(worker, info) and ahead.read_by(worker, info) == 0
    assert not ahead.has_work(worker)
    await ahead.read(worker)
    ahead.answered(worker, [info])
    ahead.lost(worker)
    assert not wakes and not worker.calls and (totals.early, totals.evicted) == (0, 0)
