"""The episodes of a run: which worker plays each, the turn that it waits for, and who samples it.

A turn is a rollout that is issued again: it waits in ``state.requeue`` until the dispatcher gives it to a replica, and
it is sampled again if that replica dies. Only the last turn's end is the rollout's end. What a worker held when it died
starts again from the environment's reset, at any worker; a tag tells attempts apart.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from asyncrlhf.actors.episodes import EpisodeNews, TurnWanted
from asyncrlhf.actors.messages import Collected
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.handles import LONG_SECONDS, EpisodesHandle, Runtime, WorkerLostError
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.rollouts.annotate import Annotator
from asyncrlhf.orchestrator.rollouts.assembly import Assembly
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.types import OBSERVED, GenerationFailure, GenerationRequest, Rollout, RolloutInfo

ATTEMPT = 2**20  # more than an episode has turns: the tag of a turn is its number, and this for each attempt before


class Episodes:
    """Passes turns between the workers that play episodes and the replicas that sample them."""

    def __init__(self, state: RunState, runtime: Runtime, assembly: Assembly, annotators: Sequence[Annotator]) -> None:
        self._state = state
        self._table = state.episodes
        self._runtime = runtime
        self._assembly = assembly
        self._annotators = annotators
        self._workers = runtime.episodes  # alive
        self._attempts: Counter[int] = Counter()  # restarts, by rollout id
        self._answers: dict[int, asyncio.Future[RolloutInfo | None]] = {}  # of an evaluation, by its negative id
        self._asking: set[asyncio.Task[None]] = set()
        self._requests: dict[int, GenerationRequest] = {}  # of an evaluation
        self._down: set[str] = set()  # workers that are being started again
        self._held: list[GenerationRequest] = []  # that begin when one of them is back
        self._table.call_off = self.call_off

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Start these episodes, each at the worker with fewest of them; if all are being started again, later."""
        able = [worker for worker in self._workers if worker.name not in self._down]
        if not able:
            self._held += requests
            return
        load = Counter(self._table.at.values())
        shares: dict[str, list[GenerationRequest]] = {}
        for request in requests:
            worker = min(able, key=lambda own: load[own.name])
            load[worker.name] += 1
            self._table.at[request.rollout_id] = worker.name
            if request.rollout_id >= 0:
                self._state.ledger.start(request.rollout_id, worker.name, OBSERVED)
            told = replace(request, tag=self._attempts[request.rollout_id] * ATTEMPT)
            shares.setdefault(worker.name, []).append(told)
        for name, own in shares.items():
            self._worker(name).begin(own)

    def turned(self, replica: Replica, collected: Collected) -> None:
        """Give turns that a replica has sampled to their episodes. One that it does not hold any more was issued again,
        or given up."""
        finished = [info for info in collected.finished if info.rollout_id in replica.in_flight]
        failed = [failure for failure in collected.failed if failure.rollout_id in replica.in_flight]
        for ids, ended in (([i.rollout_id for i in finished], True), ([f.rollout_id for f in failed], False)):
            for rollout_id in ids:
                replica.end(rollout_id, self._state.now(), finished=ended)
        self._pass_on(finished)
        for failure in failed:
            self._fail(failure)
        if finished or failed:
            self._state.touch(replica, *(() if replica.in_flight else (self._state.emptied,)))

    def _pass_on(self, finished: Sequence[RolloutInfo]) -> None:
        shares: dict[str, list[RolloutInfo]] = {}
        for info in finished:
            wanted = self._table.wanted.get(info.rollout_id)
            if wanted is None or wanted.tag != info.tag:
                continue  # of an attempt that was given up
            del self._table.wanted[info.rollout_id]
            self._table.last[info.rollout_id] = info.generator_id
            group = self._state.groups.get(info.group_id)
            if group is not None:
                group.newest = max(group.newest, info.max_version)
            shares.setdefault(self._table.at[info.rollout_id], []).append(info)
        for name, own in shares.items():
            if name not in self._down:
                self._worker(name).sampled([info.payload for info in own])

    async def serve(self, worker: EpisodesHandle) -> None:
        """Take a worker's news in a loop. Raises ReplicaError if it is lost and no other is left."""
        while True:
            try:
                news = await worker.collect()
            except ReplicaError as error:
                if not await self._replace(worker, error):
                    return
                continue
            self._hear(worker, news)

    def _hear(self, worker: EpisodesHandle, news: EpisodeNews) -> None:
        state, table = self._state, self._table
        for failure in news.failed:
            if table.at.get(failure.rollout_id) == worker.name:
                self._fail(failure)
        for turn in news.wanted:
            if table.at.get(turn.rollout_id) == worker.name and turn.tag // ATTEMPT == self._attempts[turn.rollout_id]:
                table.wanted[turn.rollout_id] = turn
                if turn.rollout_id < 0:
                    self._ask(turn)
                else:
                    state.requeue.append(turn.rollout_id)
        finished = [info for info in news.finished if table.at.get(info.rollout_id) == worker.name]
        self._leave_turns([info.rollout_id for info in finished])
        for info in finished:
            self._forget(info.rollout_id)
            if info.rollout_id < 0:
                self._answered(info.rollout_id, info)
        whole = [info for info in finished if info.rollout_id >= 0 and self._assembly.generated(info)]
        for annotator in self._annotators:
            annotator.arrived(whole)
        if news.wanted or news.finished or news.failed:
            state.progressed(state.room, state.queue, state.emptied)
        elif news.playing:
            state.progressed(state.emptied)  # tools have a limit of their own

    def _fail(self, failure: GenerationFailure) -> None:
        """The episode has failed, in its environment or in an engine."""
        rollout_id = failure.rollout_id
        name = self._table.at.get(rollout_id)
        if name is None:
            return
        self._worker(name).cancel([rollout_id])
        self._leave_turns([rollout_id])
        self._forget(rollout_id)
        if rollout_id < 0:
            self._answered(rollout_id, None)
            return
        group = self._state.groups.get(rollout_id // self._state.config.num_generations)
        if group is not None and failure.epoch >= group.epoch:
            self._assembly.failed(rollout_id, group.group_id, failure.error, None)
            for annotator in self._annotators:
                annotator.arrived([])  # its group may be whole now

    def call_off(self, rollout_ids: Collection[int]) -> None:
        """Give up episodes that were dropped; the caller tells the replicas that sample a turn of them."""
        self._held = [request for request in self._held if request.rollout_id not in rollout_ids]
        held = sorted((self._table.at[i], i) for i in rollout_ids if i in self._table.at)
        for name, own in groupby(held, key=lambda pair: pair[0]):
            ids = [rollout_id for _, rollout_id in own]
            self._worker(name).cancel(ids)
            for rollout_id in ids:
                self._attempts[rollout_id] += 1
                self._forget(rollout_id)

    def _leave_turns(self, rollout_ids: Sequence[int]) -> None:
        """Of these episodes, which have ended, no turn is sampled any more: a late one may end before its turn does."""
        left = [rollout_id for rollout_id in rollout_ids if rollout_id in self._table.wanted]
        for rollout_id in left:
            if rollout_id in self._state.requeue:
                self._state.requeue.remove(rollout_id)
        for telling in self._withdrawn(left):
            self._beside(telling)

    def _withdrawn(self, rollout_ids: Collection[int]) -> list[Coroutine[Any, Any, Any]]:
        """Take turns of these episodes from the replicas that sample them; what tells the replicas."""
        state, telling = self._state, []
        for replica in state.replicas:
            held = sorted(replica.in_flight.intersection(rollout_ids))
            for rollout_id in held:
                replica.end(rollout_id, state.now(), finished=False)
            if held and replica.alive:
                told = replica.handle.call(LONG_SECONDS, GeneratorWorker.cancel, held)
                telling.append(state.heard(replica, told))
        return telling

    def _forget(self, rollout_id: int) -> None:
        self._state.expect_no_more(rollout_id)
        for known in (self._table.at, self._table.wanted, self._table.last):
            known.pop(rollout_id, None)

    async def _replace(self, worker: EpisodesHandle, error: ReplicaError) -> bool:
        """Start the lost worker and its episodes again; False if it is not restarted and others take its work over."""
        lost = sorted(i for i, name in self._table.at.items() if name == worker.name)
        self._state.message(f"{error} Its {len(lost)} episodes start again.")
        self._state.journal.note("died", replica=worker.name, reason=str(error))
        self._down.add(worker.name)
        await self._take_back(lost)
        try:
            await worker.restart(error)
            stays = True
        except WorkerLostError:
            self._workers.remove(worker)
            if not self._workers:
                raise
            stays = False
        finally:
            self._down.discard(worker.name)
        held, self._held = self._held, []
        self.begin([*(self._requests[i] for i in lost if i in self._requests), *held])
        self._state.progressed()
        return stays

    async def _take_back(self, lost: Sequence[int]) -> None:
        """Issue these episodes again. A turn of them that is being sampled is cancelled first: an engine knows one
        request of an id."""
        state = self._state
        for rollout_id in lost:
            self._attempts[rollout_id] += 1
            self._forget(rollout_id)
        telling = self._withdrawn(lost)
        waiting = set(state.requeue)
        await asyncio.gather(*telling)
        for rollout_id in lost:
            entry = state.ledger.get(rollout_id) if rollout_id >= 0 else None
            if entry is None or entry.state != "generating":
                continue  # dropped meanwhile, or of an evaluation
            state.ledger.requeue(rollout_id)
            if rollout_id not in waiting:
                state.requeue.append(rollout_id)

    def _worker(self, name: str) -> EpisodesHandle:
        return next(worker for worker in self._workers if worker.name == name)

    async def answer(self, requests: Sequence[GenerationRequest]) -> list[Rollout]:
        """Play episodes outside of the ledger (evaluation): negative ids. Without those that failed."""
        loop = asyncio.get_running_loop()
        self._requests |= {request.rollout_id: request for request in requests}
        waiting = {request.rollout_id: loop.create_future() for request in requests}
        self._answers |= waiting
        try:
            self.begin(requests)
            ended = await asyncio.gather(*waiting.values())
            return await self._runtime.fetch([info.payload for info in ended if info is not None])
        finally:
            self.call_off([i for i in waiting if i in self._table.at])
            for rollout_id in waiting:
                self._answers.pop(rollout_id, None)
                self._requests.pop(rollout_id, None)

    def _answered(self, rollout_id: int, info: RolloutInfo | None) -> None:
        waiting = self._answers.get(rollout_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(info)

    def _ask(self, turn: TurnWanted) -> None:
        """Have a turn of an evaluation sampled."""
        self._beside(self._sample(turn))

    def _beside(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _sample(self, turn: TurnWanted) -> None:
        state, rollout_id = self._state, turn.rollout_id

        def able() -> Iterator[Replica]:
            return (r for r in state.replicas if r.alive and r.version >= 0)

        while self._table.wanted.get(rollout_id) is turn:
            await state.changed.wait_for(lambda: any(able()))
            replica = list(able())[rollout_id % len(list(able()))]
            found = await state.heard(replica, replica.handle.generate_turn(rollout_id, turn.payload))
            if found is not None and self._table.wanted.get(rollout_id) is turn:
                del self._table.wanted[rollout_id]
                if found:
                    self._worker(self._table.at[rollout_id]).sampled(self._runtime.store(found))
                else:
                    self._fail(GenerationFailure(rollout_id, "its turn could not be sampled"))

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
