"""Means with standard errors over prompts; a reward model's accuracy, margin and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A mean over ``n`` values; ``standard_error`` is None where one prompt alone was seen."""

    mean: float
    standard_error: float | None
    n: int

    def text(self, digits: int = 3) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.{digits}f}"
        return f"{self.mean:.{digits}f}{error}"


def estimate(values: Sequence[float], prompts: Sequence[int] | None = None) -> Estimate | None:
    """The mean of ``values`` [N] and its standard error, or None for no value.

    ``prompts`` [N] says which values hang together: their residuals are summed by prompt first, which is the
    cluster-robust (CR1) error of a mean (Liang and Zeger 1986; Miller 2411.00640, section 2.2). With one value a
    prompt, or without ``prompts``, it is the sample's standard deviation over sqrt(N).
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


BINS = 5


def agreement(chosen: Sequence[float], rejected: Sequence[float], prompts: Sequence[int]) -> dict[str, Any]:
    """Accuracy, mean margin and calibration of the scores [N] of chosen and rejected answers; ``prompts`` [N] says
    which pairs share one, for the standard errors. Equal scores count half.

    ``calibration``: up to five bins of equally many pairs, by the size of the margin. ``expected`` is the share of
    right answers that the Bradley-Terry model reads off those sizes, sigmoid(|margin|); ``accuracy`` is what was.
    """
    margin = np.asarray(chosen, dtype=np.float64) - np.asarray(rejected, dtype=np.float64)
    right = 0.5 * (1.0 + np.sign(margin))
    accuracy, mean = estimate(right.tolist(), prompts), estimate(margin.tolist(), prompts)
    assert accuracy is not None and mean is not None
    order = np.argsort(np.abs(margin), kind="stable")
    bins = [part for part in np.array_split(order, min(BINS, len(order))) if len(part)]
    return {
        "pairs": len(margin),
        "accuracy": accuracy.mean,
        "accuracy_standard_error": accuracy.standard_error,
        "margin_mean": mean.mean,
        "margin_standard_error": mean.standard_error,
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
