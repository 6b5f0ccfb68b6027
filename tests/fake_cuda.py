"""Streams of a CUDA device and NCCL, as far as the order of their work goes: which memory one stream may touch while
another still uses it.

A kernel or a broadcast is noted when it is called, with all that is certain to end before it begins: what its stream
had, what that stream was told to wait for, and what the host has seen the end of. Two uses of one memory, one of which
writes, without such an order are a race, whatever a fast device makes of it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncrlhf.transport import manifest, shard_snapshot
from asyncrlhf.transport.collective import group, receiver, sender


class Stream:
    """``ended``: what is certain to end before anything that is put on it from now on begins."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.ended = cuda, frozenset[int]()

    def wait_stream(self, other: Stream) -> None:
        self.ended |= other.ended

    def synchronize(self) -> None:
        self._cuda.host |= self.ended


class Work:
    """One rank's part of a broadcast; it ends when the host looks for the second time and the bytes are there."""

    def __init__(self, cuda: FakeCuda, call: frozenset[int], finish: Any) -> None:
        self._cuda, self._call, self._finish, self._looks = cuda, call, finish, 0

    def is_completed(self) -> bool:
        self._looks += 1
        if self._finish is not None and self._looks > 1 and self._finish():
            self._finish = None
        if self._finish is None:
            self._cuda.host |= self._call  # the host has seen it
        return self._finish is None

    def wait(self) -> None:
        """As NCCL's: the stream waits; the host does not. The bytes are here all the same, for the test's sake."""
        while self._finish is not None and not self._finish():
            threading.Event().wait(0.001)
        self._finish = None
        self._cuda.current().ended |= self._call


class FakeCuda:
    """Memory has a name: of what was allocated by ``empty``, the name of the freed memory that the allocator would give
    again, since the stream that asks for it is the one that it was freed on."""

    def __init__(self) -> None:
        self.host = frozenset[int]()
        self.uses: list[tuple[str, bool, int, frozenset[int], str]] = []
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._names: dict[int, str] = {}  # of live memory, by its address
        self._free: deque[str] = deque()
        self._boxes: dict[Any, dict[int, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))

    def current(self) -> Stream:
        if not hasattr(self._thread, "streams"):
            self._thread.streams = [Stream(self)]
        stream: Stream = self._thread.streams[-1]
        return stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current()
        self._thread.streams.append(stream)
        try:
            yield
        finally:
            self._thread.streams.pop()

    def use(self, memory: torch.Tensor | str, writes: bool, what: str, stream: Stream | None = None) -> frozenset[int]:
        """Put work on a stream (default: the present one); returns it with all that ends before it does."""
        with self._lock:
            stream, name = stream or self.current(), memory if isinstance(memory, str) else self.name(memory)
            before, number = stream.ended | self.host, len(self.uses)
            self.uses.append((name, writes, number, before, what))
            stream.ended = before | {number}
            return stream.ended

    def name(self, tensor: torch.Tensor) -> str:
        address = tensor.untyped_storage().data_ptr()
        return self._names.get(address, f"at {address}")

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        """As ``torch.empty``, from the allocator."""
        made = torch.empty(*size, **{**options, "device": "cpu"})
        storage = made.untyped_storage()
        address = storage.data_ptr()
        with self._lock:
            self._names[address] = self._free.popleft() if self._free else f"block {len(self._names)}"
        weakref.finalize(storage, self._release, address)
        return made

    def _release(self, address: int) -> None:
        self._free.append(self._names.pop(address))

    def zeros(self, *size: Any, **options: Any) -> torch.Tensor:
        made = torch.zeros(*size, **{**options, "device": "cpu"})
        self.use(made, True, "zeros")
        return made

    def races(self) -> list[str]:
        found, by_memory = [], defaultdict(list)
        for use in self.uses:
            by_memory[use[0]].append(use)
        for name, uses in by_memory.items():
            for at, (_, writes, number, before, what) in enumerate(uses):
                for _, also, later, known, then in uses[at + 1 :]:
                    if (writes or also) and number not in known and later not in before:
                        found.append(f"{name}: {what} and {then} have no order.")
        return found

    def nccl(self) -> Any:
        """The class in the place of ``torch.distributed.ProcessGroupNCCL``."""
        cuda = self

        class Group:
            Options = SimpleNamespace

            def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
                if rank == 0:
                    store.set("group", str(id(self)))
                self._rank, self._calls, self._stream = rank, 0, Stream(cuda)
                self._box = cuda._boxes[store.get("group")]

            def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
                (tensor,), place = tensors, self._calls
                self._calls += 1
                self._stream.wait_stream(cuda.current())  # what NCCL's own stream does at each call
                call = cuda.use(tensor, self._rank > 0, f"broadcast {place} of rank {self._rank}", self._stream)
                if self._rank == 0:
                    self._box[place].append(tensor.clone())
                    return Work(cuda, call, lambda: True)

                def arrive() -> bool:
                    if self._box[place]:
                        tensor.copy_(self._box[place][0])
                    return bool(self._box[place])

                return Work(cuda, call, arrive)

        return Group

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the transport's code take this device for one of its own; all its tensors stay on the CPU."""
        monkeypatch.setattr(dist, "ProcessGroupNCCL", self.nccl(), raising=False)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream(self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current())
        monkeypatch.setattr(sender, "choose_backend", lambda identities: "nccl")
        for module in (group, receiver, manifest, shard_snapshot):
            monkeypatch.setattr(module, "torch", _Torch(self))


class _Torch:
    """torch with this device's memory."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.empty, self.zeros = cuda.empty, cuda.zeros

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
