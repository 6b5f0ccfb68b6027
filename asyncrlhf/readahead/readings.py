"""Sequences that a model reads while they are still being sampled: their tokens, caches and results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.attention.attention import IMPLEMENTATION, OPTIONS, Layout, packed_attention
from asyncrlhf.learner.attention.tiles import Scoring
from asyncrlhf.readahead.owners import Chunk, Prefilled
from asyncrlhf.rewards.model import policy_ids
from asyncrlhf.rewards.reward import StuckError
from asyncrlhf.types import FloatArray, IntArray, Prompt, Rollout

Answer = Callable[[Sequence[Rollout]], list[Any]]  # for each: a number, an array, or the reason for a missing one
BLOCK = 64  # tokens: a sequence's cache counts in multiples of it, which leaves room for the copy when it grows


# Rotary embeddings whose rotation of earlier tokens changes with the sequence's length: cached keys would be wrong.
MOVING_ROPE = ("dynamic", "longrope")


def past_refusal(of_model: transformers.PretrainedConfig) -> str | None:
    """Why cached keys and values may not be valid for later tokens, as the end of a sentence."""
    config: Any = of_model.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and set(kinds) != {"full_attention"}:
        return f"has layers of {', '.join(sorted(set(kinds) - {'full_attention'}))}"
    if kinds is None and getattr(config, "sliding_window", None):
        return "has a sliding window"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return f"has rotary embeddings of type {rope}, which change with the length" if rope in MOVING_ROPE else None


def reading_refusal(model: transformers.PreTrainedModel) -> str | None:
    """Why ``model`` cannot continue sequences, as the end of a sentence. The model's own code runs with attention that
    reads caches: it must call transformers' attention interface and pass its keyword arguments on."""
    known = signature(model.base_model.forward).parameters
    takes_more = any(p.kind is Parameter.VAR_KEYWORD for p in known.values())
    if not (model._supports_attention_backend and "position_ids" in known and takes_more):
        return "does not use transformers' attention interface"
    return past_refusal(model.config)


@dataclass(eq=False)
class Reading:
    """The known tokens of one sequence, and the results of the tokens read."""

    prompt_length: int
    tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # [n] from the prompt on
    cache: transformers.DynamicCache | None = None
    last: torch.Tensor | None = None  # [H] hidden state of the last token that was read
    logprobs: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))  # of the response tokens read
    sampled: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))  # [L] once it is complete

    @property
    def cached(self) -> int:
        return int(self.cache.get_seq_length()) if self.cache is not None else 0

    @property
    def size(self) -> int:
        """Tokens that count against the limit when all are read."""
        return -(-len(self.tokens) // BLOCK) * BLOCK

    def take(self, start: int, ids: IntArray) -> None:
        """Store tokens that begin at place ``start``. Tokens after a gap are ignored. Tokens that differ from the
        stored ones mean that the sequence was sampled again: the old cache, hidden state and log-probs are dropped."""
        if start > len(self.tokens):
            return
        known = self.tokens[start : start + len(ids)]
        if not np.array_equal(known, ids[: len(known)]):
            self.tokens, self.logprobs, self.cache, self.last = self.tokens[:start], self.logprobs[:0], None, None
        self.tokens = np.concatenate([self.tokens, ids[len(self.tokens) - start :]])


class Readings:
    """Takes chunks, reads them ahead, and holds caches of up to ``cache_tokens`` tokens.

    An answer is computed from the rollout's own tokens: the cache is used as far as it matches them, and the rest is
    computed. The least recently used sequence is evicted first and not cached again, so that sequences do not evict
    each other in turn. Outside of the passes that read ahead the model keeps its own attention.
    """

    def __init__(self, model: Any, whole: Answer, cache_tokens: int, budget: int, max_length: int) -> None:
        """``whole`` answers rollouts without any read-ahead. ``budget``: new tokens of one pass. Sequences of
        more than ``max_length`` tokens are not read ahead."""
        transformers.AttentionInterface.register(IMPLEMENTATION, packed_attention)
        self._model = model
        self._whole = whole
        self._cache_tokens = cache_tokens
        self._budget = budget
        self._max_length = max_length
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        # By rollout id, least recently touched first. None: evicted, or not to be read ahead.
        self._readings: OrderedDict[int, Reading | None] = OrderedDict()
        self._evicted: set[int] = set()  # since the last answer to chunks

    def _answers(self, readings: Sequence[Reading]) -> list[Any]:
        """The answers of ``whole`` for complete readings."""
        raise NotImplementedError

    def _keep(self, batch: Sequence[Reading], hidden: Sequence[torch.Tensor]) -> None:
        """Store the results of the hidden states [n, H] of each sequence's last n tokens, besides the last state."""

    @torch.inference_mode()
    def _pass(self, batch: Sequence[Reading]) -> None:
        """Read each sequence of ``batch`` to the end of its tokens, in one pass."""
        for reading in batch:
            if reading.cache is None:
                reading.cache = transformers.DynamicCache(config=self._model.config)
        hidden = self._extend([(r.cache, r.tokens[r.cached :]) for r in batch if r.cache is not None])
        self._keep(batch, hidden)
        # Copies: a view would keep the hidden states of the whole pass.
        for reading, last in zip(batch, torch.stack([states[-1] for states in hidden]), strict=True):
            reading.last = last

    def _extend(self, sequences: Sequence[tuple[transformers.DynamicCache, IntArray]]) -> list[torch.Tensor]:
        """The hidden states [n, H] of each sequence's new tokens [n], whose keys and values are added to its cache, in
        one pass without padding. After an error the caches are unusable."""
        caches, tokens = zip(*sequences, strict=True)
        model: Any = self._model
        lengths = [len(ids) for ids in tokens]
        pasts = [int(cache.get_seq_length()) for cache in caches]
        places = [np.arange(past, past + n) for past, n in zip(pasts, lengths, strict=True)]
        ids, positions = (torch.from_numpy(np.concatenate(rows))[None].to(model.device) for rows in (tokens, places))
        # Which of past + n tokens each of the last n may attend to; None if causality determines it.
        seen = [
            torch.ones((n, past + n), dtype=torch.bool, device=ids.device).tril(past) if past else None
            for past, n in zip(pasts, lengths, strict=True)
        ]
        layout = _CachedLayout(positions, lengths=lengths, caches=caches, seen=seen)
        config = model.base_model.config.get_text_config()
        own, config._attn_implementation_internal = config._attn_implementation_internal, IMPLEMENTATION
        try:
            output = model.base_model(input_ids=ids, position_ids=positions, packed_layout=layout, use_cache=False)
        finally:
            config._attn_implementation_internal = own
        return list(output.last_hidden_state[0].split(lengths))

    def _read(self, readings: Sequence[Reading]) -> None:
        for batch in token_batches(readings, self._budget):
            self._pass(batch)

    @property
    def held(self) -> int:
        """Tokens that count against ``cache_tokens``."""
        return sum(reading.size for reading in self._readings.values() if reading is not None)

    def prefill(self, released: Iterable[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released``, then read the new chunks."""
        self.release(released)
        for chunk in chunks:
            self._note(chunk)
        excess = self.held - self._cache_tokens
        for rollout_id, reading in self._readings.items():
            if excess > 0 and reading is not None:
                excess -= reading.size
                self._give_up(rollout_id, reading)
        touched = [reading for i in dict.fromkeys(c.rollout_id for c in chunks) if (reading := self._readings.get(i))]
        with self._caches_at_risk():
            self._read([reading for reading in touched if len(reading.tokens) > reading.cached])
        evicted, self._evicted = self._evicted, set()
        return Prefilled(True, sorted(evicted))

    def _note(self, chunk: Chunk) -> None:
        """Store the chunk's tokens; give up a sequence that is too long for the cache or unreadable by the model."""
        reading = self._readings.setdefault(chunk.rollout_id, Reading(chunk.prompt_length))
        self._readings.move_to_end(chunk.rollout_id)
        while len(self._readings) > self._cache_tokens:  # more than the cache can hold: given up, and never released
            self._readings.popitem(last=False)
        if reading is not None:
            reading.take(chunk.start, np.asarray(chunk.token_ids, np.int64))
            if not chunk.prompt_length or reading.size > self._cache_tokens or not self._readable(reading.tokens):
                self._give_up(chunk.rollout_id, reading)

    def _readable(self, ids: IntArray) -> bool:
        return len(ids) <= self._max_length and ids.min(initial=0) >= 0 and ids.max(initial=0) < self._vocabulary

    def _give_up(self, rollout_id: int, reading: Reading) -> None:
        reading.cache = None  # a caller may keep the reading for longer
        self._readings[rollout_id] = None
        self._evicted.add(rollout_id)

    def give_all_up(self) -> bool:
        """Free all caches; returns False if there were none."""
        kept = [(rollout_id, reading) for rollout_id, reading in self._readings.items() if reading is not None]
        for rollout_id, reading in kept:
            self._give_up(rollout_id, reading)
        return bool(kept)

    @contextmanager
    def _caches_at_risk(self) -> Iterator[None]:
        """On an error in this context free all caches. Running out of memory is not raised, because the sequences are
        then computed whole; the error of a hanging pass, which may still write to the caches, is raised."""
        try:
            yield
        except (torch.OutOfMemoryError, StuckError) as error:
            self.give_all_up()
            if isinstance(error, StuckError):
                raise

    def answers(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """The model's answer for each rollout: continued from its cached beginning, else computed as a whole."""
        begun = {i: r for i, rollout in enumerate(rollouts) if (r := self._begun(rollout)) is not None}
        found: dict[int, Any] = {}
        with self._caches_at_risk():
            self._read([reading for reading in begun.values() if len(reading.tokens) > reading.cached])
            if begun:
                found = dict(zip(begun, self._answers([*begun.values()]), strict=True))
        left = [i for i in range(len(rollouts)) if i not in found]
        found.update(zip(left, self._whole([rollouts[i] for i in left]), strict=True))
        return [found[i] for i in range(len(rollouts))]

    def _begun(self, rollout: Rollout) -> Reading | None:
        """The rollout's reading, completed with its tokens, if the cache was made of the same tokens; else None."""
        ids, reading = policy_ids(rollout), self._readings.get(rollout.rollout_id)
        if reading is None or not len(rollout.prompt.token_ids) == reading.prompt_length < len(ids):
            return None
        n = reading.cached
        if not (n and np.array_equal(ids[:n], reading.tokens[:n]) and self._readable(ids)):
            return None
        reading.tokens, reading.sampled = ids, rollout.sampled
        return reading

    def release(self, rollout_ids: Iterable[int]) -> None:
        """Forget rollouts that are done, cancelled, failed or dropped."""
        for rollout_id in rollout_ids:
            self._readings.pop(rollout_id, None)

    def try_out(self, exact: bool) -> bool:
        """Whether two short texts read in chunks give the same result as read whole. ``exact``: computed in float32
        or better."""
        room, self._cache_tokens = self._cache_tokens, 2 * BLOCK
        ids, zeros = np.arange(7, dtype=np.int64) * 7 % self._vocabulary, np.zeros(7, np.float32)
        prompt = Prompt("", "", ids[:2])
        texts = [Rollout(-n, 0, prompt, ids[2:n], zeros[2:n], ids[2:n], "length", "", "") for n in (7, 5)]
        for start, stop in ((0, 2), (2, 3), (3, 4)):
            self.prefill([], [Chunk(text.rollout_id, start, 2, ids[start:stop].tolist()) for text in texts])
        kept = all(reading is not None and reading.cached == 4 for reading in self._readings.values())
        one, other = (
            np.hstack([answer if isinstance(answer, float | np.ndarray) else np.nan for answer in way(texts)])
            for way in (self._whole, self.answers)
        )
        self.release(text.rollout_id for text in texts)
        self._cache_tokens = room
        bound = (1e-4 if exact else 0.1) * np.abs(one).clip(min=1.0)
        # Written so that NaN is refused too.
        return kept and one.shape == other.shape and bool((np.abs(one - other) <= bound).all())


def token_batches(readings: Sequence[Reading], budget: int) -> list[list[Reading]]:
    """``readings`` in order, in batches of at most ``budget`` new tokens; a longer one is a batch of its own."""
    batches: list[list[Reading]] = []
    tokens = budget
    for reading in readings:
        tokens += len(reading.tokens) - reading.cached
        if tokens > budget:
            batches.append([])
            tokens = len(reading.tokens) - reading.cached
        batches[-1].append(reading)
    return batches


@dataclass(frozen=True, kw_only=True)
class _CachedLayout(Layout):
    """Attention of new tokens over the earlier keys and values in their sequences' caches."""

    lengths: Sequence[int]  # new tokens of each sequence
    caches: Sequence[transformers.DynamicCache]
    seen: Sequence[torch.Tensor | None]

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]. Raises ConfigError for a layer with a
        window, a soft cap or attention sinks."""
        more = [name for name, given in zip(OPTIONS, scoring[1:], strict=True) if given is not None]
        if more:
            raise ConfigError(
                f"model.path: {type(module).__name__} has {', '.join(more)} and cannot read sequences ahead; allowed: "
                "attention to all earlier tokens."
            )
        device = key.device.type
        held = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else key.dtype
        parts = []
        pieces = (tensor.split(self.lengths, dim=2) for tensor in (query, key.to(held), value.to(held)))
        for cache, seen, q, new_keys, new_values in zip(self.caches, self.seen, *pieces, strict=True):
            keys, values = cache.update(new_keys, new_values, module.layer_idx)
            # The heads of a group share one key head: grouped attention without copies of the keys.
            q = q[0].unflatten(0, (key.shape[1], -1))
            k, v = (tensor[0][:, None].expand(-1, q.shape[1], -1, -1) for tensor in (keys, values))
            out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scoring.scale)
            parts.append(out.flatten(0, 1).transpose(0, 1))
        return torch.cat(parts)[None]
