"""The messages between a learner's sender and a generator's receiver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.types import WeightManifest


class LostReceiversError(WeightSyncError):
    """Weights did not reach some receivers; ``receivers`` maps each one's name to its error."""

    def __init__(self, what: str, receivers: Mapping[str, str]) -> None:
        self.what, self.receivers = what, dict(receivers)
        super().__init__(f"{what}: {'; '.join(f'{name} {reason}' for name, reason in self.receivers.items())}.")

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call __init__ with only the finished sentence when the error crosses a process.
        return LostReceiversError, (self.what, self.receivers)


def worker_name(replica: str, worker: int) -> str:
    """The name of a replica's worker as a receiver."""
    return f"{replica}/{worker}"


def replica_name(receiver: str) -> str:
    """The replica that a receiver belongs to."""
    return receiver.partition("/")[0]


@dataclass(frozen=True)
class Ticket:
    """The permission to receive one published version; small and picklable, since messages carry it to the receivers.

    ``refs``: where the buckets lie, for transports that do not send them. ``checksums``: one per bucket; empty without
    ``weights.checksum``. ``sparse``: a receiver keeps the buckets whose checksum it already has, and may get patches.
    """

    version: int
    epoch: int
    manifest: WeightManifest
    refs: tuple[Any, ...] = ()
    checksums: tuple[int, ...] = ()
    sparse: bool = False


@dataclass(frozen=True)
class TransferStats:
    """``seconds`` of the transfer, payload ``bytes`` sent to each receiver (with ``weights.delta`` fewer than the
    model's), ``stall_seconds`` for which the learner was blocked. ``changed``: of each layer how many words differ from
    the version before, and how many it has; empty where nothing was compared."""

    seconds: float
    bytes: int
    stall_seconds: float
    changed: Mapping[str, tuple[int, int]] = field(default_factory=dict)
