"""A causal reward model that reads sequences while they are still being sampled, and has little left at their end."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrlhf.errors import RewardError
from asyncrlhf.rewards.base import RewardSource, Score, StuckError
from asyncrlhf.rewards.chunked_messages import Chunk
from asyncrlhf.rewards.chunked_passes import (
    CAPACITY_MULTIPLE,
    ChunkingRefusedError,
    Extension,
    Passes,
    build_passes,
)
from asyncrlhf.rewards.model import SLOW_PASS, ModelSource, head_of
from asyncrlhf.rewards.model_inputs import policy_ids
from asyncrlhf.types import IntArray, Rollout


@dataclass
class _Reading:
    """What is known and what is cached of one sequence."""

    prompt_length: int
    tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # [n] without a gap, from the prompt on
    later: dict[int, IntArray] = field(default_factory=dict)  # pieces behind a gap, by where they start
    cache: Any = None
    last: torch.Tensor | None = None  # [H] hidden state of the last cached token
    given_up: bool = False  # evicted, or not to be scored anyway: scored at its end as if nothing had come

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

    def forget(self) -> None:
        self.cache = self.last = None

    def give_up(self) -> None:
        self.forget()
        self.tokens = self.tokens[:0]
        self.later.clear()
        self.given_up = True


class ChunkedSource:
    """A :class:`ModelSource` with a KV cache of up to ``cache_tokens`` for sequences under way.

    Chunks are hints. A score is made of the rollout's own tokens: as far as they are those that were cached, the cache
    is taken, and the rest is computed. Siblings share the prompt's keys and values. What was touched least recently is
    evicted first and not cached again, so that a crowd does not push itself out in turn.
    """

    def __init__(self, source: ModelSource, passes: Passes, cache_tokens: int, max_batch_tokens: int) -> None:
        self.source = source
        self._vocabulary = source.vocabulary
        self._passes = passes
        self._cache_tokens = cache_tokens
        self._max_batch_tokens = max_batch_tokens
        self._readings: OrderedDict[int, _Reading] = OrderedDict()  # by rollout id, least recently touched first
        self._donors: dict[bytes, int] = {}  # prompt -> the rollout whose cache begins with it

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
            evicted += self._give_all_up()
        except StuckError:
            self._give_all_up()  # the pass may still write to its caches
            raise
        return evicted

    def _note(self, chunk: Chunk) -> bool:
        """False when the sequence is given up for it: it is too long for the cache, or will be refused at its end."""
        reading = self._readings.setdefault(chunk.rollout_id, _Reading(chunk.prompt_length))
        self._readings.move_to_end(chunk.rollout_id)
        while len(self._readings) > self._cache_tokens:  # more than can hold a token: given up, and never released
            self._readings.popitem(last=False)
        ids = np.asarray(chunk.token_ids, np.int64)
        if reading.given_up or not len(ids):
            return True
        if int(ids.min()) >= 0 and int(ids.max()) < self._vocabulary:
            reading.take(chunk.start, ids)
            if reading.size <= self._cache_tokens and len(reading.tokens) <= self.source.max_length:
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

    def _give_all_up(self) -> list[int]:
        gone = [rollout_id for rollout_id, reading in self._readings.items() if not reading.given_up]
        for rollout_id in gone:
            self._readings[rollout_id].give_up()
        return gone

    def _read(self, behind: list[_Reading]) -> list[_Reading]:
        """One round; returns those that wait for a sibling's prompt, which is computed in it."""
        now: list[_Reading] = []
        waiting: list[_Reading] = []
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
        extensions = [Extension(r.cache, r.tokens[r.cached :]) for r in now]
        for reading, last in zip(now, self._extend(extensions), strict=True):
            reading.last = last
        ids = {id(reading): rollout_id for rollout_id, reading in self._readings.items()}
        self._donors.update({prompt: ids[id(r)] for r in now if (prompt := r.prompt) is not None})
        return waiting

    def _share(self, reading: _Reading) -> bool:
        """Begin with a sibling's prompt; its last token is computed anew where nothing else is."""
        prompt = reading.prompt
        donor = self._readings.get(self._donors.get(prompt, -1)) if prompt is not None else None
        length = min(reading.prompt_length, len(reading.tokens) - 1)
        if donor is None or donor.prompt != prompt or donor.cached < length:
            return False
        reading.cache = self._passes.fork(donor.cache, length)
        return True

    def _extend(self, extensions: Sequence[Extension]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for batch in token_batches(extensions, self._max_batch_tokens):
            tokens = sum(len(extension.token_ids) for extension in batch)
            who = f"A pass of the reward model over {tokens} new tokens of {len(batch)} sequences"
            # The partial binds this batch: a call that was given up may still run when the next one is chosen.
            found.extend(self.source.thread.call(who, partial(self._passes.extend, batch), SLOW_PASS))
        return found

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        encoded = [self.source.encoder(rollout) for rollout in rollouts]
        scores: list[Score] = [self.source.refusal(ids) or 0.0 for ids in encoded]
        fitting = [i for i, score in enumerate(scores) if not isinstance(score, RewardError)]
        try:
            values = self._values([(rollouts[i].rollout_id, encoded[i]) for i in fitting])
        except torch.OutOfMemoryError as error:
            self._give_all_up()
            raise RewardError(
                f"The reward model ran out of memory with {len(fitting)} sequences of up to "
                f"{max(map(len, encoded))} tokens; lower reward.max_batch_tokens or fusion.cache_tokens."
            ) from error
        except StuckError:
            self._give_all_up()
            raise
        for i, value in zip(fitting, values, strict=True):
            scores[i] = value if math.isfinite(value) else RewardError(f"The reward model's score is {value}.")
        return scores

    @torch.inference_mode()
    def _values(self, sequences: Sequence[tuple[int, IntArray]]) -> list[float]:
        last: dict[int, torch.Tensor] = {}
        extensions: dict[int, Extension] = {}
        read_on: dict[int, _Reading] = {}
        for place, (rollout_id, ids) in enumerate(sequences):
            reading = self._readings.get(rollout_id)
            past = reading.cached if reading is not None and _begins(ids, reading) else 0
            if reading is not None and reading.last is not None and past == len(ids):
                last[place] = reading.last
                continue
            if reading is not None and past:
                read_on[place] = reading
            extensions[place] = Extension(reading.cache if reading is not None and past else None, ids[past:])
        last.update(zip(extensions, self._extend(list(extensions.values())), strict=True))
        for place, reading in read_on.items():
            reading.tokens, reading.last = sequences[place][1], last[place]
        if not last:
            return []
        hidden = torch.stack([last[place] for place in range(len(sequences))])
        # On a GPU it is here that the passes are waited for.
        who = f"A pass of the reward model over {len(sequences)} sequences"
        return self.source.thread.call(who, partial(_head_scores, self.source.model, hidden), SLOW_PASS)

    def release(self, rollout_ids: Iterable[int]) -> None:
        """Forget rollouts that are scored, cancelled, failed or dropped."""
        for rollout_id in rollout_ids:
            self._readings.pop(rollout_id, None)
        if len(self._donors) > len(self._readings):
            self._donors = {prompt: giver for prompt, giver in self._donors.items() if giver in self._readings}

    def close(self) -> None:
        self._readings.clear()
        self._donors.clear()
        self.source.close()


@torch.inference_mode()
def _head_scores(model: PreTrainedModel, hidden: torch.Tensor) -> list[float]:
    """The scores of N hidden states [N, H]."""
    return [float(v) for v in head_of(model)(hidden)[:, 0].float().cpu()]


def _begins(ids: IntArray, reading: _Reading) -> bool:
    """Whether the cached tokens are the first of ``ids``."""
    cached = reading.cached
    return cached <= len(ids) and np.array_equal(ids[:cached], reading.tokens[:cached])


def token_batches(extensions: Sequence[Extension], budget: int) -> list[list[Extension]]:
    """In order, in batches of at most ``budget`` new tokens; a longer extension is a batch of its own."""
    batches: list[list[Extension]] = []
    tokens = 0
    for extension in extensions:
        size = len(extension.token_ids)
        if not batches or tokens + size > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(extension)
        tokens += size
    return batches


def chunked(source: ModelSource, cache_tokens: int, max_batch_tokens: int) -> RewardSource:
    """``source`` with a cache, or as it is where it reads other tokens than the policy's or cannot be continued."""
    if source.encoder is not policy_ids:
        return source
    try:
        passes = source.thread.call_without_limit(lambda: build_passes(source.model))
    except ChunkingRefusedError:
        return source
    return ChunkedSource(source, passes, cache_tokens, max_batch_tokens)
