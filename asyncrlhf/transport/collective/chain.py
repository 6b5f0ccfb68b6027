"""A broadcast along a chain: each rank passes on what it gets, piece by piece, so that every link carries it once.

Gloo's own broadcast is a tree, whose root sends a whole copy to each of its log2(N) children over one link. Along a
chain N receivers take the time of one, and that of a piece for each further one. NCCL has such algorithms itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

PIECE_BYTES = 1 << 20


@dataclass(eq=False)
class ChainWork:
    """One tensor's way through this rank, with the interface of torch's works."""

    passed_on: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def is_completed(self) -> bool:
        """Whether the tensor is here and the next rank has it, too; also after an error. What waits must ask this: a
        next rank that left without its connection's end being noticed lets ``wait`` block until the time-out."""
        return self.passed_on.is_set()

    def wait(self) -> None:
        """Until the next rank has it, too. Raises RuntimeError if a neighbour is gone."""
        self.passed_on.wait()
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.passed_on.set()


class Chain:
    """The ends of one rank: it receives from ``rank`` - 1 and sends to ``rank`` + 1, in the order of the calls. After a
    neighbour's end every later call fails at once."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self._rank, self._last = group, rank, rank == size - 1
        self._incoming: queue.SimpleQueue[tuple[ChainWork, torch.Tensor] | None] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[tuple[Any, ChainWork | None, torch.Tensor]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._start("weights-from-before", self._pass)
        self._start("weights-to-next", self._settle)

    def begin(self, tensor: torch.Tensor) -> ChainWork:
        """Start one more tensor, uint8 [bytes]; returns at once."""
        work = ChainWork()
        self._incoming.put((work, tensor))
        return work

    def close(self) -> None:
        self._incoming.put(None)

    def _pass(self) -> None:
        """Receive piece after piece, the next one while this one is passed on."""
        while (given := self._incoming.get()) is not None:
            work, tensor = given
            try:
                if self._error is not None:
                    raise self._error
                pieces = tensor.split(PIECE_BYTES) if len(tensor) else ()
                coming: list[Any] = []
                for place, piece in enumerate(pieces):
                    if self._rank:
                        # Two at a time: the next one is on its way while this one is handed on.
                        for ahead in pieces[len(coming) : place + 2]:
                            coming.append(self._group.recv([ahead], self._rank - 1, 0))
                        coming[place].wait()
                    if not self._last:
                        self._outgoing.put((self._group.send([piece], self._rank + 1, 0), None, piece))
                self._outgoing.put((None, work, tensor))
            except BaseException as error:
                self._error = error
                work.fail(error)
        self._outgoing.put((None, None, torch.empty(0)))

    def _settle(self) -> None:
        """Wait for the sends in order; a tensor is passed on when its last piece is."""
        while True:
            sent, work, tensor = self._outgoing.get()
            if sent is None and work is None:
                return
            try:
                if sent is not None:
                    sent.wait()
                elif work is not None and self._error is None:
                    work.passed_on.set()
                elif work is not None and self._error is not None:
                    work.fail(self._error)
            except BaseException as error:
                self._error = self._error or error
            del sent, work, tensor

    @staticmethod
    def _start(name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()
