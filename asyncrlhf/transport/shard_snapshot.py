"""Publishes weights that no learner rank holds whole: each rank copies its own parts, and rank 0 fetches one bucket at
a time from these copies while the next steps run.

The copy is local: a step waits for the copy of 1/N of the weights, in the transfer's dtype, and for no other rank.
Parts go to rank 0 alone, over a process group of their own: they do not wait for the collectives of the steps. On each
rank one thread at a time uses this group, and it only has pairs of a send and a receive between rank 0 and another.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncrlhf.errors import LearnerLostError
from asyncrlhf.learner.ranks import Part, Shards, Spans, extent, overlaps
from asyncrlhf.transport.manifest import ALIGNMENT, ShardedParams, copy_tensors, entries_by_bucket, view_of
from asyncrlhf.types import TensorEntry, WeightManifest

IDLE = timedelta(days=365)  # a rank may wait that long for the next request
END = -1  # in place of a bucket: no more requests
NONE = 1 << 62  # in place of a number: there are no whole parts
ENDED = "died before it sent its part of the weights"
CLOSE_SECONDS = 5.0
POLL_SECONDS = 0.0005


@dataclass(frozen=True)
class _Piece:
    """A rank's part of one tensor. ``own``: its place among the rank's bytes of the bucket."""

    whole: TensorEntry
    shape: tuple[int, ...]  # of the whole tensor, as ``spans`` count in it
    spans: Spans
    own: TensorEntry


Places = Mapping[str, tuple[tuple[int, ...], Spans]]  # by tensor: what ``Part`` calls shape and spans


class _Pieces:
    """A rank's parts of all buckets, each bucket's in the manifest's order."""

    def __init__(self, places: Places, manifest: WeightManifest) -> None:
        self.buckets: list[list[_Piece]] = []
        self.sizes: list[int] = []
        for bucket, entries in enumerate(entries_by_bucket(manifest)):
            pieces, size = [], 0
            for entry in (entry for entry in entries if entry.name in places):
                shape, spans = places[entry.name]
                own = TensorEntry(entry.name, extent(spans), entry.dtype, bucket, size)
                pieces.append(_Piece(entry, shape, spans, own))
                dtype: torch.dtype = getattr(torch, own.dtype)
                size += -(-math.prod(own.shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            self.buckets.append(pieces)
            self.sizes.append(size)


def without_repeats(of_ranks: Sequence[Places]) -> list[Places]:
    """Each rank's places without those that an earlier rank also has."""
    seen: set[tuple[str, str]] = set()
    found: list[Places] = []
    for places in of_ranks:
        own = {name: place for name, place in places.items() if (name, str(place[1])) not in seen}
        seen.update((name, str(spans)) for name, (_, spans) in own.items())
        found.append(own)
    return found


class ShardSnapshot(ShardedParams):
    """This rank's parts of the weights as of the newest :meth:`take`, and on rank 0 the buckets of all ranks.

    All ranks build it together, and call :meth:`take` after the same steps. On the other ranks a thread answers rank 0,
    which may fetch a bucket at any time and more than once.
    """

    def __init__(
        self, shards: Shards, manifest: WeightManifest, device: torch.device | str = "cpu", *,
        rank: int = 0, ranks: int = 1, seconds: float, keeps: bool = False,
    ) -> None:  # fmt: skip
        """``device``: that of the parts' copies. ``seconds``: the time in which a rank must answer. ``keeps``: also the
        values of the take before, for comparison."""
        super().__init__(shards.layout(), device)
        self._rank, self._ranks, self._shards = rank, ranks, shards
        self._seconds = seconds
        places: list[Any] = [{name: (part.shape, part.spans) for name, part in shards.parts().items()}]
        self._group: dist.ProcessGroup | None = None
        if ranks > 1:
            mine, places = places[0], [None] * ranks
            dist.all_gather_object(places, mine)
            self._group = dist.new_group(timeout=IDLE)
        places = without_repeats(places)
        self._own = _Pieces(places[rank], manifest)
        self._of_ranks = [_Pieces(found, manifest) for found in places] if rank == 0 else []
        self.parts = [torch.zeros(size, dtype=torch.uint8, device=self.device) for size in self._own.sizes]
        # The parts of the take before, if they are kept.
        self._older = [torch.zeros_like(part) for part in self.parts] if keeps else None
        self._taken = 0
        self._held = threading.Condition()  # of the parts and their number, on rank 0 also of the group
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._answering: threading.Thread | None = None
        if rank > 0:
            self._answering = threading.Thread(target=self._answer, name="shards-to-rank-0", daemon=True)
            self._answering.start()

    def take(self) -> None:
        """Copy this rank's present parts; returns when the parameters may change again."""
        with self._held:
            number, self._taken = self._taken + 1, NONE
            if self._older is not None:
                self._older, self.parts = self.parts, self._older
            try:
                self._copy(self._shards.parts())
                self._taken = number
            finally:
                self._held.notify_all()

    def _copy(self, parts: Mapping[str, Part]) -> None:
        for memory, pieces in zip(self.parts, self._own.buckets, strict=True):
            copies = {piece.whole.name: view_of(piece.own, memory) for piece in pieces}
            copy_tensors(copies, {name: parts[name].values.reshape(copy.shape) for name, copy in copies.items()})

    def fetch(self, bucket: int, room: torch.Tensor, ago: int = 0) -> None:
        """On rank 0: write the bucket, as of the newest :meth:`take`, into ``room``, uint8 [bytes] on any device.
        ``ago`` 1: as of the take before.

        Raises LearnerLostError if a rank does not answer in time or holds other parts.
        """
        if self._stream is not None:  # the present stream may still zero the room, or use what was in its memory before
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._held, self._own_stream():
            if self._taken >= NONE:
                raise LearnerLostError("Learner rank 0 has no weights to send: its copy failed, or it is closing.")
            whole = room if room.device.type == self.device.type else torch.empty_like(room, device=self.device)
            for rank, pieces in enumerate(self._of_ranks):
                if pieces.sizes[bucket]:
                    _place(pieces.buckets[bucket], self._parts_of(rank, bucket, pieces.sizes[bucket], ago), whole)
            if whole is not room:
                room.copy_(whole)
            self._settle()

    def _part(self, bucket: int, ago: int) -> torch.Tensor:
        """This rank's bytes of a bucket."""
        assert not ago or self._older is not None, "this snapshot keeps no values of the take before"
        return self._older[bucket] if ago and self._older is not None else self.parts[bucket]

    def _parts_of(self, rank: int, bucket: int, size: int, ago: int) -> torch.Tensor:
        if rank == 0:
            return self._part(bucket, ago)
        held, room = torch.zeros(1, dtype=torch.int64), torch.empty(size, dtype=torch.uint8, device=self.device)
        started = time.monotonic()
        try:
            self._send(torch.tensor([self._taken, bucket, ago]), rank)
            self._receive(held, rank)
            if int(held) == self._taken:
                self._receive(room, rank)
        except RuntimeError as error:
            late = time.monotonic() - started >= self._seconds
            why = f"did not send its part of the weights within {self._seconds:g} s" if late else ENDED
            raise LearnerLostError(f"Learner rank {rank} {why}.") from error
        if int(held) != self._taken:
            why = "its copy failed" if int(held) >= NONE else f"it copied {int(held)} times, rank 0 {self._taken} times"
            raise LearnerLostError(f"Learner rank {rank} does not hold the weights that are being sent: {why}.")
        return room

    def _answer(self) -> None:
        """Send parts to rank 0 as it requests them, until it ends or dies."""
        asked = torch.zeros(3, dtype=torch.int64)
        with contextlib.suppress(RuntimeError), self._own_stream():
            while True:
                dist.recv(asked, group=self._group, group_src=0)
                number, bucket, ago = asked.tolist()
                if bucket == END:
                    return
                with self._held:
                    while self._taken < number:
                        self._held.wait()
                    self._send(torch.tensor([self._taken]), 0)
                    if self._taken == number:
                        self._send(self._part(bucket, ago), 0)
                        self._settle()

    def _send(self, tensor: torch.Tensor, rank: int) -> None:
        self._await(dist.isend(tensor, group=self._group, group_dst=rank), tensor)

    def _receive(self, room: torch.Tensor, rank: int) -> None:
        self._await(dist.irecv(room, group=self._group, group_src=rank), room)

    def _await(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        """Raises RuntimeError when the other rank ends or is late."""
        assert work is not None
        if tensor.device.type == "cpu":
            work.wait(timedelta(seconds=self._seconds))
            return
        deadline = time.monotonic() + self._seconds
        while not work.is_completed():  # NCCL's own wait does not return when a rank is gone
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer within {self._seconds:g} s")
            time.sleep(POLL_SECONDS)
        work.wait()

    def close(self) -> None:
        """End the other ranks' threads (rank 0), or wait a moment for this rank's to end."""
        self._seconds = min(self._seconds, CLOSE_SECONDS)
        if self._answering is not None:
            self._answering.join(timeout=CLOSE_SECONDS)
            return
        with self._held:
            self._taken = NONE
            for rank in range(1, self._ranks):
                with contextlib.suppress(RuntimeError):  # it died
                    self._send(torch.tensor([0, END, 0]), rank)

    def _own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """A stream for NCCL's waits, which would otherwise delay the learner's kernels."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def _settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _place(pieces: list[_Piece], part: torch.Tensor, bucket: torch.Tensor) -> None:
    """Write a rank's bytes of a bucket into it."""
    for piece in pieces:
        own, target = view_of(piece.own, part), view_of(piece.whole, bucket).view(piece.shape)
        for here, there in overlaps(piece.spans, [[[0, size]] for size in piece.shape]):
            target[there] = own[here]
