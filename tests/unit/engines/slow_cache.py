"""The hf engine's eviction once more, one text at a time: all keys are kept, masks hide what is gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from asyncrlhf.engines.cache_config import CacheConfig
from asyncrlhf.types import FloatArray, Rollout

NAME = "slow_masked"
NEVER = 10**9


class SlowRow:
    """One text: the keys of every position under the weights that computed them, and when each one went."""

    def __init__(self, config: CacheConfig, budget: int, prompt: int, windows: list[int | None], heads: int) -> None:
        """``windows``: of each layer, ``heads``: key-value heads."""
        self.config, self.budget, self.prompt, self.windows, self.heads = config, budget, prompt, windows, heads
        self.full = [layer for layer, window in enumerate(windows) if window is None]
        self.early = self.full[: max(1, len(self.full) // 3)]
        self.keys: dict[int, torch.Tensor] = {}  # of each layer: [heads, positions, width]
        self.values: dict[int, torch.Tensor] = {}
        self.gone: dict[tuple[int, int, int], int] = {}  # (layer, head, position): the first query without it
        self.attention: dict[tuple[int, int, int], float] = {}  # all that it got from decoding queries
        self.novelty: dict[tuple[int, int, int], float] = {}
        self.query, self.watches, self.evicted = 0, False, 0

    def attend(
        self, layer: int, states: tuple[torch.Tensor, ...], scale: float, softcap: float | None, sinks: Any
    ) -> torch.Tensor:
        """Of the queries at ``self.query`` and after it."""
        q, k, v = (x[0] for x in states)
        if self.query:
            k = torch.cat([self.keys[layer][:, : self.query], k], dim=1)
            v = torch.cat([self.values[layer][:, : self.query], v], dim=1)
        self.keys[layer], self.values[layer] = k, v
        seen = self.seen(layer, q.shape[1]).repeat_interleave(len(q) // self.heads, dim=0)
        scores = q @ k.repeat_interleave(len(q) // self.heads, dim=0).mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, q.shape[1], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : k.shape[1]]
        if self.watches and self.windows[layer] is None:
            totals = weights.double().unflatten(0, (self.heads, -1)).sum(1).tolist()
            for head, total in enumerate(totals):
                stays = seen[head * (len(q) // self.heads)].tolist()
                for i in range(q.shape[1]):
                    got = {t: total[i][t] for t in range(k.shape[1]) if stays[i][t]}
                    self.watch(layer, head, self.query + i, got)
        return (weights @ v.repeat_interleave(len(q) // self.heads, dim=0)).transpose(0, 1)[None]

    def seen(self, layer: int, queries: int) -> torch.Tensor:
        """Of each head, query and position, whether the query sees it."""
        at = torch.arange(self.query, self.query + queries)[:, None]
        t, window = torch.arange(self.query + queries), self.windows[layer]
        gone = torch.full((self.heads, 1, len(t)), NEVER)
        for (index, head, position), since in self.gone.items():
            if index == layer:
                gone[head, 0, position] = since
        return (t <= at) & (at - t < (window or NEVER)) & (gone > at)

    def watch(self, layer: int, head: int, at: int, got: Mapping[int, float]) -> None:
        half = self.config.window // 2
        for t, weight in got.items():
            self.attention[layer, head, t] = self.attention.get((layer, head, t), 0.0) + weight
        for t in range(max(0, at - half + 1), at + 1):
            within = sum(got[s] for s in range(t, at + 1))
            across = sum(got[s] for s in range(max(0, t - half), t))
            if within + across > 1e-6:
                found = (within - across) / (within + across + 1e-6)
                self.novelty[layer, head, t] = self.novelty.get((layer, head, t), 0.0) + found

    def boundary(self, layer: int, head: int, t: int) -> float:
        if layer in self.early:
            return self.novelty[layer, head, t]
        return float(np.mean([self.novelty[e, h, t] for e in self.early for h in range(self.heads)]))

    def score(self, layer: int, head: int, t: int, separates: bool) -> float:
        policy = self.config.policy
        if policy == "heavy_hitters":
            return self.attention[layer, head, t]
        if policy == "chunk_sink":
            first, last = self.boundary(layer, head, t), self.boundary(layer, head, t + 1)
            return {"first": first, "last": last, "both": max(first, last)}[self.config.keep]
        return t + 1e6 * (policy == "separators" and separates)

    def is_full(self, at: int) -> bool:
        """Whether tokens go before the query there."""
        return at - self.prompt - self.evicted >= self.budget

    def evict(self, at: int, text: np.ndarray, separators: np.ndarray) -> None:
        for layer in self.full:
            for head in range(self.heads):
                kept = [t for t in range(self.prompt, at) if (layer, head, t) not in self.gone]
                free = kept[: -self.config.window]
                order = sorted(free, key=lambda t: (self.score(layer, head, t, bool(separators[text[t]])), -t))
                for t in order[: self.config.every]:
                    self.gone[layer, head, t] = at
        self.evicted += self.config.every


PRESENT: list[SlowRow] = []


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *,
    scaling: float | None = None, softcap: float | None = None, s_aux: Any = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return PRESENT[0].attend(module.layer_idx, (query, key, value), scale, softcap, s_aux), None


transformers.AttentionInterface.register(NAME, _attention)


@torch.no_grad()
def slow_logprobs(
    models: Mapping[int, PreTrainedModel], rollout: Rollout, anew: set[int], row: SlowRow, separators: np.ndarray
) -> FloatArray:
    """Log-probs [L] of the response, token t under the weights of its version; before the tokens in ``anew`` all keys
    are computed again, under the weights of that token."""
    text = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])
    PRESENT[:] = [row]
    found: list[float] = []
    versions = rollout.policy_versions.tolist()
    while (t := len(found)) < len(versions):
        at = row.prompt - 1 + t
        if row.is_full(at):
            row.evict(at, text, separators)
        if t == 0 or t in anew:
            _pass(models[versions[t]], row, text, range(at), watches=False)
        end = t + 1  # of the tokens up to the next change
        while end < len(versions) and versions[end] == versions[t] and end not in anew:
            if row.is_full(row.prompt - 1 + end):
                break
            end += 1
        logits = _pass(models[versions[t]], row, text, range(at, row.prompt - 1 + end), watches=True)
        chosen = torch.from_numpy(rollout.response_ids[t:end])[:, None]
        found += torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].tolist()
    return np.array(found)


def _pass(model: PreTrainedModel, row: SlowRow, text: np.ndarray, positions: range, watches: bool) -> torch.Tensor:
    row.query, row.watches = positions.start, watches
    where = torch.tensor([list(positions)])
    ids = torch.from_numpy(text)[where]
    logits: torch.Tensor = model(input_ids=ids, position_ids=where, use_cache=False).logits[0]
    return logits
