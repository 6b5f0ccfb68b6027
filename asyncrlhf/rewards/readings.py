"""Sequences that a model reads while they are still being sampled: what is known, cached and made of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from asyncrlhf.rewards.chunked_messages import Chunk
from asyncrlhf.rewards.chunked_passes import CAPACITY_MULTIPLE, Extension, Passes
from asyncrlhf.rewards.reward import StuckError
from asyncrlhf.types import IntArray

Made = TypeVar("Made")


@dataclass
class Reading(Generic[Made]):
    """What is known and what is cached of one sequence."""

    prompt_length: int
    tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # [n] without a gap, from the prompt on
    later: dict[int, IntArray] = field(default_factory=dict)  # pieces behind a gap, by where they start
    cache: Any = None
    made: Made | None = None  # of the cached tokens
    given_up: bool = False  # evicted, or not to be read anyway: computed at its end as if nothing had come

    @property
    def cached(self) -> int:
        return int(self.cache.length) if self.cache is not None else 0

    @property
    def size(self) -> int:
        """Tokens that it counts for: its cache once it has caught up, and the pieces that wait."""
        whole = -(-len(self.tokens) // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        return whole + sum(map(len, self.later.values()))

    @property
    def prompt(self) -> bytes | None:
        """What siblings have in common, once it is known."""
        return self.tokens[: self.prompt_length].tobytes() if len(self.tokens) >= self.prompt_length > 1 else None

    def take(self, start: int, ids: IntArray) -> None:
        """Note tokens that stand from ``start`` on. Those that contradict what is known belong to a sequence that was
        sampled anew, and what is known goes."""
        if len(ids) > len(self.later.get(start, ())):
            self.later[start] = ids
        while (place := next((s for s in self.later if s <= len(self.tokens)), None)) is not None:
            piece = self.later.pop(place)
            overlap = min(len(self.tokens) - place, len(piece))
            if np.array_equal(self.tokens[place : place + overlap], piece[:overlap]):
                self.tokens = np.concatenate([self.tokens, piece[overlap:]])
            else:
                self.tokens = np.concatenate([self.tokens[:place], piece])
                self.forget()

    def begins(self, prompt_length: int, ids: IntArray) -> bool:
        """Whether there are cached tokens, and they are the first of ``ids`` [n]."""
        cached = self.cached
        fits = self.made is not None and self.prompt_length == prompt_length and 0 < cached <= len(ids)
        return fits and np.array_equal(ids[:cached], self.tokens[:cached])

    def forget(self) -> None:
        self.cache = self.made = None

    def give_up(self) -> None:
        self.forget()
        self.tokens = self.tokens[:0]
        self.later.clear()
        self.given_up = True


@dataclass(frozen=True)
class Stretch(Generic[Made]):
    """A sequence's tokens [n] as far as they are known. The first ``start`` were read before: ``cache`` holds their
    keys and values, ``made`` is what was made of them. Without a cache nothing is kept."""

    token_ids: IntArray
    prompt_length: int
    start: int = 0
    cache: Any = None
    made: Made | None = None

    @property
    def extension(self) -> Extension:
        return Extension(self.cache, self.token_ids[self.start :])


class Readings(ABC, Generic[Made]):
    """Takes chunks, reads them ahead, and holds a KV cache of up to ``cache_tokens``.

    Chunks are hints. What is made of a rollout is made of its own tokens: as far as they are those that were cached,
    the cache is taken, and the rest is computed. Siblings share the prompt's keys and values. What was touched least
    recently is evicted first and not cached again, so that a crowd does not push itself out in turn.
    """

    # The last tokens of a sibling's prompt that a sequence computes anew: those whose hidden states it needs itself.
    own_prompt_tokens = 0

    def __init__(
        self, passes: Passes, *, cache_tokens: int, max_batch_tokens: int, vocabulary: int, max_length: int
    ) -> None:
        """``max_batch_tokens``: new tokens of one pass. Sequences with a token beyond ``vocabulary`` or of more than
        ``max_length`` tokens are not read ahead."""
        self._passes = passes
        self._cache_tokens = cache_tokens
        self._max_batch_tokens = max_batch_tokens
        self._vocabulary = vocabulary
        self._max_length = max_length
        self._readings: OrderedDict[int, Reading[Made]] = OrderedDict()  # by rollout id, least recently touched first
        self._donors: dict[bytes, int] = {}  # prompt -> the rollout whose cache begins with it

    @abstractmethod
    def _pass(self, batch: Sequence[Stretch[Made]]) -> list[Made]:
        """Read the new tokens of each in one pass: what is made of all of its tokens then."""

    @property
    def held(self) -> int:
        """Tokens that count against ``cache_tokens``."""
        return sum(reading.size for reading in self._readings.values())

    def prefill(self, chunks: Sequence[Chunk]) -> list[int]:
        """Read on where something new came; returns the rollouts that were evicted for it."""
        evicted = [chunk.rollout_id for chunk in chunks if not self._note(chunk)]
        evicted += self._make_room()
        touched = dict.fromkeys(chunk.rollout_id for chunk in chunks)
        behind = [r for r in (self._readings[i] for i in touched) if len(r.tokens) > r.cached]
        try:
            while behind:
                behind = self._read(behind)
        except torch.OutOfMemoryError:
            evicted += self.give_all_up()
        except StuckError:
            self.give_all_up()  # the pass may still write to its caches
            raise
        return evicted

    def _note(self, chunk: Chunk) -> bool:
        """False when the sequence is given up for it: it is too long for the cache, or will be refused at its end."""
        reading = self._readings.setdefault(chunk.rollout_id, Reading(chunk.prompt_length))
        self._readings.move_to_end(chunk.rollout_id)
        while len(self._readings) > self._cache_tokens:  # more than can hold a token: given up, and never released
            self._readings.popitem(last=False)
        ids = np.asarray(chunk.token_ids, np.int64)
        if reading.given_up or not len(ids):
            return True
        known = int(ids.min()) >= 0 and int(ids.max()) < self._vocabulary
        if known and chunk.prompt_length >= self.own_prompt_tokens:
            reading.take(chunk.start, ids)
            if reading.size <= self._cache_tokens and len(reading.tokens) <= self._max_length:
                return True
        reading.give_up()
        return False

    def _make_room(self) -> list[int]:
        evicted = []
        excess = self.held - self._cache_tokens
        for rollout_id, reading in self._readings.items():
            if excess <= 0:
                break
            if reading.size:
                excess -= reading.size
                reading.give_up()
                evicted.append(rollout_id)
        return evicted

    def give_all_up(self) -> list[int]:
        """Free all caches; returns the rollouts that had not been given up before."""
        gone = [rollout_id for rollout_id, reading in self._readings.items() if not reading.given_up]
        for rollout_id in gone:
            self._readings[rollout_id].give_up()
        return gone

    def _read(self, behind: list[Reading[Made]]) -> list[Reading[Made]]:
        """One round; returns those that wait for a sibling's prompt, which is computed in it."""
        now: list[Reading[Made]] = []
        waiting: list[Reading[Made]] = []
        begun: set[bytes] = set()
        for reading in behind:
            if reading.cache is None and not self._share(reading):
                prompt = reading.prompt
                if prompt is not None and prompt in begun:
                    waiting.append(reading)
                    continue
                if prompt is not None:
                    begun.add(prompt)
                reading.cache = self._passes.begin()
            now.append(reading)
        stretches = [Stretch(r.tokens, r.prompt_length, r.cached, r.cache, r.made) for r in now]
        for reading, made in zip(now, self._extend(stretches), strict=True):
            reading.made = made
        ids = {id(reading): rollout_id for rollout_id, reading in self._readings.items()}
        self._donors.update({prompt: ids[id(r)] for r in now if (prompt := r.prompt) is not None})
        return waiting

    def _share(self, reading: Reading[Made]) -> bool:
        """Begin with a sibling's prompt; its last token is computed anew where nothing else is."""
        prompt = reading.prompt
        donor = self._readings.get(self._donors.get(prompt, -1)) if prompt is not None else None
        length = min(reading.prompt_length - self.own_prompt_tokens, len(reading.tokens) - 1)
        if donor is None or donor.prompt != prompt or donor.cached < length:
            return False
        reading.cache = self._passes.fork(donor.cache, length)
        return True

    def _extend(self, stretches: Sequence[Stretch[Made]]) -> list[Made]:
        return [made for batch in token_batches(stretches, self._max_batch_tokens) for made in self._pass(batch)]

    def _finished(self, sequences: Sequence[tuple[int, int, IntArray]]) -> list[Made]:
        """What is made of each sequence's tokens: (rollout id, prompt length, tokens [n]), with or without chunks.

        Raises torch.OutOfMemoryError and StuckError; the caches are worth nothing then.
        """
        found: dict[int, Made] = {}
        stretches: dict[int, Stretch[Made]] = {}
        read_on: dict[int, Reading[Made]] = {}
        for place, (rollout_id, prompt_length, ids) in enumerate(sequences):
            reading = self._readings.get(rollout_id)
            if reading is None or not reading.begins(prompt_length, ids):
                stretches[place] = Stretch(ids, prompt_length)
            elif reading.made is not None and reading.cached == len(ids):
                found[place] = reading.made
            else:
                stretches[place] = Stretch(ids, prompt_length, reading.cached, reading.cache, reading.made)
                read_on[place] = reading
        found.update(zip(stretches, self._extend(list(stretches.values())), strict=True))
        for place, reading in read_on.items():
            reading.tokens, reading.made = sequences[place][2], found[place]
        return [found[place] for place in range(len(sequences))]

    def release(self, rollout_ids: Iterable[int]) -> None:
        """Forget rollouts that are done, cancelled, failed or dropped."""
        for rollout_id in rollout_ids:
            self._readings.pop(rollout_id, None)
        if len(self._donors) > len(self._readings):
            self._donors = {prompt: giver for prompt, giver in self._donors.items() if giver in self._readings}

    def clear(self) -> None:
        self._readings.clear()
        self._donors.clear()


def token_batches(stretches: Sequence[Stretch[Made]], budget: int) -> list[list[Stretch[Made]]]:
    """In order, in batches of at most ``budget`` new tokens; a longer stretch is a batch of its own."""
    batches: list[list[Stretch[Made]]] = []
    tokens = 0
    for stretch in stretches:
        size = len(stretch.token_ids) - stretch.start
        if not batches or tokens + size > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(stretch)
        tokens += size
    return batches
