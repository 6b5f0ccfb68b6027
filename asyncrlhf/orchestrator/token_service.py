"""Services whose calls are bounded by tokens and give rollouts back with something added: reference and critic."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.service import Service, Waiting
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.readahead.owners import ReadAhead
from asyncrlhf.types import Payload, Rollout, ServiceResult

Worker = TypeVar("Worker")


class TokenService(Service[Worker, ServiceResult]):
    """What waits is spread over the idle workers, but for what one of them has begun to read; a call holds at most
    ``budget`` tokens that are yet to be read."""

    def __init__(
        self,
        state: RunState,
        assembly: Assembly,
        workers: list[Worker],
        budget: int,
        chunks: ReadAhead[Any] | None = None,
    ) -> None:
        super().__init__(state, assembly, workers, chunks)
        self._budget = budget

    def arrived(self, waiting: Waiting) -> None:
        """A rollout left its generator, or the service before; the caller wakes the workers."""
        self._ready.append(waiting)
        if self._chunks is not None:
            self._chunks.promised([waiting.info])

    def _askable(self, wanted: list[Waiting]) -> list[Waiting]:
        """Those of ``wanted`` that one call may hold now, oldest first."""
        return wanted

    def _mine(self, worker: Worker) -> list[Waiting]:
        """The oldest that are still wanted: a sibling's or another service's failure may have ended them meanwhile."""
        while self._ready and not self._assembly.awaits(self._ready[0].info):
            self._ready.popleft()
        wanted = self._askable(self._wanted(worker))
        idle = max(1, len(self._workers) - self._calls)
        costs = [self._left(worker, waiting) for waiting in wanted]
        own = sum(cost for waiting, cost in zip(wanted, costs, strict=True) if self._owns(worker, waiting))
        room = min(self._budget, own + math.ceil((sum(costs) - own) / idle))
        batch: list[Waiting] = []
        for waiting, cost in zip(wanted, costs, strict=True):
            room -= cost
            if batch and room < 0:
                break
            batch.append(waiting)
        return batch

    def _wanted(self, worker: Worker) -> list[Waiting]:
        return [w for w in self._ready if self._assembly.awaits(w.info) and self._may_take(worker, w)]

    def _full(self, worker: Worker, batch: Sequence[Waiting]) -> bool:
        """More are waiting than fit, or what there is fills the call."""
        tokens = sum(self._left(worker, waiting) for waiting in batch)
        return len(batch) < len(self._wanted(worker)) or tokens >= self._budget

    def _owns(self, worker: Worker, waiting: Waiting) -> bool:
        return self._chunks is not None and self._chunks.owns(worker, waiting.info)

    def _left(self, worker: Worker, waiting: Waiting) -> int:
        """Tokens that the worker has not read, at least one."""
        read = self._chunks.read_by(worker, waiting.info) if self._chunks is not None else 0
        return max(1, waiting.info.prompt_length + waiting.info.response_length - read)

    @abstractmethod
    def _accept(self, waiting: Waiting, result: ServiceResult) -> None: ...

    def _failure(self, rollout_id: int, cause: str) -> ServiceResult:
        return ServiceResult(rollout_id, None, error=cause)


async def completed_by(
    ask: Callable[[Sequence[Payload]], Awaitable[list[ServiceResult]]],
    rollouts: Mapping[int, Rollout],
    lacking: Sequence[Rollout],
    runtime: Runtime,
) -> dict[int, Rollout]:
    """A checkpoint's rollouts, ``lacking`` with what ``ask`` gives. Raises AsyncRLHFError when it fails for one."""
    results = await ask(runtime.store(lacking))
    failed = next((r for r in results if r.payload is None), None)
    if failed is not None:
        raise AsyncRLHFError(f"Rollout {failed.rollout_id} of the checkpoint cannot be taken up: {failed.error}")
    fresh = await runtime.fetch([r.payload for r in results if r.payload is not None])
    return {**rollouts, **{r.rollout_id: r for r in fresh}}
