"""The hf engine: continuous batching of a transformers model over a static KV cache with one row per slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from asyncrlhf.engines.cache_config import CacheConfig
from asyncrlhf.engines.engine import CacheMode, Engine, StepOutput, load_named_weights, named_weights
from asyncrlhf.engines.hf.cache_facts import CacheFacts, is_separator
from asyncrlhf.engines.hf.kv_cache import Kept
from asyncrlhf.engines.hf.route_table import RouteTable
from asyncrlhf.engines.hf.sampling import penalise_repetition, sample_tokens, uniforms
from asyncrlhf.engines.hf.slots import SlotTable, choose_prefills
from asyncrlhf.engines.hf.wall import find_passes
from asyncrlhf.models.checkpoint_folder import context_of
from asyncrlhf.models.copies import to_device
from asyncrlhf.models.offload import Offload, free_cache
from asyncrlhf.types import FinishReason, FloatArray, GenerationRequest, IntArray, Rollout


class HFEngine(Engine):
    """``Engine`` over a loaded decoder-only model, which the engine owns from then on.

    Each step is one forward pass: the last token of every active row, and the prompts of the refilled rows, packed
    without padding. Siblings share one prefill, also with an earlier sibling under the same weights. A
    request's draws depend only on its seed; a greedy request (``temperature=0``) reports log-probs at temperature 1
    without filters. Errors of the model's forward pass propagate.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        *,
        slots: int,
        version: int = 0,
        offloads: bool = False,
        routes: bool = False,
        sampled: int | None = None,
        cache: CacheConfig | None = None,
        longest: int = 0,
    ) -> None:
        """``offloads``: asleep on a CPU, the weights move into a file; on a GPU they move to the host in any case.
        ``sampled``: ids from this one on are never sampled and have no probability; None: all may be.
        ``routes``: rollouts report the experts of each token; ConfigError for a model whose routers cannot.
        ``cache``: which tokens of a response of at most ``longest`` lose their keys and values; None: none does."""
        embedding: Any = model.get_input_embeddings()
        model.train(False)
        self._model = model
        self._device = model.device
        self._offload = Offload(model.device) if offloads or model.device.type == "cuda" else None
        kept = None if cache is None else Kept(cache, cache.budget(longest), self._separators)
        self._passes, self.note = find_passes(model, slots, routes, kept)
        self._facts = None if cache is None else CacheFacts(cache, longest, self._passes, sampled)
        self._sampled_ids = sampled
        super().__init__(slots, version, context_of(model.config), int(embedding.num_embeddings))
        self._table = SlotTable(slots, RouteTable(model, slots) if routes else None)
        self._holes: list[int] = []  # rows below the table's count that hold no request
        self._row_prompt = [b""] * slots  # by row: the prompt whose keys and values it begins with, or will
        # Prompt -> a row that was prefilled with it under these weights, and holds it until it gets another prompt.
        self._donors: dict[bytes, int] = {}
        self._separator = np.zeros(0, np.bool_)  # by token id, once asked for
        self._stop_texts = False  # whether any request so far has some

    @torch.inference_mode()
    def step(self, now: float) -> StepOutput:
        if self.asleep:
            return self._report()
        self._refill()
        table = self._table
        if not table.count:
            return self._report()
        self._passes.evict(table)
        prefills = choose_prefills(table)
        logits = self._passes.step(table, prefills)[:, : self._sampled_ids]
        for _, sharers in prefills:
            table.ready[sharers] = True
            for row in sharers:
                self._donors[self._row_prompt[row]] = row
        rows = np.flatnonzero(table.ready[: table.count])
        if table.routes is not None:
            table.routes.record(rows, table.length[: table.count], prefills)
        self._finished.extend(self._sample(logits, rows))
        return self._report(len(rows))

    def _sample(self, logits: torch.Tensor, rows: IntArray) -> list[Rollout]:
        table = self._table
        if len(rows) < table.count:
            logits = logits[to_device(torch.from_numpy(rows), self._device)]
        facts = table.rows[rows]
        uniform = uniforms(facts["state"], facts["length"] - facts["prompt_length"])
        if (facts["repetition_penalty"] != 1.0).any():
            texts = [table.tokens[row, : table.length[row]] for row in rows]
            logits = penalise_repetition(logits, texts, facts["repetition_penalty"])
        settings = (facts[name] for name in ("temperature", "top_p", "top_k", "min_p"))
        ended, stopped = table.append(rows, sample_tokens(logits, uniform, *settings), self.version)
        done = dict(zip(ended.tolist(), stopped.tolist(), strict=True))
        if self._stop_texts:
            done |= {row: True for row in rows.tolist() if not done.get(row) and self._completes_stop(row)}
        self._holes.extend(done)
        return [self._take(row, "stop" if stop else "length") for row, stop in done.items()]

    def _take(self, row: int, reason: FinishReason) -> Rollout:
        request, evicted = self._table.requests[row], int(self._table.rows["evicted"][row])
        rollout = self._table.take(row, reason)
        if self._facts is not None and request is not None:
            rollout = self._facts.told(rollout, request.sampling, row, evicted, self.version)
        return rollout

    def _separators(self, ids: IntArray) -> NDArray[np.bool_]:
        """Which of ``ids`` are punctuation or end a line."""
        if not len(self._separator):
            texts = [self.decode([i]) if self.decode is not None else "" for i in range(self._vocabulary)]
            self._separator = np.array([is_separator(text) for text in texts])
        return self._separator[ids]

    def _completes_stop(self, row: int) -> bool:
        request = self._table.requests[row]
        assert request is not None
        start, end = int(self._table.prompt_length[row]), int(self._table.length[row])
        return self.ends_at_stop(request, self._table.tokens[row, start:end])

    def _refill(self) -> None:
        """Put waiting requests into free rows; then move the active rows to the front."""
        copies: list[tuple[int, int]] = []
        self._holes.sort(reverse=True)
        while self._queue and (self._holes or self._table.count < self.slots):
            if self._holes:
                row = self._holes.pop()
            else:
                row = self._table.count
                self._table.count += 1
            self._occupy(row, self._queue.popleft(), copies)
        if copies:
            source, target = zip(*copies, strict=True)
            self._passes.copy_rows(source, target, max(int(self._table.prompt_length[row]) for row in target))
        if self._holes:
            self._close_holes()

    def _occupy(self, row: int, request: GenerationRequest, copies: list[tuple[int, int]]) -> None:
        prompt = request.prompt_ids
        longest = request.sampling.max_completion_length
        self._passes.reserve(len(prompt) + longest, longest)
        key = np.ascontiguousarray(prompt, np.int64).tobytes()
        donor = self._donors.get(key)
        if donor is not None and not self._gives(donor, key, len(prompt)):
            del self._donors[key]
            donor = None
        if donor is not None and donor != row:
            copies.append((donor, row))
        self._row_prompt[row] = key
        self._stop_texts |= bool(request.sampling.stop)
        self._table.occupy(row, request, ready=donor is not None)
        if donor is not None and self._table.routes is not None:
            self._table.routes.copy(donor, row, len(prompt) - 1)

    def _gives(self, donor: int, key: bytes, prompt: int) -> bool:
        """Whether row ``donor`` still holds the prompt ``key`` of ``prompt`` tokens for a further row."""
        return self._row_prompt[donor] == key and self._passes.can_copy(int(self._table.length[donor]), prompt)

    def _close_holes(self) -> None:
        table = self._table
        survivors = table.count - len(self._holes)
        targets = [row for row in self._holes if row < survivors]
        holes = set(self._holes)
        sources = [row for row in range(survivors, table.count) if row not in holes]
        if sources:
            self._passes.copy_rows(sources, targets, int(table.length[sources].max()))
        for source, target in zip(sources, targets, strict=True):
            key = self._row_prompt[source]
            self._row_prompt[target], self._row_prompt[source] = key, b""
            if self._donors.get(key) == source:
                self._donors[key] = target
            table.move(source, target)
        table.count = survivors
        self._holes.clear()

    def _sampled(self) -> Iterator[tuple[int, IntArray]]:
        return self._table.sampled()

    def _give_up(self, gone: set[int]) -> None:
        if self._facts is not None:
            self._facts.forget(gone)
        for row in range(self._table.count):
            request = self._table.requests[row]
            if request is not None and request.rollout_id in gone:
                self._table.requests[row] = None
                self._holes.append(row)

    def sleep(self, keep_weights: bool = True) -> None:
        """Always keeps its weights."""
        if self.asleep:
            return
        self.asleep = True
        self._forget_keys()
        self._passes.release()
        self._weights_out()

    def wake(self) -> None:
        if not self.asleep:
            return
        self.asleep = False
        if self._offload is not None:
            self._offload.back()
        self._passes.restore()

    def _weights_out(self) -> None:
        if self._offload is None:
            free_cache(self._device)
        else:
            self._offload.out(self._model.parameters())

    @contextmanager
    def _weights_here(self) -> Iterator[None]:
        """Bring the weights back for one call on a sleeping engine."""
        if self._offload is not None:
            self._offload.back()
        try:
            yield
        finally:
            if self.asleep:
                self._weights_out()

    def _forget_keys(self) -> None:
        """Drop the KV cache: the next step prefills the rows in flight again from their tokens."""
        self._donors.clear()
        self._table.ready[: self._table.count] = False

    def load_weights(self, version: int, weights: Mapping[str, torch.Tensor], cache: CacheMode) -> None:
        with self._weights_here():
            if self._facts is not None:
                self._facts.before_load(self._table, self.version)
            load_named_weights(self._model, weights)
        self.version = version
        if cache == "recompute":
            self._forget_keys()
        self._donors.clear()

    def parameters(self) -> Mapping[str, torch.Tensor]:
        if not self.asleep:
            return named_weights(self._model)
        with self._weights_here():
            return {name: tensor.to("cpu", copy=True) for name, tensor in named_weights(self._model).items()}

    def score(self, token_ids: Sequence[np.ndarray]) -> list[FloatArray]:
        with self._weights_here():
            return [self._score(np.asarray(text, np.int64)) for text in token_ids]

    @torch.inference_mode()
    def _score(self, text: IntArray) -> FloatArray:
        if len(text) < 2:
            return np.zeros(0, np.float32)
        logprobs = torch.log_softmax(self._passes.score(text)[:, : self._sampled_ids].float(), dim=-1)
        # Entry t is the log-prob of token t + 1; the prediction of the last token is left out.
        following = to_device(torch.from_numpy(text[1:, None]), logprobs.device)
        return logprobs[:-1].gather(1, following)[:, 0].cpu().numpy()

    def close(self) -> None:
        super().close()
        self._forget_keys()
        self._passes.release()
