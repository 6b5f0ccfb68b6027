"""Sequences that a model reads while they are still being sampled: what is known, cached and made of each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from transformers import DynamicCache

from asyncrlhf.readahead.messages import Chunk, Prefilled
from asyncrlhf.readahead.passes import Passes, RefusedError
from asyncrlhf.rewards.model_loading import policy_ids
from asyncrlhf.rewards.reward import StuckError
from asyncrlhf.types import FloatArray, IntArray, Prompt, Rollout

BLOCK = 64  # tokens: a sequence's cache counts as a multiple of it, which leaves room for the copy by which it grows


@dataclass(eq=False)
class Reading:
    """What is known of one sequence, and what was made of the tokens that were read."""

    prompt_length: int
    tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # [n] from the prompt on
    cache: DynamicCache | None = None
    last: torch.Tensor | None = None  # [H] hidden state of the last token that was read
    logprobs: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))  # of the response tokens read

    @property
    def cached(self) -> int:
        return int(self.cache.get_seq_length()) if self.cache is not None else 0

    @property
    def size(self) -> int:
        """Tokens that count against the limit, once all are read."""
        return -(-len(self.tokens) // BLOCK) * BLOCK

    @property
    def prompt(self) -> bytes | None:
        """What siblings have in common, once it is known."""
        return self.tokens[: self.prompt_length].tobytes() if len(self.tokens) >= self.prompt_length > 1 else None

    def take(self, start: int, ids: IntArray) -> None:
        """Note tokens that stand from ``start`` on. Those behind a gap are passed over; those that contradict what is
        known belong to a sequence that was sampled anew, and what was made of the old one goes."""
        if start > len(self.tokens):
            return
        known = self.tokens[start : start + len(ids)]
        if not np.array_equal(known, ids[: len(known)]):
            self.tokens, self.logprobs, self.cache, self.last = self.tokens[:start], self.logprobs[:0], None, None
        self.tokens = np.concatenate([self.tokens, ids[len(self.tokens) - start :]])


class Readings:
    """Takes chunks, reads them ahead, and holds caches of up to ``cache_tokens`` tokens.

    An answer is made of the rollout's own tokens: as far as those were cached, the cache is taken, and the rest is
    computed. Siblings share the prompt's keys and values. What was touched least recently is evicted first and not
    cached again, so that sequences do not evict each other in turn.
    """

    # 1 where hidden states predict the next token: each sequence then computes the last token of its prompt itself,
    # and need not read its own last token.
    predicts = 0

    def __init__(
        self,
        passes: Passes,
        whole: Callable[[Sequence[Rollout]], list[Any]],
        cache_tokens: int,
        budget: int,
        max_length: int,
    ) -> None:
        """``whole`` answers rollouts of which nothing was read ahead. ``budget``: new tokens of one pass. Sequences of
        more than ``max_length`` tokens are not read ahead."""
        self._passes = passes
        self._whole = whole
        self._cache_tokens = cache_tokens
        self._budget = budget
        self._max_length = max_length
        embeddings: Any = passes.model.get_input_embeddings()
        self._vocabulary = int(embeddings.num_embeddings)
        # By rollout id, least recently touched first. None: evicted, or not to be read ahead.
        self._readings: OrderedDict[int, Reading | None] = OrderedDict()
        self._donors: WeakValueDictionary[Any, Reading] = WeakValueDictionary()  # prompt -> whose cache begins with it
        self._evicted: set[int] = set()  # since the last answer to chunks

    def _answers(self, rollouts: Sequence[Rollout], readings: Sequence[Reading]) -> list[Any]:
        """What ``whole`` would answer, made of readings that have come to their end."""
        raise NotImplementedError

    def _keep(self, batch: Sequence[Reading], hidden: Sequence[torch.Tensor]) -> None:
        """Note what answers take of the hidden states [n, H] of each one's last n tokens, beside the last."""

    @torch.inference_mode()
    def _pass(self, batch: Sequence[Reading]) -> None:
        """Read each to the end of its tokens, in one pass."""
        hidden = self._passes.extend([(r.cache, r.tokens[r.cached :]) for r in batch if r.cache is not None])
        self._keep(batch, hidden)
        # Copies: a view would keep the hidden states of the whole pass.
        for reading, last in zip(batch, torch.stack([states[-1] for states in hidden]), strict=True):
            reading.last = last

    def _read(self, readings: Sequence[Reading]) -> None:
        for batch in token_batches(readings, self._budget):
            self._pass(batch)

    @property
    def held(self) -> int:
        """Tokens that count against ``cache_tokens``."""
        return sum(reading.size for reading in self._readings.values() if reading is not None)

    def prefill(self, released: Iterable[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released``, then read on where something new came."""
        self.release(released)
        for chunk in chunks:
            self._note(chunk)
        excess = self.held - self._cache_tokens
        for rollout_id, reading in self._readings.items():
            if excess > 0 and reading is not None:
                excess -= reading.size
                self._give_up(rollout_id, reading)
        touched = [reading for i in dict.fromkeys(c.rollout_id for c in chunks) if (reading := self._readings.get(i))]
        behind = [reading for reading in touched if len(reading.tokens) > reading.cached]
        with self._caches_at_risk():
            while behind:
                now = self._ready(behind)
                self._read(now)
                behind = [reading for reading in behind if reading not in now]
        evicted, self._evicted = self._evicted, set()
        return Prefilled(True, sorted(evicted))

    def _note(self, chunk: Chunk) -> None:
        """A sequence that is too long for the cache, or that the model cannot read, is given up."""
        reading = self._readings.setdefault(chunk.rollout_id, Reading(chunk.prompt_length))
        self._readings.move_to_end(chunk.rollout_id)
        while len(self._readings) > self._cache_tokens:  # more than can hold a token: given up, and never released
            self._readings.popitem(last=False)
        if reading is not None:
            reading.take(chunk.start, np.asarray(chunk.token_ids, np.int64))
            if not chunk.prompt_length or reading.size > self._cache_tokens or not self._readable(reading.tokens):
                self._give_up(chunk.rollout_id, reading)

    def _readable(self, ids: IntArray) -> bool:
        known = int(ids.min(initial=0)) >= 0 and int(ids.max(initial=0)) < self._vocabulary
        return known and len(ids) <= self._max_length

    def _give_up(self, rollout_id: int, reading: Reading) -> None:
        reading.cache = None  # a caller may hold the reading for longer
        self._readings[rollout_id] = None
        self._evicted.add(rollout_id)

    def give_all_up(self) -> bool:
        """Free all caches; False where there were none."""
        kept = [(rollout_id, reading) for rollout_id, reading in self._readings.items() if reading is not None]
        for rollout_id, reading in kept:
            self._give_up(rollout_id, reading)
        return bool(kept)

    @contextmanager
    def _caches_at_risk(self) -> Iterator[None]:
        """Frees all caches where memory runs out, so that what they were for is computed at its end, and where a pass
        hangs, which may still write to them: that is raised."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.give_all_up()
        except StuckError:
            self.give_all_up()
            raise

    def _ready(self, behind: Sequence[Reading]) -> list[Reading]:
        """Those that can be read now, each with a cache, which begins with a sibling's prompt where one was read.
        Siblings wait until the first has read it."""
        now: list[Reading] = []
        for reading in behind:
            if reading.cache is None:
                prompt, donor = reading.prompt, self._donors.get(reading.prompt)
                length = min(reading.prompt_length - self.predicts, len(reading.tokens) - 1)  # one token is computed
                if donor is not None and donor.cache is not None and donor.prompt == prompt and donor.cached >= length:
                    reading.cache = self._passes.fork(donor.cache, length)
                elif donor in now:
                    continue
                else:
                    reading.cache = self._passes.begin()
                if prompt is not None:
                    self._donors[prompt] = reading
            now.append(reading)
        return now

    def answers(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """What the model gives each rollout: read on where its beginning is cached, else computed as a whole."""
        begun = {i: r for i, rollout in enumerate(rollouts) if (r := self._begun(rollout)) is not None}
        found: dict[int, Any] = {}
        with self._caches_at_risk():
            self._read([reading for reading in begun.values() if len(reading.tokens) > reading.cached])
            if begun:
                found = dict(zip(begun, self._answers([rollouts[i] for i in begun], [*begun.values()]), strict=True))
        left = [i for i in range(len(rollouts)) if i not in found]
        found.update(zip(left, self._whole([rollouts[i] for i in left]), strict=True))
        return [found[i] for i in range(len(rollouts))]

    def _begun(self, rollout: Rollout) -> Reading | None:
        """Its reading, with all tokens that are to be read, if it was begun with the rollout's own tokens."""
        ids, reading = policy_ids(rollout), self._readings.get(rollout.rollout_id)
        if reading is None or not len(rollout.prompt.token_ids) == reading.prompt_length < len(ids):
            return None
        cached = reading.cached
        if not cached or not np.array_equal(ids[:cached], reading.tokens[:cached]) or not self._readable(ids):
            return None
        reading.tokens = ids[: max(cached, len(ids) - self.predicts)]
        return reading

    def release(self, rollout_ids: Iterable[int]) -> None:
        """Forget rollouts that are done, cancelled, failed or dropped."""
        for rollout_id in rollout_ids:
            self._readings.pop(rollout_id, None)

    def try_out(self, number: Callable[[Any], Any], exact: bool) -> None:
        """Raises RefusedError unless two short texts, read in pieces, get what they get as a whole.

        ``number`` is what is compared of an answer, NaN of a failure; ``exact`` where it is computed in float32.
        """
        room, self._cache_tokens = self._cache_tokens, 2 * BLOCK
        texts = [_made_up(-1 - i, np.arange(n, dtype=np.int64) * 7 % self._vocabulary) for i, n in enumerate((7, 5))]
        for start, stop in ((0, 2), (2, 3), (3, 4)):
            self.prefill([], [Chunk(t.rollout_id, start, 2, policy_ids(t)[start:stop]) for t in texts])
        if any(reading is None or reading.cached != 4 for reading in self._readings.values()):
            raise RefusedError("keeps no keys and values")
        one, other = (np.hstack([number(answer) for answer in way(texts)]) for way in (self._whole, self.answers))
        # Written so that a result that is no number is refused too.
        if not (np.abs(one - other) <= (1e-4 if exact else 0.1) * np.abs(one).clip(min=1.0)).all():
            raise RefusedError("reads a text in pieces otherwise than as a whole")
        self.release(text.rollout_id for text in texts)
        self._cache_tokens = room


def _made_up(rollout_id: int, ids: IntArray) -> Rollout:
    """A rollout of ``ids`` [n], the first two of which are the prompt."""
    zeros = np.zeros(len(ids) - 2, np.int64)
    return Rollout(rollout_id, 0, Prompt("", "", ids[:2]), ids[2:], zeros.astype(np.float32), zeros, "length", "", "")


def token_batches(readings: Sequence[Reading], budget: int) -> list[list[Reading]]:
    """In order, in batches of at most ``budget`` new tokens; a longer stretch is a batch of its own."""
    batches: list[list[Reading]] = []
    tokens = 0
    for reading in readings:
        size = len(reading.tokens) - reading.cached
        if not batches or tokens + size > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(reading)
        tokens += size
    return batches
