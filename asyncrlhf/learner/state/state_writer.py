"""Writes a rank's part of a checkpoint during its next steps: from a copy, in a separate thread."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncrlhf.data.checkpoint_manifest import Seals
from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.state.state_file import STATE, split, write_file

NICENESS = 10  # of the thread: concurrent steps have priority
GATHERED = 2  # files of gathered tensors that may wait in host memory for the disk
ALIGNMENT = 64


class StateWriter:
    """``begin``, then any number of ``write_*`` and ``submit``, then ``end``, which may be called in another thread.

    ``write_state`` and ``write_tensors`` copy the tensors before they return: into buffers in host memory that are kept
    for the next checkpoint, so that the caller waits only for the copy. The buffers take as much memory as the saved
    state, from the first checkpoint on.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers: dict[str, torch.Tensor] = {}  # bytes, by the file that they are for
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_give_way)
        self.rehearsing = False
        self._room = threading.BoundedSemaphore(GATHERED)
        self._pending: list[Future[None]] = []
        self._folder, self._seals = Path(), Seals()

    def begin(self, folder: Path) -> None:
        """Set the folder of the files that follow. Waits until those of the previous checkpoint are written."""
        wait(self._pending)
        self._pending, self._folder, self._seals = [], folder, Seals()
        if not self.rehearsing:
            folder.mkdir(parents=True, exist_ok=True)

    def rehearse(self, save: Callable[[Path], object]) -> None:
        """Allocate memory, during further steps, for the files that ``save`` will write: the first copy into new memory
        takes several times as long. ``save`` is called with a folder to which nothing is written."""
        self.rehearsing = True
        try:
            save(Path())
        finally:
            self.rehearsing = False

    def write_state(
        self, path: Path, state: Any, whole: bool = True, ours: Callable[[DTensor], bool] = lambda tensor: True
    ) -> None:
        """``state``, ``whole``, ``ours``: as :func:`~asyncrlhf.learner.state.state_file.split` takes them."""
        plain, tensors = split(state, whole, ours)
        self.write_tensors(path, tensors, {STATE: json.dumps(plain)})

    def write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        name = str(path.relative_to(self._folder))
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
        if self.rehearsing:
            touch = partial(self._touch, name, sum(sizes))
            self._pending.append(self._pool.submit(touch))
            return
        copies = self._copied(self._buffer(name, sum(sizes)), tensors, sizes)
        self.submit(lambda: self._write(path, copies, metadata))

    def write_gathered(
        self, path: Path, gather: Callable[[], Mapping[str, torch.Tensor]], metadata: Mapping[str, str]
    ) -> None:
        """As ``write_tensors``, for tensors that ``gather`` returns in new host memory; first waits while ``GATHERED``
        such files are being written."""
        self._room.acquire()
        tensors = gather()

        def write() -> None:
            try:
                self._write(path, tensors, metadata)
            finally:
                self._room.release()

        self.submit(write)

    def submit(self, action: Callable[[], object]) -> None:
        """Run ``action`` in the writer's thread, after everything submitted before."""
        if not self.rehearsing:
            self._pending.append(self._pool.submit(action))  # type: ignore[arg-type]

    @property
    def idle(self) -> bool:
        """Whether all writes have ended, on disk or with an error."""
        return all(future.done() for future in self._pending)

    def end(self) -> Seals:
        """Wait for the disk; returns the seals of the files, by their paths within the folder. Raises CheckpointError
        if one could not be written."""
        for future in self._pending:
            try:
                future.result()
            except OSError as error:
                raise CheckpointError(f"the checkpoint {self._folder} could not be written: {error}.") from error
        return self._seals

    def _write(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self._seals[path.relative_to(self._folder).as_posix()] = write_file(path, tensors, metadata)

    def _touch(self, name: str, size: int) -> None:
        self._buffer(name, size).numpy().fill(0)  # in this thread alone, where torch would take the learner's

    def _buffer(self, name: str, size: int) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return buffer

    def _copied(
        self, buffer: torch.Tensor, tensors: Mapping[str, torch.Tensor], sizes: list[int]
    ) -> dict[str, torch.Tensor]:
        starts = [0, *itertools.accumulate(sizes)][:-1]
        copies = {
            key: buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (key, tensor), start in zip(tensors.items(), starts, strict=True)
        }
        if copies:
            torch._foreach_copy_(list(copies.values()), list(tensors.values()), non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize()
        return copies


def _give_way() -> None:
    """On Linux each thread has its own niceness; elsewhere the thread keeps that of its process."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
