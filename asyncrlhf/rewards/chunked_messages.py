"""What generators tell reward workers of sequences that are still being sampled: chunks, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrlhf.types import IntArray, Payload


@dataclass(frozen=True)
class Chunk:
    """The tokens from place ``start`` on of a sequence [P+L], the prompt's P tokens counted; the first has the prompt.

    A chunk is a hint: a score never depends on which of them came, how often, or in which order.
    """

    rollout_id: int
    start: int
    prompt_length: int
    token_ids: IntArray  # [n]


@dataclass(frozen=True)
class ChunkInfo:
    """What the controller knows of a chunk; its tokens stay behind ``payload``."""

    rollout_id: int
    start: int
    length: int
    payload: Payload


@dataclass(frozen=True)
class Prefilled:
    """What a reward worker did with chunks: ``taken`` is false where none of its models can use them; ``evicted`` are
    the rollouts whose cache gave way to others, which are prefilled anew at their end."""

    taken: bool
    evicted: list[int] = field(default_factory=list)


class ChunkBundle(Sequence[Chunk]):
    """Chunks that travel between processes as a few flat arrays."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = list(chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: Any) -> Any:
        return self._chunks[index]

    def __reduce__(self) -> tuple[Any, ...]:
        facts = np.array(
            [(c.rollout_id, c.start, c.prompt_length, len(c.token_ids)) for c in self._chunks], dtype=np.int64
        ).reshape(-1, 4)
        tokens = np.concatenate([c.token_ids for c in self._chunks]) if self._chunks else np.empty(0, np.int64)
        return _unpack, (facts, tokens)


def _unpack(facts: IntArray, tokens: IntArray) -> ChunkBundle:
    ends = np.cumsum(facts[:, 3])
    return ChunkBundle(
        Chunk(int(rollout_id), int(start), int(prompt_length), tokens[end - length : end])
        for (rollout_id, start, prompt_length, length), end in zip(facts.tolist(), ends.tolist(), strict=True)
    )


def describe_chunks(chunks: Sequence[Chunk]) -> list[ChunkInfo]:
    """The facts that the controller keeps; the caller sets the payload."""
    return [ChunkInfo(c.rollout_id, c.start, len(c.token_ids), Payload(None, i)) for i, c in enumerate(chunks)]
