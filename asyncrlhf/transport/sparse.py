"""Versions as what changed: the words of a bucket that differ from the version before, and their places.

At the learning rates of reinforcement learning an update changes few elements of weights in bfloat16: most steps are
below half of the last digit. A bucket is compared as words of the size of its smallest number, bit by bit, so that the
result is exact for every format. Peers send the same: verl 6974, slime 1806, NeMo RL 1935 (issues of their projects).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.types import TensorEntry

DENSE = 0.5  # share of a bucket's bytes from which on the bucket goes whole
MOST_LINKS = 8  # patches that a receiver may have to apply one after the other
BITMAP = 1  # the code in which each word of the bucket has a bit; the other codes are the bits of a gap
CODES = (8, 16, 32)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ALIGNED = 16  # bytes at which the second part of a payload begins


class Head(NamedTuple):
    """What a patch is, beside its payload. ``base``: the checksum of the bucket that it changes."""

    base: int
    word: int  # bytes of a word
    changed: int  # words
    code: int  # of their places
    nbytes: int  # of the payload


@dataclass(frozen=True)
class Patch:
    """``payload``: uint8 [head.nbytes], the new words and then their places; on the bucket's device."""

    head: Head
    payload: torch.Tensor


def word_size(entries: Sequence[TensorEntry]) -> int:
    """Bytes of the words in which a bucket with these tensors is compared: the size of its smallest number."""
    sizes = (getattr(torch, entry.dtype).itemsize for entry in entries)
    return min([size for size in sizes if size in WORDS], default=1)


def changed_words(old: torch.Tensor, new: torch.Tensor, word: int) -> torch.Tensor:
    """The places [K] int64, ascending, of the words that differ in two buckets, uint8 [bytes], of equal size."""
    kind = WORDS[word]
    if old.device.type != "cpu":
        return (old.view(kind) != new.view(kind)).nonzero().squeeze(-1)
    # NumPy compares several times as fast as torch here, and outside of Python's lock.
    return torch.from_numpy(np.flatnonzero(old.view(kind).numpy() != new.view(kind).numpy()))


def pack(places: torch.Tensor, new: torch.Tensor, word: int, base: int) -> Patch | None:
    """The patch that gives the words at ``places`` [K] of a bucket their values in ``new``; None if the whole bucket is
    hardly larger."""
    total, count = len(new) // word, len(places)
    if not count or count * word >= DENSE * len(new):
        return None
    gaps = places.diff(prepend=places.new_full((1,), -1)) - 1
    widest = int(gaps.max())
    sizes = {code: (count + _ends(gaps, code, widest)) * (code // 8) for code in CODES}
    sizes[BITMAP] = -(-total // 8)
    code = min(sizes, key=lambda code: sizes[code])
    marks = _bitmap(places, total) if code == BITMAP else _gaps(gaps, code, widest)
    values = new.view(WORDS[word])[places].view(torch.uint8)
    room = torch.zeros(-len(values) % ALIGNED, dtype=torch.uint8, device=new.device)
    payload = torch.cat((values, room, marks))
    return Patch(Head(base, word, count, code, len(payload)), payload) if len(payload) < DENSE * len(new) else None


def apply(head: Head, payload: torch.Tensor, bucket: torch.Tensor) -> None:
    """Write the patch into ``bucket``, uint8 [bytes] on the payload's device, in place.

    Raises WeightSyncError, and has written nothing, for a payload whose places do not fit the bucket. Wrong words and
    other places are found by the checksum of the result.
    """
    split = -(-head.changed * head.word // ALIGNED) * ALIGNED
    marks = payload[split:]
    total = len(bucket) // head.word
    places = _of_bitmap(marks) if head.code == BITMAP else _of_gaps(marks, head.code)
    if len(places) != head.changed or (head.changed and int(places[-1]) >= total):
        raise WeightSyncError(
            f"A patch tells {len(places)} places, the last one {int(places[-1]) if len(places) else -1}, for "
            f"{head.changed} changed words of a bucket of {total}: it is damaged."
        )
    kind = WORDS[head.word]
    bucket.view(kind).index_copy_(0, places, payload[: head.changed * head.word].view(kind))


def _most(code: int) -> int:
    """The number of a gap's code that stands for so many places without an end."""
    return (1 << code) - 1


def _ends(gaps: torch.Tensor, code: int, widest: int) -> int:
    """How many numbers more than gaps a code needs."""
    most = _most(code)
    return int((gaps[gaps >= most] // most).sum()) if widest >= most else 0


def _gaps(gaps: torch.Tensor, code: int, widest: int) -> torch.Tensor:
    """Each gap [K] as its multiples of ``_most`` and the rest, in ``code`` bits each: uint8 [bytes]."""
    most = _most(code)
    if widest >= most:
        wide = (gaps >= most).nonzero().squeeze(-1)
        more = torch.zeros_like(gaps)
        more[wide] = gaps[wide] // most
        ends = torch.arange(len(gaps), device=gaps.device) + more.cumsum(0)
        rest = gaps.clone()
        rest[wide] %= most
        gaps = torch.full((int(ends[-1]) + 1,), most, dtype=torch.int64, device=gaps.device)
        gaps[ends] = rest
    return gaps.to(WORDS[code // 8]).view(torch.uint8)


def _of_gaps(marks: torch.Tensor, code: int) -> torch.Tensor:
    most = _most(code)
    numbers = marks.view(WORDS[code // 8]).to(torch.int64) & most
    ends = numbers != most
    passed = numbers.cumsum(0)[ends]
    return passed + torch.arange(len(passed), device=marks.device)


def _bitmap(places: torch.Tensor, total: int) -> torch.Tensor:
    """A bit for each word, the lowest of a byte first: uint8 [bytes]."""
    bits = torch.zeros(-(-total // 8) * 8, dtype=torch.uint8, device=places.device)
    bits[places] = 1
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=places.device)).sum(-1, dtype=torch.uint8)


def _of_bitmap(marks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=marks.device)
    return (marks[:, None] >> shifts & 1).view(-1).nonzero().squeeze(-1)


class Link(NamedTuple):
    """One part of the way to a bucket's content, for receivers that fetch. ``where``: the transport's name of the
    bytes. ``patch``: None for the whole bucket; else its payload begins at byte ``start`` there."""

    end: int  # the checksum of the bucket after this part
    where: Any
    patch: Head | None = None
    start: int = 0


Chain = tuple[Link, ...]  # the first one is whole


def next_parts(
    chains: Sequence[Chain], checksums: Sequence[int], patches: Mapping[int, Patch], sizes: Sequence[int]
) -> dict[int, Patch | None]:
    """What to add to the ``chains`` of all buckets, so that each ends with its checksum: by bucket a patch, or None for
    the whole bucket, which is due where the patches become many or large. Empty ``chains``: all are whole."""
    found: dict[int, Patch | None] = {}
    for bucket, size in enumerate(sizes):
        chain = chains[bucket] if chains else ()
        if chain and checksums and chain[-1].end == checksums[bucket]:
            continue
        patch = patches.get(bucket)
        fits = patch is not None and chain and chain[-1].end == patch.head.base and len(chain) <= MOST_LINKS
        sent = sum(link.patch.nbytes for link in chain if link.patch is not None)
        found[bucket] = patch if patch is not None and fits and sent + patch.head.nbytes <= DENSE * size else None
    return found


def joined(parts: Mapping[int, Patch | None]) -> tuple[torch.Tensor, dict[int, int]]:
    """The payloads of all patches one after the other, uint8 on the host, and where each bucket's begins."""
    payloads, starts, size = [torch.zeros(0, dtype=torch.uint8)], {}, 0
    for bucket, patch in parts.items():
        if patch is not None:
            room = torch.zeros(-patch.head.nbytes % ALIGNED, dtype=torch.uint8)
            payloads += [patch.payload.cpu(), room]
            starts[bucket], size = size, size + patch.head.nbytes + len(room)
    return torch.cat(payloads), starts


def needed(chain: Chain, held: int | None) -> Chain:
    """The part of ``chain`` that a receiver needs whose bucket has the checksum ``held``; None: it has none."""
    for place in range(len(chain) - 1, 0, -1):
        head = chain[place].patch
        if head is not None and head.base == held:
            return chain[place:]
    return chain


def layer_of(name: str) -> str:
    """The part of a model that a tensor belongs to: its numbered layer, or its own name."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else name


def changes_by_layer(places: torch.Tensor, entries: Sequence[TensorEntry], word: int) -> dict[str, tuple[int, int]]:
    """How many words of each layer's tensors in a bucket are among the changed ones at ``places`` [K], and how many it
    has."""
    found: dict[str, tuple[int, int]] = {}
    starts = [entry.offset // word for entry in entries]
    bounds = torch.searchsorted(places, torch.tensor([*starts, 1 << 62], device=places.device)).tolist()
    for entry, first, last in zip(entries, bounds, bounds[1:], strict=False):
        kind: torch.dtype = getattr(torch, entry.dtype)
        changed, words = found.get(layer_of(entry.name), (0, 0))
        size = math.prod(entry.shape) * kind.itemsize // word
        found[layer_of(entry.name)] = (changed + last - first, words + size)
    return found


class Faster:
    """Chooses the way that took less time: each at first, then the best, and now and then another one again."""

    AGAIN = 25  # choices between two of another way
    RECENT = 3  # times that count

    def __init__(self, ways: Sequence[str]) -> None:
        self._seconds: dict[str, list[float]] = {way: [] for way in ways}
        self._present, self._choices = ways[0], 0

    def pick(self) -> str:
        self._choices += 1
        ways = sorted(self._seconds, key=lambda way: statistics.median(self._seconds[way] or [0.0]))
        self._present = ways[1 if len(ways) > 1 and self._choices % self.AGAIN == 0 else 0]
        return self._present

    def tell(self, seconds: float) -> None:
        """How long the way chosen last took."""
        self._seconds[self._present] = [*self._seconds[self._present], seconds][-self.RECENT :]
