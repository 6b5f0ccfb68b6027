"""One copy for each machine: the receiver of a machine stages weights in memory that its neighbours map and load from.

The machines' receivers form the weight group. Its buckets pass from one to the next (``collective/chain.py``), so that
the learner's link carries a version once, however many replicas and workers there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.collective.receiver import CollectiveReceiver
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.shared_memory import SharedMemoryReceiver


class RelayReceiver(CollectiveReceiver):
    """Both kinds: :meth:`receive` takes a version from the group and :meth:`offer` hands it on to neighbours;
    :meth:`stream` loads what a neighbour offers. The controller decides which, publish by publish."""

    def __init__(self, *, timeout_seconds: float = 120.0, device: torch.device | str = "cpu") -> None:
        """``device``: of the engine; staged is on the host in any case."""
        super().__init__(timeout_seconds=timeout_seconds, device="cpu")
        self.shares = True
        self._neighbour = SharedMemoryReceiver(timeout_seconds=timeout_seconds, device=device)
        self._offer: Ticket | None = None

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        self._neighbour.connect(endpoint, rank, world_size, epoch, name)
        super().connect(endpoint, rank, world_size, epoch, name)

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        self._offer = None
        weights = super().receive(ticket)
        if (mine := self._membership) is None:
            raise WeightSyncError(f"Version {ticket.version} is gone: the group that brought it has ended.")
        self._offer = replace(ticket, refs=mine.staging.place, sparse=False)
        return weights

    def offer(self) -> Ticket:
        """The ticket with which neighbours load the version received last; valid until the next :meth:`receive`."""
        if self._offer is None:
            raise WeightSyncError("There is no version to hand on: it was not received whole.")
        return self._offer

    def stream(self, ticket: Ticket) -> Iterator[Mapping[str, torch.Tensor]]:
        return self._neighbour.stream(ticket)

    def close(self) -> None:
        super().close()
        self._neighbour.close()  # who joins the group itself needs no neighbour's copy any more
        self._offer = None
