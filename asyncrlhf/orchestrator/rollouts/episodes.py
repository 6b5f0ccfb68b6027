"""The episodes of a run: which worker plays each, the turn that it waits for, and who samples it.

A turn is a rollout that is issued again: it waits in ``state.requeue`` until the dispatcher gives it to a replica, and
it is sampled again if that replica dies. Only the last turn's end is the rollout's end. What a worker held when it died
starts again from the environment's reset, at any worker; a tag tells attempts apart. An episode fails at the third
death of a worker at which its environment was at work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from asyncrlhf.actors.episodes import EpisodeNews, TurnWanted
from asyncrlhf.actors.messages import Collected
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.handles import LONG_SECONDS, EpisodesHandle, Runtime, WorkerLostError
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.episode_table import DEATHS_ALLOWED
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
        self._asking: dict[int, asyncio.Task[None]] = {}  # who has a turn of it sampled
        self._telling: set[asyncio.Task[Any]] = set()
        self._requests: dict[int, GenerationRequest] = {}  # of an evaluation
        self._down: set[str] = set()  # workers that are being started again
        self._held: list[GenerationRequest] = []  # of an evaluation, that cannot begin yet
        self._table.call_off = self.call_off

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Start these episodes, each at the worker with fewest of them. Those that cannot begin yet wait to be issued
        again: all workers are being started again, or one of them may be what killed a worker."""
        able = [worker for worker in self._workers if worker.name not in self._down]
        load = Counter(self._table.at.values())
        shares: dict[str, list[GenerationRequest]] = {}
        for request in requests:
            rollout_id = request.rollout_id
            if not able or self._table.waits_for_another(rollout_id):
                self._put_back(request)
                continue
            worker = min(able, key=lambda own: load[own.name])
            load[worker.name] += 1
            self._table.at[rollout_id], self._table.since[rollout_id] = worker.name, self._state.now()
            if rollout_id >= 0:
                self._state.ledger.start(rollout_id, worker.name, OBSERVED)
            attempts = self._attempts[rollout_id]
            told = replace(request, tag=attempts * ATTEMPT) if attempts else request
            shares.setdefault(worker.name, []).append(told)
        for name, own in shares.items():
            self._worker(name).begin(own)

    def _put_back(self, request: GenerationRequest) -> None:
        if request.rollout_id < 0:
            self._held.append(request)
        else:
            self._state.requeue.append(request.rollout_id)

    def _begin_held(self) -> None:
        held, self._held = self._held, []
        self.begin(held)

    def turned(self, replica: Replica, collected: Collected) -> None:
        """Give turns that a replica has sampled to their episodes. One that it does not hold any more was issued again,
        or given up."""
        finished, failed = list[RolloutInfo](), list[GenerationFailure]()
        for info in collected.finished:
            if self._is_awaited(replica, info):
                replica.end(info.rollout_id, self._state.now(), finished=True)
                finished.append(info)
        for failure in collected.failed:
            if self._is_awaited(replica, failure):
                replica.end(failure.rollout_id, self._state.now(), finished=False)
                failed.append(failure)
        self._pass_on(finished)
        for failure in failed:
            self._fail(failure)
        if finished or failed:
            self._state.touch(replica, *(() if replica.in_flight else (self._state.emptied,)))

    def _is_awaited(self, replica: Replica, told: RolloutInfo | GenerationFailure) -> bool:
        """An answer that was late may be of an attempt before, whose successor the replica has now."""
        wanted = self._table.wanted.get(told.rollout_id)
        return told.rollout_id in replica.in_flight and wanted is not None and wanted.tag == told.tag

    def _pass_on(self, finished: Sequence[RolloutInfo]) -> None:
        shares: dict[str, list[RolloutInfo]] = {}
        for info in finished:
            self._turn_ended(info.rollout_id)
            self._table.last[info.rollout_id] = info.generator_id
            group = self._state.groups.get(info.group_id)
            if group is not None:
                group.newest = max(group.newest, info.max_version)
            shares.setdefault(self._table.at[info.rollout_id], []).append(info)
        for name, own in shares.items():
            if name not in self._down:
                self._worker(name).sampled([info.payload for info in own])

    def _turn_ended(self, rollout_id: int) -> None:
        """From now on the environment is at work."""
        del self._table.wanted[rollout_id]
        self._table.since[rollout_id] = self._state.now()

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
                if turn.tag % ATTEMPT == 0:
                    table.opened(turn.rollout_id, state.now())
                if turn.rollout_id < 0:
                    self._ask(turn)
                else:
                    state.requeue.append(turn.rollout_id)
        finished = [info for info in news.finished if table.at.get(info.rollout_id) == worker.name]
        for info in finished:
            self._end(info.rollout_id)
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
        self._end(rollout_id)
        if rollout_id < 0:
            self._answered(rollout_id, None)
            return
        group = self._state.groups.get(rollout_id // self._state.config.num_generations)
        if group is not None and failure.epoch >= group.epoch:
            self._assembly.failed(rollout_id, group.group_id, failure.error, None)
            for annotator in self._annotators:
                annotator.arrived([])  # its group may be whole now
            self._state.progressed(self._state.queue)

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
        for rollout_id in rollout_ids:
            self._clear(rollout_id)

    def _end(self, rollout_id: int) -> None:
        """The episode is over. A turn of it may still wait or be sampled: a late one may end before its turn does."""
        if rollout_id in self._table.wanted:
            if rollout_id in self._state.requeue:
                self._state.requeue.remove(rollout_id)
            for telling in self._withdrawn([rollout_id]):
                task = asyncio.create_task(telling)
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)
        self._forget(rollout_id)
        self._clear(rollout_id)

    def _withdrawn(self, rollout_ids: Collection[int]) -> list[Coroutine[Any, Any, Any]]:
        """Take turns of these episodes from the replicas that sample them; what tells the replicas."""
        state, telling = self._state, []
        for replica in state.replicas:
            held = sorted(replica.in_flight.intersection(rollout_ids))
            for rollout_id in held:
                replica.end(rollout_id, state.now(), finished=False)
            if held:
                state.touch(replica, state.emptied)
            if held and replica.alive:
                told = replica.handle.call(LONG_SECONDS, GeneratorWorker.cancel, held)
                telling.append(state.heard(replica, told))
        return telling

    def _forget(self, rollout_id: int) -> None:
        self._state.expect_no_more(rollout_id)
        self._table.forget(rollout_id)

    def _clear(self, rollout_id: int) -> None:
        """No worker will die with it any more."""
        if self._table.deaths.pop(rollout_id, 0) >= DEATHS_ALLOWED:
            self._state.room.notify()  # the next one may begin
            self._begin_held()

    async def _replace(self, worker: EpisodesHandle, error: ReplicaError) -> bool:
        """Start the lost worker and its episodes again; False if it is not restarted and others take its work over."""
        self._state.journal.note("died", replica=worker.name, reason=str(error))
        self._down.add(worker.name)
        failed = self._blame(worker, error)
        lost = sorted(i for i, name in self._table.at.items() if name == worker.name)
        self._state.message(f"{error} Its {len(lost)} episodes start again.")
        await self._take_back(lost)
        self._held += [self._requests[i] for i in lost if i in self._requests]
        self._begin_held()
        try:
            await worker.restart(error, counts=not failed)
            stays = True
        except WorkerLostError:
            self._workers.remove(worker)
            if not self._workers:
                raise
            stays = False
        finally:
            self._down.discard(worker.name)
        self._begin_held()
        self._state.progressed()
        return stays

    def _blame(self, worker: EpisodesHandle, error: ReplicaError) -> bool:
        """Note the death with each episode whose environment was at work. Whether one has failed with it, which
        explains the death."""
        table = self._table
        played = [i for i in table.playing if table.at[i] == worker.name]
        table.deaths.update(played)
        failed = [i for i in played if table.deaths[i] > DEATHS_ALLOWED]
        for rollout_id in failed:
            cause = f"Its episode worker died {table.deaths[rollout_id]} times with it: {error}"
            self._fail(GenerationFailure(rollout_id, cause, self._state.epoch))
        return bool(failed)

    async def _take_back(self, lost: Sequence[int]) -> None:
        """Issue these episodes again. A turn of them that is being sampled is cancelled first: an engine knows one
        request of an id."""
        state = self._state
        sampled = {i for replica in state.replicas for i in replica.in_flight.intersection(lost)}
        for rollout_id in lost:
            self._attempts[rollout_id] += 1
            self._forget(rollout_id)
        telling = self._withdrawn(lost)
        for rollout_id in set(state.requeue).intersection(lost):  # for its turn, not yet to begin again
            state.requeue.remove(rollout_id)
        self._issue_again([i for i in lost if i not in sampled])
        await asyncio.gather(*telling)
        self._issue_again(sorted(sampled))

    def _issue_again(self, lost: Sequence[int]) -> None:
        state = self._state
        for rollout_id in lost:
            entry = state.ledger.get(rollout_id) if rollout_id >= 0 else None
            if entry is None or entry.state != "generating" or rollout_id in self._table.at:
                continue  # of an evaluation, or dropped or restored from a checkpoint meanwhile
            state.ledger.requeue(rollout_id)
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
            self.call_off(list(waiting))
            for rollout_id in waiting:
                self._answers.pop(rollout_id, None)
                self._requests.pop(rollout_id, None)

    def _answered(self, rollout_id: int, info: RolloutInfo | None) -> None:
        waiting = self._answers.get(rollout_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(info)

    def _ask(self, turn: TurnWanted) -> None:
        """Have a turn of an evaluation sampled, after one of an attempt before: an engine knows one request of an
        id."""
        rollout_id = turn.rollout_id
        task = asyncio.create_task(self._sample(turn, self._asking.get(rollout_id)))
        self._asking[rollout_id] = task

        def ended(task: asyncio.Task[None]) -> None:
            if self._asking.get(rollout_id) is task:
                del self._asking[rollout_id]
            waiting = self._answers.get(rollout_id)
            if not task.cancelled() and task.exception() is not None and waiting is not None and not waiting.done():
                waiting.set_exception(task.exception())  # type: ignore[arg-type]

        task.add_done_callback(ended)

    async def _sample(self, turn: TurnWanted, before: asyncio.Task[None] | None) -> None:
        state, rollout_id = self._state, turn.rollout_id

        def able() -> list[Replica]:
            return [r for r in state.replicas if r.alive and r.version >= 0]

        if before is not None:
            await asyncio.wait([before])
        while self._table.wanted.get(rollout_id) is turn:
            await state.changed.wait_for(able)
            replica = able()[rollout_id % len(able())]
            found = await state.heard(replica, replica.handle.generate_turn(rollout_id, turn.payload))
            if found is not None and self._table.wanted.get(rollout_id) is turn:
                self._turn_ended(rollout_id)
                if found:
                    self._worker(self._table.at[rollout_id]).sampled(self._runtime.store(found))
                else:
                    self._fail(GenerationFailure(rollout_id, "its turn could not be sampled"))

    async def close(self) -> None:
        tasks = [*self._asking.values(), *self._telling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
