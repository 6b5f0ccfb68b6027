"""One copy for each machine: the receiver of a machine stages weights in memory that its neighbours map and load from.

The machines' receivers form the weight group. Its buckets pass from one to the next (``collective/chain.py``), so that
the learner's link carries a version once, however many replicas and workers there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.collective.receiver import CollectiveReceiver
from asyncrlhf.transport.memory_file import SharedBuckets
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.shared_memory import SharedMemoryReceiver


class RelayReceiver(CollectiveReceiver):
    """Both kinds: :meth:`receive` takes a version from the group and :meth:`offer` hands it on to neighbours;
    :meth:`stream` loads what a neighbour offers. The controller decides which, publish by publish.

    Where neighbours load at any time, a version stays as it is while the next one arrives in other memory: that of an
    earlier version, unless someone still reads it. It also outlives the group that brought it."""

    def __init__(self, *, timeout_seconds: float = 120.0, device: torch.device | str = "cpu") -> None:
        """``device``: of the engine; staged is on the host in any case."""
        super().__init__(timeout_seconds=timeout_seconds, device="cpu")
        self.shares = True
        self._neighbour = SharedMemoryReceiver(timeout_seconds=timeout_seconds, device=device)
        self._offer: Ticket | None = None
        self._offered: SharedBuckets | None = None  # memory of the version that others load at any time
        self._earlier: list[SharedBuckets] = []  # memories of versions before it

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        self._neighbour.connect(endpoint, rank, world_size, epoch, name)
        super().connect(endpoint, rank, world_size, epoch, name)

    def receive(self, ticket: Ticket, read: Sequence[Any] | None = None) -> Mapping[str, torch.Tensor]:
        """``read``: given if others load at any time; the places in which they read now."""
        self._offer = None
        if read is not None and (mine := self._membership) is not None:
            mine.staging.go_on_in(self._spare(ticket, read), self._offered)
        weights = super().receive(ticket)
        if (mine := self._membership) is None:
            raise WeightSyncError(f"Version {ticket.version} is gone: the group that brought it has ended.")
        self._offer = replace(ticket, refs=mine.staging.place, sparse=False)
        if read is not None:
            self._earlier += [self._offered] if self._offered is not None else []
            self._offered = mine.staging.give_up()
        return weights

    def _spare(self, ticket: Ticket, read: Sequence[Any]) -> SharedBuckets:
        """Memory that no load reads; of earlier versions no other such memory remains."""
        free = [memory for memory in self._earlier if memory.place not in read]
        self._earlier = [memory for memory in self._earlier if memory.place in read]
        for memory in free[1:]:
            memory.close()
        return free[0] if free else SharedBuckets(ticket.manifest)

    def offer(self) -> Ticket:
        """The ticket with which neighbours load the version received last; valid until the next :meth:`receive`."""
        if self._offer is None:
            raise WeightSyncError("There is no version to hand on: it was not received whole.")
        return self._offer

    def stream(self, ticket: Ticket) -> Iterator[Mapping[str, torch.Tensor]]:
        return self._neighbour.stream(ticket)

    def close(self) -> None:
        super().close()
        if self._offered is None:
            self._neighbour.close()  # who joins the group itself needs no neighbour's copy any more
        self._offer = None
