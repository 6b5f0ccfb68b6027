"""What generators, controller and readers tell each other of sequences that are still being sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrlhf.types import IntArray, Payload


@dataclass(frozen=True)
class Chunk:
    """The tokens from place ``start`` on of a sequence [P+L], counted from the first of the prompt's P tokens; the
    sequence's first chunk holds the prompt.

    A chunk is a hint: a score never depends on which chunks came, how often, or in which order.
    """

    rollout_id: int
    start: int
    prompt_length: int
    token_ids: IntArray  # [n]

    def __reduce__(self) -> tuple[Any, ...]:
        """The tokens travel as plain bytes: many small arrays cost more to carry than they hold."""
        return _unpack, (self.rollout_id, self.start, self.prompt_length, self.token_ids.astype(np.int64).tobytes())


def _unpack(rollout_id: int, start: int, prompt_length: int, tokens: bytes) -> Chunk:
    return Chunk(rollout_id, start, prompt_length, np.frombuffer(tokens, np.int64))


@dataclass(frozen=True)
class ChunkInfo:
    """What the controller knows of a chunk; its tokens stay behind ``payload``."""

    rollout_id: int
    start: int
    length: int
    payload: Payload


@dataclass(frozen=True)
class Prefilled:
    """What a worker did with chunks. ``taken`` is False where none of its models can read ahead; ``evicted`` are the
    rollouts whose cache was freed to make room, which are read anew at their end."""

    taken: bool
    evicted: list[int] = field(default_factory=list)


def describe_chunks(chunks: Sequence[Chunk]) -> list[ChunkInfo]:
    """The facts that the controller keeps; the caller sets the payload."""
    return [ChunkInfo(c.rollout_id, c.start, len(c.token_ids), Payload(None, i)) for i, c in enumerate(chunks)]
