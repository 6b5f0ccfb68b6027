"""Statistics of the stages: means with standard errors over prompts, reward model calibration, perplexity, KL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from asyncrlhf.algorithms.kl import kl_estimate
from asyncrlhf.algorithms.logprobs import token_logprobs
from asyncrlhf.models.vocabulary import sampled_ids
from asyncrlhf.rewards.model import padded, padded_batches
from asyncrlhf.types import FloatArray, Rollout

BINS = 5
_LOGITS = 2**26  # held at once


class Estimate(NamedTuple):
    """A mean over ``n`` values; ``standard_error`` is None if all values are of one prompt."""

    mean: float
    standard_error: float | None
    n: int

    def text(self, digits: int = 3) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.{digits}f}"
        return f"{self.mean:.{digits}f}{error}"


def estimate(values: Sequence[float], prompts: Sequence[int] | None = None) -> Estimate | None:
    """The mean of ``values`` [N] and its standard error, or None without values.

    Values with the same entry in ``prompts`` [N] are correlated: their residuals are summed by prompt first, which
    gives the cluster-robust (CR1) error of a mean (Liang and Zeger 1986; Miller 2411.00640, section 2.2). With one
    value per prompt, or without ``prompts``, it is the sample's standard deviation over sqrt(N).
    """
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        return None
    labels = np.arange(len(data)) if prompts is None else np.asarray(prompts)
    _, member = np.unique(labels, return_inverse=True)
    groups = int(member.max()) + 1
    mean = float(data.mean())
    if groups < 2:
        return Estimate(mean, None, len(data))
    sums = np.bincount(member, weights=data - mean)
    error = float(np.sqrt(np.square(sums).sum() * groups / (groups - 1)) / len(data))
    return Estimate(mean, error, len(data))


def figures(name: str, values: Sequence[float], prompts: Sequence[int] | None = None) -> dict[str, float | None]:
    """:func:`estimate` as a dictionary: ``reward_mean`` and ``reward_standard_error``, or ``win_rate`` and
    ``win_rate_standard_error``; None without values."""
    found = estimate(values, prompts)
    mean, error = (found.mean, found.standard_error) if found is not None else (None, None)
    return {name: mean, f"{name}_standard_error".replace("mean_", ""): error}


def agreement(chosen: Sequence[float], rejected: Sequence[float], prompts: Sequence[int]) -> dict[str, Any]:
    """Accuracy, mean margin and calibration of the scores [N] of chosen and rejected answers; pairs with the same entry
    in ``prompts`` [N] share a prompt, for the standard errors. Equal scores count half.

    ``calibration``: up to five bins with equal numbers of pairs, by the size of the margin. ``expected``: the fraction
    of right answers that the Bradley-Terry model predicts from the margins, sigmoid(|margin|); ``accuracy``: the
    observed one.
    """
    margin = np.asarray(chosen, dtype=np.float64) - np.asarray(rejected, dtype=np.float64)
    right = 0.5 * (1.0 + np.sign(margin))
    order = np.argsort(np.abs(margin), kind="stable")
    bins = [part for part in np.array_split(order, min(BINS, len(order))) if len(part)]
    return {
        "pairs": len(margin),
        **figures("accuracy", right.tolist(), prompts),
        **figures("margin_mean", margin.tolist(), prompts),
        "score_mean": float(np.mean([chosen, rejected])),
        "score_std": float(np.std([chosen, rejected])),
        "calibration": [
            {
                "margin_low": float(np.abs(margin[part]).min()),
                "margin_high": float(np.abs(margin[part]).max()),
                "pairs": len(part),
                "accuracy": float(right[part].mean()),
                "expected": float((1.0 / (1.0 + np.exp(-np.abs(margin[part])))).mean()),
            }
            for part in bins
        ],
    }


@torch.inference_mode()
def response_logprobs(
    model: transformers.PreTrainedModel, rollouts: Sequence[Rollout], temperatures: Sequence[float]
) -> list[list[FloatArray]]:
    """For each temperature the log-probs [L] of each rollout's sampled tokens under ``model``."""
    embedding: Any = model.get_input_embeddings()
    lengths = np.array([len(r.prompt.token_ids) + len(r.response_ids) for r in rollouts], dtype=np.int64)
    found: list[list[FloatArray]] = [[np.zeros(0, np.float32)] * len(rollouts) for _ in temperatures]
    for batch in padded_batches(lengths, max(1, _LOGITS // int(embedding.num_embeddings))):
        texts = [np.concatenate([rollouts[i].prompt.token_ids, rollouts[i].response_ids]) for i in batch]
        ids, mask = padded(texts, model.device)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row, i in enumerate(batch):
            begin, end = len(rollouts[i].prompt.token_ids), int(lengths[i])
            for level, temperature in zip(found, temperatures, strict=True):
                predicted, targets = logits[row, begin - 1 : end - 1], ids[row, begin:end]
                facts = token_logprobs(predicted, targets, temperature=temperature, vocabulary=sampled_ids(model))
                level[i] = facts[0].float().cpu().numpy()[rollouts[i].sampled]
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

    k1 = log p - log r is unbiased; k3 = exp(-k1) - 1 + k1 is too, and never negative (Schulman 2020). Both hold at the
    temperature at which the answers were sampled: pass log-probs at that temperature.
    """
    found: dict[str, float | None] = {}
    for estimator in ("k1", "k3"):
        tokens = [_estimates(p, r, estimator) for p, r in zip(policy, reference, strict=True)]
        count = sum(len(t) for t in tokens)
        found |= figures(f"{estimator}_sequence", [float(t.sum()) for t in tokens], prompts)
        found[f"{estimator}_token"] = float(sum(t.sum() for t in tokens)) / count if count else None
    return found


def _estimates(policy: FloatArray, reference: FloatArray, estimator: str) -> np.ndarray:
    """[L] in double precision: k3 is a small difference of numbers near one."""
    ours, theirs = (torch.from_numpy(np.asarray(values, np.float64)) for values in (policy, reference))
    return kl_estimate(ours, theirs, torch.ones(len(ours), dtype=torch.bool), estimator=estimator).numpy()
