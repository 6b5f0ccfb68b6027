"""Truncated sampling for tests: what it keeps, by a sorted loop, and rollouts of a tiny model that it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrlhf.engines.engine import Engine
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams, TrainBatch, TrainSample

TRUNCATED = SamplingParams(12, temperature=0.7, top_p=0.9, top_k=20)


def kept_count(
    logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float, cap: int = 1024
) -> tuple[int, np.ndarray]:
    """How many of the likeliest tokens are kept, and the probabilities of these, token by token in float64."""
    scaled = np.sort(logits.astype(np.float64) / temperature)[::-1]
    weights = np.exp(scaled - scaled[0])
    most = min(cap, len(weights)) if top_k == 0 else min(top_k, cap, len(weights))
    total = weights.sum() if top_k == 0 else weights[:most].sum()
    count, mass = 0, 0.0
    for weight in weights[:most]:
        if count and (mass / total >= top_p or weight < min_p):
            break
        count += 1
        mass += weight
    return count, weights[:count] / weights[:count].sum()


def sampled(
    engine: Engine, sampling: SamplingParams, vocabulary: int, groups: int = 4, size: int = 4, seed: int = 0
) -> list[Rollout]:
    """``groups`` prompts with ``size`` responses each, in order."""
    rng = np.random.default_rng(seed)
    prompts = [Prompt(str(g), "", rng.integers(0, vocabulary, 2 + g % 4)) for g in range(groups)]
    engine.submit([GenerationRequest(i, i // size, prompts[i // size], 50 + i, sampling) for i in range(groups * size)])
    found: dict[int, Rollout] = {}
    while engine.in_flight():
        for made in engine.step(0.0).finished:
            assert isinstance(made, Rollout), made
            found[made.rollout_id] = replace(made, generator_id="g0")
    return [found[i] for i in range(groups * size)]


def hf_rollouts(model: PreTrainedModel, sampling: SamplingParams = TRUNCATED, **options: int) -> list[Rollout]:
    """Sampled by the hf engine, which owns the model from then on."""
    return sampled(HFEngine(model, slots=5), sampling, int(model.config.vocab_size), **options)


def scored(rollouts: Sequence[Rollout], seed: int = 0) -> list[TrainSample]:
    rewards = np.random.default_rng(seed).normal(size=len(rollouts))
    return [TrainSample(rollout, float(reward)) for rollout, reward in zip(rollouts, rewards, strict=True)]


def sets_of(rollout: Rollout) -> list[set[int]]:
    """The kept tokens at each place of a response."""
    assert rollout.kept_ids is not None and rollout.kept_counts is not None
    return [set(part.tolist()) for part in np.split(rollout.kept_ids, np.cumsum(rollout.kept_counts)[:-1])]


def with_sets(batch: TrainBatch, vocabulary: int, seed: int = 0) -> TrainBatch:
    """The batch as if up to half of the vocabulary had been kept at most response tokens, and all of it at the rest."""
    draws = np.random.default_rng(seed)
    sets: list[np.ndarray] = []
    for token, answered in zip(batch.token_ids, batch.response_mask, strict=True):
        others = draws.permutation(vocabulary)[: int(draws.integers(0, vocabulary // 2))]
        sets.append(np.union1d(others, token) if answered and draws.random() < 2 / 3 else others[:0])
    counts = np.array([len(kept) for kept in sets], np.int32)
    return replace(batch, kept_ids=np.concatenate(sets).astype(np.int32), kept_counts=counts)


def renormalised(logits: torch.Tensor, sets: Sequence[set[int]], temperature: float) -> torch.Tensor:
    """Log-probs [L, V] of the softmax over each set alone, -inf elsewhere; an empty set is the whole vocabulary."""
    rows = []
    for row, kept in zip(logits / temperature, sets, strict=True):
        where = sorted(kept) or list(range(len(row)))
        full = torch.full_like(row, -torch.inf)
        rows.append(full.index_put((torch.tensor(where),), row[where] - row[where].exp().sum().log()))
    return torch.stack(rows)
