"""How far a policy is from a reference model on answers that it sampled: KL by k1 and k3, and the perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrlhf.algorithms.kl import kl_estimate
from asyncrlhf.algorithms.logprobs import token_logprobs
from asyncrlhf.rewards.model import padded_batches
from asyncrlhf.stages.statistics import estimate
from asyncrlhf.types import FloatArray, Rollout

_LOGITS = 2**26  # held at once


@torch.inference_mode()
def response_logprobs(
    model: PreTrainedModel, rollouts: Sequence[Rollout], temperatures: Sequence[float]
) -> list[list[FloatArray]]:
    """For each temperature the log-probs [L] of each rollout's response tokens under ``model``."""
    embedding: Any = model.get_input_embeddings()
    lengths = np.array([len(r.prompt.token_ids) + len(r.response_ids) for r in rollouts], dtype=np.int64)
    found: list[list[FloatArray]] = [[np.zeros(0, np.float32)] * len(rollouts) for _ in temperatures]
    for batch in padded_batches(lengths, max(1, _LOGITS // int(embedding.num_embeddings))):
        ids = torch.zeros((len(batch), int(lengths[batch].max())), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(batch):
            text = np.concatenate([rollouts[i].prompt.token_ids, rollouts[i].response_ids]).astype(np.int64)
            ids[row, : len(text)] = torch.from_numpy(text)
            mask[row, : len(text)] = 1
        ids = ids.to(model.device)
        logits = model(input_ids=ids, attention_mask=mask.to(model.device), use_cache=False).logits
        for row, i in enumerate(batch):
            begin, end = len(rollouts[i].prompt.token_ids), int(lengths[i])
            for level, temperature in zip(found, temperatures, strict=True):
                predicted, targets = logits[row, begin - 1 : end - 1], ids[row, begin:end]
                level[i] = token_logprobs(predicted, targets, temperature=temperature)[0].float().cpu().numpy()
    return found


def perplexity(logprobs: Sequence[FloatArray]) -> float | None:
    """exp of the mean negative log-prob over all tokens of all answers; None without a token."""
    tokens = np.concatenate([np.zeros(0), *logprobs])
    return float(np.exp(-tokens.mean())) if len(tokens) else None


def kl_figures(
    policy: Sequence[FloatArray], reference: Sequence[FloatArray], prompts: Sequence[int]
) -> dict[str, float | None]:
    """KL(policy || reference) of answers sampled from ``policy``, in nats: means over answers of the estimates summed
    over an answer's tokens, with standard errors over ``prompts``, and means over all tokens.

    k1 = log p - log r has no bias; k3 = exp(-k1) - 1 + k1 has none either and is never negative (Schulman 2020). Both
    hold for the temperature that the answers were sampled at, which the log-probs must be of.
    """
    figures: dict[str, float | None] = {}
    for estimator in ("k1", "k3"):
        tokens = [_estimates(p, r, estimator) for p, r in zip(policy, reference, strict=True)]
        sequence = estimate([float(t.sum()) for t in tokens], prompts)
        count = sum(len(t) for t in tokens)
        figures |= {
            f"{estimator}_sequence": sequence.mean if sequence is not None else None,
            f"{estimator}_sequence_standard_error": sequence.standard_error if sequence is not None else None,
            f"{estimator}_token": float(sum(t.sum() for t in tokens)) / count if count else None,
        }
    return figures


def _estimates(policy: FloatArray, reference: FloatArray, estimator: str) -> np.ndarray:
    """[L] in double precision: k3 is a small difference of numbers near one."""
    ours, theirs = (torch.from_numpy(np.asarray(values, np.float64)) for values in (policy, reference))
    return kl_estimate(ours, theirs, torch.ones(len(ours), dtype=torch.bool), estimator=estimator).numpy()
