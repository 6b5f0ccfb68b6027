"""Live parameters as the source of a transfer: no copy of the model, and an update that waits until it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.gather import whole
from asyncrlhf.transport.manifest import check_params, copy_tensors, view_of, wire_dtype
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.snapshot import Wire
from asyncrlhf.types import TensorEntry, WeightManifest


def bucket_buffer(manifest: WeightManifest, device: torch.device | str = "cpu") -> torch.Tensor:
    """Memory for any one bucket of ``manifest``: uint8 [bytes of the largest]."""
    return torch.zeros(max(manifest.bucket_bytes), dtype=torch.uint8, device=device)


def bucket_views(entries: Sequence[TensorEntry], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of one bucket as views on ``buffer``."""
    return {entry.name: view_of(entry, buffer) for entry in entries}


def gather_bucket(
    entries: Sequence[TensorEntry], params: Mapping[str, torch.Tensor], buffer: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Copy one bucket's tensors into ``buffer``, cast to what they travel as; returns the views on it."""
    views = bucket_views(entries, buffer)
    with whole(params, tuple(views)) as tensors:
        copy_tensors(views, tensors)
    return views


class Rounded(Mapping[str, torch.Tensor]):
    """Parameters as they travel, each cast when it is asked for."""

    def __init__(self, params: Mapping[str, torch.Tensor], cast: torch.dtype | None) -> None:
        self._params, self._cast = params, cast

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._params[name].detach()
        return tensor.to(wire_dtype(tensor.dtype, self._cast))

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


class LiveHolder:
    """Holds the training thread at its ``fence`` from ``begin_snapshot`` until ``release``.

    ``lock`` is held by a transfer, so that a release that comes from elsewhere does not cut it short.
    """

    def __init__(self, manifest: WeightManifest, wire: Wire | None = None) -> None:
        self.manifest = manifest
        self.wire = wire or Wire()
        self.epoch = 0
        self.lock = threading.Lock()
        self.stall_seconds = 0.0
        self._version: int | None = None
        self._params: Mapping[str, torch.Tensor] = {}
        self._changed = threading.Condition()

    def begin_snapshot(self, version: int, params: Mapping[str, torch.Tensor]) -> None:
        self.fence()
        check_params(self.manifest, params, self.wire.cast)
        with self._changed:
            self.stall_seconds = 0.0
            self._version, self._params = version, dict(params)

    def fence(self) -> float:
        started = time.perf_counter()
        with self._changed:
            if self._version is None:
                return 0.0
            self._changed.wait_for(lambda: self._version is None)
            self.stall_seconds = time.perf_counter() - started
        return self.stall_seconds

    def release(self, version: int) -> None:
        with self.lock, self._changed:
            if self._version == version:
                self._version, self._params = None, {}
                self._changed.notify_all()

    def abandon(self) -> None:
        """Let the training thread go whatever is under way: the run is over."""
        with self._changed:
            self._version, self._params = None, {}
            self._changed.notify_all()

    def ticket(self) -> Ticket:
        with self._changed:
            return Ticket(self._held()[0], self.epoch, self.manifest)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        with self._changed:
            return Rounded(self._held()[1], self.wire.cast)

    def held_for(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        """The live parameters that ``ticket`` speaks of; raises WeightSyncError when it is out of date."""
        with self._changed:
            if (ticket.version, ticket.epoch) != (self._version, self.epoch):
                raise WeightSyncError(
                    f"The ticket is for version {ticket.version} of epoch {ticket.epoch}, but the sender holds "
                    f"version {self._version} of epoch {self.epoch}."
                )
            return self._params

    def _held(self) -> tuple[int, Mapping[str, torch.Tensor]]:
        if self._version is None:
            raise WeightSyncError("There is no snapshot to publish: the learner holds no version still.")
        return self._version, self._params
