"""Means with standard errors where several values belong to one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
