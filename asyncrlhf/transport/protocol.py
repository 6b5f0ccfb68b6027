"""The transport protocols: what a learner's sender and a generator's receiver promise each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.types import WeightManifest


class LostReceiversError(WeightSyncError):
    """Weights did not reach some receivers; ``receivers`` maps each one's name to what happened to it."""

    def __init__(self, what: str, receivers: Mapping[str, str]) -> None:
        self.receivers = dict(receivers)
        super().__init__(f"{what}: {'; '.join(f'{name} {reason}' for name, reason in self.receivers.items())}.")

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call __init__ with the finished sentence alone when the error crosses a process.
        return _rebuild, (str(self), self.receivers)


def _rebuild(sentence: str, receivers: Mapping[str, str]) -> LostReceiversError:
    error = LostReceiversError("", receivers)
    error.args = (sentence,)
    return error


@dataclass(frozen=True)
class Ticket:
    """The right to receive one published version; small, and picklable, since messages carry it to the receivers.

    ``refs``: where the buckets lie, for the transports that do not send them. ``checksums``: one a bucket; empty
    without ``weights.checksum``. ``delta``: a receiver keeps the buckets whose checksum it holds already.
    """

    version: int
    epoch: int
    manifest: WeightManifest
    refs: tuple[Any, ...] = ()
    checksums: tuple[int, ...] = ()
    delta: bool = False


@dataclass(frozen=True)
class TransferStats:
    """``seconds`` of the transfer, payload ``bytes`` sent to each receiver (with ``weights.delta`` fewer than the
    model's), ``stall_seconds`` the learner stood still.
    """

    seconds: float
    bytes: int
    stall_seconds: float


class WeightSender(Protocol):
    """Lives beside the learner. The training thread calls ``begin_snapshot`` and ``fence``; another calls the rest."""

    def listen(self, host: str = "") -> str:
        """Open the rendezvous and return its endpoint, ``host:port``; an empty text where none is needed."""
        ...

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        """Form the group of ``epoch`` with ``receivers`` (rank i+1 is ``receivers[i]``); drops the group before it.

        Blocks until all have called their own ``connect``. Raises LostReceiversError naming those who did not.
        """
        ...

    def begin_snapshot(self, version: int, params: Mapping[str, torch.Tensor]) -> None:
        """Have ``params`` stand for ``version`` from now on. They must not change before ``fence`` has returned."""
        ...

    def fence(self) -> float:
        """Wait until nothing reads the parameters any more, before they change: at the head of an optimizer step.

        Returns the seconds waited for the copy, 0 when none was begun. Raises WeightSyncError naming a tensor that does
        not fit.
        """
        ...

    def ticket(self) -> Ticket:
        """The ticket of the newest version, to be handed to every receiver."""
        ...

    def transfer(self, ticket: Ticket) -> TransferStats:
        """Send the version; blocks until every receiver of the group has it (``collective``), or until receivers can
        fetch it (``local``, ``object_store``, ``disk``: a receiver has it when its own call returns).

        Raises LostReceiversError naming the receivers that died, refused or did not answer within the time-out. The
        group is gone then: ``connect`` a new epoch with the survivors.
        """
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What the newest version holds, for comparison."""
        ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """Lives beside an engine; its calls run in one thread while the engine goes on sampling."""

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        """Join the group of ``epoch`` as ``rank`` (1 <= rank < ``world_size``; the sender is 0)."""
        ...

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        """Take part in the transfer of ``ticket``. Returns views on staging memory, valid until the next call.

        Raises WeightSyncError when the ticket is not what the sender sends, the sender is lost, or a bucket's checksum
        differs.
        """
        ...

    def close(self) -> None: ...
