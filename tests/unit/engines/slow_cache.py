"""The hf engine's eviction once more, one token and one head at a time: all keys are kept, masks hide what is gone."""

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
        self.keys: dict[tuple[int, int], torch.Tensor] = {}
        self.values: dict[tuple[int, int], torch.Tensor] = {}
        self.gone: dict[tuple[int, int, int], int] = {}  # (layer, head, position): the first query without it
        self.attention: dict[tuple[int, int, int], float] = {}  # all that it got from decoding queries
        self.novelty: dict[tuple[int, int, int], float] = {}
        self.query, self.watches, self.evicted = 0, False, 0

    def attend(
        self, layer: int, states: tuple[torch.Tensor, ...], scale: float, softcap: float | None, sinks: Any
    ) -> torch.Tensor:
        q, k, v = states
        at, window = self.query, self.windows[layer]
        self.keys[layer, at], self.values[layer, at] = k[0, :, 0], v[0, :, 0]
        outs, group = [], q.shape[1] // self.heads
        for head in range(self.heads):
            seen = [t for t in range(at + 1) if (window is None or at - t < window)]
            seen = [t for t in seen if self.gone.get((layer, head, t), NEVER) > at]
            keys = torch.stack([self.keys[layer, t][head] for t in seen])
            values = torch.stack([self.values[layer, t][head] for t in seen])
            total = np.zeros(len(seen))
            for one in range(head * group, (head + 1) * group):
                scores = keys @ q[0, one, 0] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                whole = scores if sinks is None else torch.cat([scores, sinks[one : one + 1].to(scores.dtype)])
                weights = torch.softmax(whole, dim=-1)[: len(seen)]
                outs.append(weights @ values)
                total += weights.double().numpy()
            if self.watches and window is None:
                self.watch(layer, head, dict(zip(seen, total.tolist(), strict=True)))
        return torch.stack(outs)[None, None]

    def watch(self, layer: int, head: int, got: Mapping[int, float]) -> None:
        half = self.config.window // 2
        for t, weight in got.items():
            self.attention[layer, head, t] = self.attention.get((layer, head, t), 0.0) + weight
        for t in range(max(0, self.query - half + 1), self.query + 1):
            within = sum(got[s] for s in range(t, self.query + 1))
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

    def evict(self, text: np.ndarray, separators: np.ndarray) -> None:
        """Before the query at ``self.query``."""
        at = self.query
        if at - self.prompt - self.evicted < self.budget:
            return
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
    found = []
    for t, version in enumerate(rollout.policy_versions.tolist()):
        model = models[version]
        query = row.prompt - 1 + t
        row.query = query
        row.evict(text, separators)
        if t == 0 or t in anew:
            for position in range(query):
                _pass(model, row, text, position, watches=False)
        logits = _pass(model, row, text, query, watches=True)
        found.append(float(torch.log_softmax(logits, dim=-1)[rollout.response_ids[t]]))
    return np.array(found)


def _pass(model: PreTrainedModel, row: SlowRow, text: np.ndarray, position: int, watches: bool) -> torch.Tensor:
    row.query, row.watches = position, watches
    ids, where = torch.tensor([[int(text[position])]]), torch.tensor([[position]])
    logits: torch.Tensor = model(input_ids=ids, position_ids=where, use_cache=False).logits[0, -1]
    return logits
