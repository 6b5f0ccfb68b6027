"""A process group of the transport's own, beside torch.distributed's default group, and its disposal."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GLOO_THREADS = 4  # broadcasts in flight at once; measured best for buckets of 4 to 64 MB to two receivers


def device_identity(device: torch.device) -> str:
    """A text that two ranks share only when they share one accelerator; ``cpu`` for all CPUs."""
    if device.type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def choose_backend(identities: list[str]) -> str:
    """NCCL when every rank has an accelerator of its own (NCCL refuses two ranks on one), else gloo."""
    alone = len(set(identities)) == len(identities)
    return "nccl" if alone and all(i.startswith("cuda") for i in identities) and dist.is_nccl_available() else "gloo"


class BroadcastGroup:
    """Rank 0 broadcasts to all others. ``host``: this rank's address as the others reach it (gloo)."""

    def __init__(
        self, store: dist.Store, backend: str, rank: int, size: int, host: str, device: torch.device, seconds: float
    ) -> None:
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._works: list[Any] = []
        self._stream = torch.cuda.Stream(device) if backend == "nccl" else None
        # Longer than the control lines wait: these know who is silent, while a broadcast that gives up first would have
        # an innocent receiver report it.
        last_resort = timedelta(seconds=2 * seconds + 2)
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = last_resort
            with torch.cuda.device(device):
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            gloo = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=host)]
            options._timeout = last_resort
            options._threads = GLOO_THREADS
            self._group = gloo(store, rank, size, options)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Start the broadcasts, one a tensor, in order; returns at once."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self._own_stream():
            self._works = [self._group.broadcast([tensor], options) for tensor in tensors]

    def completed(self, place: int) -> bool:
        """Whether one broadcast has ended, well or not; never blocks."""
        return bool(self._works[place].is_completed())

    def wait_one(self, place: int) -> None:
        """As ``wait``, for one broadcast."""
        with self._own_stream():
            self._works[place].wait()
        if self._stream is not None:
            self._stream.synchronize()

    def finished(self) -> bool:
        """Whether every broadcast has ended, well or not; never blocks."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Block, without the GIL, until the broadcasts have ended; raises RuntimeError when one failed."""
        with self._own_stream():
            for work in self._works:
                work.wait()
        if self._stream is not None:
            self._stream.synchronize()
        self._works = []

    def dispose(self) -> None:
        """Let go of the group. What a lost rank left unfinished keeps gloo's destructor waiting until the time-out, so
        that then a thread does it.
        """
        held, idle = [self._works, self._group], self.finished()
        self._works, self._group = [], None
        if idle:
            held.clear()
        else:
            threading.Thread(target=held.clear, name="dispose-weight-group", daemon=True).start()

    def _own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """NCCL's waits belong on a stream of their own, or they would hold up the learner's kernels."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
