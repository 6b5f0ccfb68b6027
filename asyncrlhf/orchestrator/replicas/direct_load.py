"""Weight loads without staging: a replica's engine workers receive weights bucket by bucket while the engine pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from asyncrlhf.actors.build_generator import taken_by_workers
from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.handles import LONG_SECONDS, GeneratorHandle, Runtime
from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.errors import LearnerLostError, ReplicaError, WeightSyncError
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.transport.protocol import LostReceiversError, Ticket


class DirectLoads:
    """The workers of each replica form a weight group of their own with the learner: no replica waits for another, and
    the death of one leaves the other groups intact. Transfers run one at a time, so that each replica pauses for its
    own transfer only."""

    def __init__(self, state: RunState, runtime: Runtime) -> None:
        config = state.config
        self._state, self._runtime = state, runtime
        self._workers = {
            kind.prefix: kind.config.vllm.workers
            for kind in replica_kinds(config.generator)
            if taken_by_workers(kind.config, config.model, config.weights, config.runtime)
        }
        self._groups: dict[str, tuple[GeneratorHandle, int]] = {}  # a replica's handle, and its group's epoch
        self._wire = asyncio.Lock()

    def serves(self, replica: Replica) -> bool:
        return self._prefix(replica) in self._workers

    def forget(self) -> None:
        """The learner is lost, and its end of every group with it."""
        self._groups.clear()

    async def load(
        self, replica: Replica, newest: Callable[[], Awaitable[Ticket]], load: Callable[[], Awaitable[None]]
    ) -> None:
        """Send the ``newest`` version to the replica, which receives it between two engine steps: ``load`` asks it to.
        A replica that does not receive the whole version is reported as dead, for its model mixes two versions."""
        async with self._wire:
            if not replica.alive:
                return
            try:
                epoch = await self._group(replica)
                ticket = replace(await newest(), epoch=epoch)
                await replica.handle.call(LONG_SECONDS, GeneratorWorker.receive, ticket)
                await self._transfer(replica, ticket, load)
            except LearnerLostError:
                raise
            except LostReceiversError as error:
                reasons = "; ".join(f"{name} {reason}" for name, reason in error.receivers.items())
                self._state.died(replica, ReplicaError(f"{reasons} during a weight transfer"))
            except ReplicaError as error:
                self._state.died(replica, error)

    async def _transfer(self, replica: Replica, ticket: Ticket, load: Callable[[], Awaitable[None]]) -> None:
        loading = asyncio.ensure_future(load())
        try:
            await self._runtime.learner.call(LONG_SECONDS, LearnerWorker.transfer, ticket)
            await loading
        except LostReceiversError:
            raise
        except WeightSyncError as error:
            raise ReplicaError(f"{replica.name} did not load version {ticket.version}: {error}") from error
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def _group(self, replica: Replica) -> int:
        """The epoch of the replica's weight group; forms the group first if the replica's process is new."""
        handle, epoch = self._groups.get(replica.name, (None, 0))
        if handle is not replica.handle:
            epoch = await self._runtime.connect([replica.handle], self._workers[self._prefix(replica)])
            self._groups[replica.name] = (replica.handle, epoch)
        return epoch

    @staticmethod
    def _prefix(replica: Replica) -> str:
        return replica.name.rpartition("-")[0]
