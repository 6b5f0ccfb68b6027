"""From finished rollouts to annotated ones: rewards, reference log-probs and values are computed in parallel.

Each kind of worker (reward, reference, critic) has one :class:`Annotator`: a queue of finished rollouts that all
workers of the kind share. The assembly completes a rollout when every kind has annotated it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from asyncrlhf.actors.messages import Collected
from asyncrlhf.cluster.handles import AnnotatorHandle, WorkerLostError
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.rollouts.assembly import Assembly
from asyncrlhf.orchestrator.rollouts.read_ahead import reading_ahead
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.readahead.owners import ChunkInfo, ReadTotals
from asyncrlhf.types import Annotation, Payload, RolloutInfo

DEATHS_ALLOWED = 1  # calls with a rollout that end with the worker's death; with one more, the rollout has failed
CALL_ROLLOUTS = 64  # in one call outside the queues, so that no call is longer than its deadline


class Annotator:
    """The queue of one kind of worker. One call's rollouts cost at most ``budget`` together.

    A model's cost is counted in tokens, and the waiting rollouts are spread over its idle workers. With ``totals``,
    idle workers read chunks of unfinished rollouts, and ``totals`` counts the tokens that they read.
    """

    kind: str

    def __init__(
        self,
        state: RunState,
        assembly: Assembly,
        workers: list[AnnotatorHandle],
        budget: int,
        totals: ReadTotals | None = None,
    ) -> None:
        self._state = state
        self._assembly = assembly
        self.workers = workers  # alive
        self._budget = budget
        self._ready: deque[RolloutInfo] = deque()
        self._suspects: deque[RolloutInfo] = deque()  # their worker died in a call with them: each is scored alone
        self._deaths: dict[int, int] = {}  # by rollout id
        self.in_hand: dict[str, set[int]] = {}  # by worker: rollout ids in its call under way
        self._calls = 0  # under way
        readers = [] if totals is None else workers
        self._ahead = reading_ahead(state, self.kind, readers, totals or ReadTotals())

    @property
    def title(self) -> str:
        """What user-facing sentences call one of its workers."""
        return f"{self.kind} worker"

    @property
    def queued(self) -> list[int]:
        """Ids of rollouts that wait for a worker, or are part of a call that has not answered yet."""
        waiting = [w.rollout_id for w in [*self._suspects, *self._ready] if self._wants(w)]
        return sorted(set().union(*self.in_hand.values())) + waiting

    def arrived(self, finished: Sequence[RolloutInfo]) -> None:
        """Queue rollouts that their generator has finished; the caller wakes the workers."""
        self._ready.extend(finished)
        self._ahead.promised([w for w in finished])

    def chunks_arrived(self, chunks: Sequence[ChunkInfo]) -> None:
        """Queue chunks of unfinished rollouts; without effect if no worker reads ahead."""
        self._ahead.arrived(chunks)

    async def serve(self, worker: AnnotatorHandle) -> None:
        """Call one worker in a loop. Returns when it is lost; raises ReplicaError if no other worker is left."""
        while True:
            await self._state.queue.wait_for(lambda: self._has_work(worker))
            if not (batch := await self._next_batch(worker)):
                if not await self._read_ahead(worker):
                    return
                continue
            self.in_hand[worker.name] = {w.rollout_id for w in batch}
            self._calls += 1
            try:
                annotations = await self._call(worker, batch)
            except WorkerLostError as error:
                self._lose(worker, batch, error)
                return
            except ReplicaError as error:
                self._died(worker, error)
                self._suspect(batch, error)
                continue
            finally:
                del self.in_hand[worker.name]
                self._calls -= 1
            self._ahead.answered(worker, [w for w in batch])
            self._file(batch, annotations)

    def _has_work(self, worker: AnnotatorHandle) -> bool:
        return bool(self._suspects) or any(True for _ in self._wanted(worker)) or self._ahead.has_work(worker)

    async def _next_batch(self, worker: AnnotatorHandle) -> list[RolloutInfo]:
        """The rollouts of the worker's next call: one suspect alone, or a batch. While generators are busy, a batch
        that is not full waits up to ``fusion.max_wait_ms`` for more rollouts."""
        if self._suspects:
            return [self._suspects.popleft()]
        wait_ms = self._state.config.fusion.max_wait_ms
        batch, full = self._batch(worker)
        if batch and not full and wait_ms > 0 and any(r.in_flight for r in self._state.replicas):
            await asyncio.sleep(wait_ms / 1000)
            batch, _ = self._batch(worker)
        self._remove({w.rollout_id for w in batch})
        return batch

    def _remove(self, taken: set[int]) -> None:
        """Remove these ids from the queue, and unwanted rollouts that stand before them or at the front. The rest of
        the queue is not visited, so that a call costs the same however long the queue is."""
        kept: list[RolloutInfo] = []
        while self._ready and (taken or not self._wants(self._ready[0])):
            info = self._ready.popleft()
            if info.rollout_id in taken:
                taken.remove(info.rollout_id)
            elif self._wants(info):
                kept.append(info)
        self._ready.extendleft(reversed(kept))

    def _batch(self, worker: AnnotatorHandle) -> tuple[list[RolloutInfo], bool]:
        """The oldest rollouts that this worker may take now, between one and a call's; and whether the call is full."""
        wanted = list(self._wanted(worker))
        costs = [self._cost(worker, w) for w in wanted]
        room = self._room(worker, wanted, costs)
        batch: list[RolloutInfo] = []
        for info, cost in zip(wanted, costs, strict=True):
            room -= cost
            if batch and room < 0:
                break
            batch.append(info)
        return batch, len(batch) < len(wanted) or sum(costs) >= self._budget

    def _wants(self, info: RolloutInfo) -> bool:
        """Whether the rollout's group still waits for it: a failure or a drop may have ended the rollout meanwhile."""
        return self._assembly.awaits(info)

    def _wanted(self, worker: AnnotatorHandle) -> Iterator[RolloutInfo]:
        """The rollouts that this worker may take, oldest first: not those whose beginning another worker has read
        ahead."""
        return (w for w in self._ready if self._wants(w) and self._ahead.may_take(worker, w))

    def _cost(self, worker: AnnotatorHandle, info: RolloutInfo) -> int:
        """Tokens of the rollout that the worker has not read yet, at least 1."""
        return max(1, info.tokens - self._ahead.read_by(worker, info))

    def _room(self, worker: AnnotatorHandle, wanted: Sequence[RolloutInfo], costs: Sequence[int]) -> int:
        """Tokens that the worker's next call may hold: all of the rollouts that it began to read, and an equal share of
        the others among the idle workers."""
        owned = [self._ahead.owns(worker, w) for w in wanted]
        own = sum(cost for cost, is_own in zip(costs, owned, strict=True) if is_own)
        idle = max(1, len(self.workers) - self._calls)
        return min(self._budget, own + math.ceil((sum(costs) - own) / idle))

    async def _call(self, worker: AnnotatorHandle, batch: Sequence[RolloutInfo]) -> list[Annotation]:
        return await worker.annotate([w.payload for w in batch])

    async def _read_ahead(self, worker: AnnotatorHandle) -> bool:
        """Give an idle worker chunks to read; returns False if the worker is lost."""
        try:
            await self._ahead.read(worker)
        except WorkerLostError as error:
            self._lose(worker, [], error)
            return False
        except ReplicaError as error:
            self._died(worker, error)
            self._state.message(f"{error} Its read-ahead is lost.")
        return True

    def _file(self, batch: Sequence[RolloutInfo], annotations: Sequence[Annotation]) -> None:
        """Hand each rollout of the batch its annotation; ``annotations`` may come in any order."""
        by_id = {annotation.rollout_id: annotation for annotation in annotations}
        for info in batch:
            self._deaths.pop(info.rollout_id, None)
            self._accept(info, by_id[info.rollout_id])
        self._state.progressed(self._state.queue)

    def _accept(self, info: RolloutInfo, annotation: Annotation) -> None:
        self._assembly.annotated(self.kind, info, annotation)

    def _lose(self, worker: AnnotatorHandle, batch: Sequence[RolloutInfo], error: ReplicaError) -> None:
        """Remove a lost worker and continue with the others; raises ReplicaError if none is left."""
        self.workers.remove(worker)
        self._died(worker, error)
        if not self.workers:
            raise ReplicaError(f"No {self.title} is left: {error}")
        self._suspect(batch, error)

    def _died(self, worker: AnnotatorHandle, error: ReplicaError) -> None:
        self._ahead.lost(worker)
        self._state.journal.note("died", replica=worker.name, reason=str(error))

    def _suspect(self, batch: Sequence[RolloutInfo], error: ReplicaError) -> None:
        """The worker died in a call with these rollouts: queue each for a call of its own, or fail it if it has had
        one."""
        again = f" Its {len(batch)} rollouts are scored again, one by one." if batch else ""
        self._state.message(f"{error}{again}")
        for info in batch:
            deaths = self._deaths[info.rollout_id] = self._deaths.get(info.rollout_id, 0) + 1
            if deaths <= DEATHS_ALLOWED:
                self._suspects.append(info)
                continue
            cause = f"Its {self.title} died {deaths} times with it: {error}"
            self._file([info], [Annotation(info.rollout_id, error=cause)])
        self._state.progressed()


class Rewards(Annotator):
    """A call holds up to ``fusion.max_batch`` rollouts; ``fusion.granularity`` decides when a finished rollout may be
    scored: at once, when its group is whole, or when its batch is. Reference and critic workers get each rollout at
    once."""

    kind = "reward"

    def __init__(self, state: RunState, assembly: Assembly, workers: list[AnnotatorHandle]) -> None:
        totals = state.prefill if state.config.reward_reads_ahead else None
        super().__init__(state, assembly, workers, state.config.fusion.max_batch, totals)
        self._held: list[RolloutInfo] = []

    @property
    def queued(self) -> list[int]:
        return super().queued + [w.rollout_id for w in self._held if self._wants(w)]

    def arrived(self, finished: Sequence[RolloutInfo]) -> None:
        """Queue finished rollouts. Call it after a failed rollout too: its group may be whole now."""
        held = [w for w in [*self._held, *finished] if self._wants(w)]
        ready = self._released(held)
        super().arrived(ready)
        chosen = {w.rollout_id for w in ready}
        self._held = [w for w in held if w.rollout_id not in chosen]

    def _released(self, held: list[RolloutInfo]) -> list[RolloutInfo]:
        """The rollouts that ``fusion.granularity`` allows to be scored now."""
        granularity, groups = self._state.config.fusion.granularity, self._state.groups
        if granularity == "group":
            return [w for w in held if not groups[w.group_id].unfinished]
        if granularity == "batch" and len(held) < self._state.config.batch_size:
            return [] if any(group.unfinished for group in groups.values()) else held
        return held

    def _batch(self, worker: AnnotatorHandle) -> tuple[list[RolloutInfo], bool]:
        batch = list(islice(self._wanted(worker), self._budget))
        return batch, len(batch) == self._budget

    def _accept(self, info: RolloutInfo, annotation: Annotation) -> None:
        super()._accept(info, annotation)
        self._state.batch_faults(annotation.faults)


class References(Annotator):
    """The reference service (``reference.workers``)."""

    kind = "reference"

    def __init__(self, state: RunState, assembly: Assembly, workers: list[AnnotatorHandle]) -> None:
        totals = state.reference_prefill if state.config.reference_reads_ahead else None
        super().__init__(state, assembly, workers, state.config.reference.token_budget, totals)


@dataclass(eq=False)
class Collector:
    """Passes the rollouts that generators finish on to the annotators."""

    state: RunState
    assembly: Assembly
    annotators: Sequence[Annotator]
    turned: Callable[[Replica, Collected], None] | None = None  # takes the turns of episodes

    async def collect(self, replica: Replica) -> None:
        """Collect the finished rollouts of one replica until the replica is lost."""
        handle, busy_before, tokens_before = replica.handle, replica.busy_seconds, replica.tokens
        while True:
            collected = await self.state.heard(replica, handle.collect())
            if collected is None or not replica.alive or replica.handle is not handle:
                return  # buried as hanging, and back before its end: what it held is issued again already
            replica.busy_seconds = busy_before + collected.busy_seconds
            replica.tokens = tokens_before + collected.tokens
            if self.turned is not None:
                self.turned(replica, collected)
                continue
            for failure in collected.failed:
                replica.end(failure.rollout_id, self.state.now(), finished=False)
                group = self.state.groups.get(failure.rollout_id // self.state.config.num_generations)
                if group is not None and failure.epoch >= group.epoch:
                    self.assembly.failed(failure.rollout_id, group.group_id, failure.error, None)
            for annotator in self.annotators:
                annotator.chunks_arrived(collected.chunks)
            for info in collected.finished:
                replica.end(info.rollout_id, self.state.now(), finished=True)
            finished = [info for info in collected.finished if self.assembly.generated(info)]
            for annotator in self.annotators:
                annotator.arrived(finished)
            if collected.finished or collected.failed:
                emptied = () if replica.in_flight else (self.state.emptied,)
                self.state.touch(replica, self.state.queue, *emptied)


async def annotate(
    worker: AnnotatorHandle, payloads: Sequence[Payload], moved: Callable[[], None], ticket: Any = None
) -> list[Annotation]:
    """Annotations by one worker of rollouts in no queue, up to ``CALL_ROLLOUTS`` a call; calls ``moved`` after each."""
    annotations: list[Annotation] = []
    for start in range(0, len(payloads), CALL_ROLLOUTS):
        annotations += await worker.annotate(payloads[start : start + CALL_ROLLOUTS], ticket)
        moved()
    return annotations
