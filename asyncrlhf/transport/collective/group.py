"""A process group for the transport, separate from torch.distributed's default group: its formation and disposal."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncrlhf.transport.collective.chain import Chain

GLOO_THREADS = 4  # broadcasts in flight at once; measured best for buckets of 4 to 64 MB to two receivers


def device_identity(device: torch.device) -> str:
    """A text that two ranks share only if they share one accelerator; ``cpu`` for all CPUs."""
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
        self, store: dist.Store, backend: str, rank: int, size: int, host: str, device: torch.device, seconds: float,
        chained: bool = False,
    ) -> None:  # fmt: skip
        """``chained``: over gloo each rank passes on what it gets, in place of a tree."""
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._works: list[Any] = []
        self._stream = torch.cuda.Stream(device) if backend == "nccl" else None
        # Longer than the control lines' limit: these know which receiver is silent, while a broadcast that fails first
        # would be reported by an innocent receiver.
        last_resort = timedelta(seconds=2 * seconds + 2)
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = last_resort
            with torch.cuda.device(device):
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            gloo = dist.ProcessGroupGloo
            options = gloo._Options()  # type: ignore[attr-defined]
            options._devices = [gloo.create_device(hostname=host)]
            options._timeout = last_resort
            options._threads = GLOO_THREADS
            self._group = gloo(store, rank, size, options)
        self._chain = Chain(self._group, rank, size) if chained else None

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Start the broadcasts, one per tensor, in order; returns at once."""
        self._works = []
        for tensor in tensors:
            self.begin(tensor)

    def begin(self, tensor: torch.Tensor) -> None:
        """Start one more broadcast; returns at once."""
        if self._chain is not None:
            self._works.append(self._chain.begin(tensor))
            return
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self._own_stream():
            self._works.append(self._group.broadcast([tensor], options))

    def after_compute(self) -> None:
        """Let broadcasts that begin from here on wait for the device's present work, which may still read their
        memory."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def completed(self, place: int) -> bool:
        """Whether one broadcast has ended, with or without success; never blocks."""
        return bool(self._works[place].is_completed())

    def wait_one(self, place: int) -> None:
        """As ``wait``, for one broadcast."""
        with self._own_stream():
            self._works[place].wait()
        if self._stream is not None:
            self._stream.synchronize()

    def wait(self) -> None:
        """Block, without the GIL, until the broadcasts have ended; raises RuntimeError when one failed."""
        for place in range(len(self._works)):
            self.wait_one(place)
        self._works = []

    def take_first(self) -> None:
        """Wait for the oldest broadcast, then release it and its memory."""
        self.wait_one(0)
        del self._works[0]

    def rehearse(self) -> None:
        """Broadcast one byte, so that connections made at the first broadcast (NCCL) are made now. Raises RuntimeError
        if it fails."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self.after_compute()
        self.broadcast([byte])
        self.wait()

    def dispose(self) -> None:
        """Release the group. After the loss of a rank, gloo's destructor waits for unfinished work until the time-out,
        so a thread runs it."""
        held, idle = [self._works, self._group], all(work.is_completed() for work in self._works)
        if self._chain is not None:
            self._chain.close()
            held, idle = [*held, self._chain], False
            self._chain = None
        self._works, self._group = [], None
        if idle:
            held.clear()
        else:
            threading.Thread(target=held.clear, name="dispose-weight-group", daemon=True).start()

    def _own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """A stream for NCCL's waits, which would otherwise delay the learner's kernels."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()


def group_keys(token: str, epoch: int) -> str:
    """The prefix of the keys of a group's store: a stranger can connect to torch's store, but cannot guess it."""
    return f"{token}/epoch{epoch}"


LOOK_SECONDS = 0.005  # between two looks whether a group has formed


def formed(build: Callable[[], BroadcastGroup], look: Callable[[float], object], seconds: float) -> BroadcastGroup:
    """Build a group and rehearse it, in a thread: both wait for every rank, and gloo gives up late. Meanwhile
    ``look(LOOK_SECONDS)`` is called again and again; what it raises ends the wait. Raises RuntimeError if the group
    fails or does not form within ``seconds``. A group that forms after all is released."""
    deadline, made = time.monotonic() + seconds, Future[BroadcastGroup]()

    def run() -> None:
        group = None
        try:
            group = build()
            group.rehearse()
            made.set_result(group)
        except BaseException as error:
            if group is not None:
                group.dispose()
            made.set_exception(error)

    def release(late: Future[BroadcastGroup]) -> None:
        if late.exception() is None:
            late.result().dispose()

    threading.Thread(target=run, name="form-weight-group", daemon=True).start()
    try:
        while not made.done():
            look(LOOK_SECONDS)
            if time.monotonic() > deadline + LOOK_SECONDS:
                raise RuntimeError(f"it did not form within {seconds:g} s")
    except BaseException:
        made.add_done_callback(release)
        raise
    return made.result()
