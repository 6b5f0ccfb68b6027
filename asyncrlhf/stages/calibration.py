"""How far a reward model agrees with preferences that it has not seen: accuracy, margin, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrlhf.stages.statistics import estimate

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
