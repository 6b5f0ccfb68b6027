"""Statistics that add up: the sum of two ranks' statistics is the statistic of both ranks' tokens.

Learner ranks exchange these instead of their tokens. ``float(a + b)`` is the result of one rank with all the tokens, up
to rounding; quantiles are exact up to a bin of ``BIN`` (1%), on one rank as on several. Each is 0 over no tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from typing import Self

import torch
from torch import Tensor

from asyncrlhf.algorithms.masked import masked_values, moments

BIN = 0.01  # relative width of the bins of a histogram
_ZERO_BIN, _BROKEN_BIN = -(2**31), 2**31 - 1


class Statistic:
    """Fields that are added one by one, unless a subclass overrides this."""

    def __float__(self) -> float:
        raise NotImplementedError

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Total(Statistic):
    total: float

    def __float__(self) -> float:
        return self.total


@dataclass(frozen=True)
class Mean(Statistic):
    total: float
    count: float

    @classmethod
    def over(cls, x: Tensor, mask: Tensor) -> Mean:
        """Of ``x [n]`` over ``mask [n]``."""
        return cls(float(masked_values(x.detach(), mask).sum(dtype=torch.float64)), float(mask.sum()))

    def __float__(self) -> float:
        return self.total / max(self.count, 1.0)


@dataclass(frozen=True)
class Spread(Statistic):
    """Standard deviation of the population."""

    count: float
    first: float
    second: float

    @classmethod
    def over(cls, x: Tensor, mask: Tensor) -> Spread:
        return cls(*moments(x, mask).tolist())

    @property
    def mean(self) -> Mean:
        return Mean(self.first, self.count)

    @property
    def variance(self) -> float:
        found = self.second / max(self.count, 1.0) - float(self.mean) ** 2
        return 0.0 if found < 0 else found  # NaN stays NaN

    def __float__(self) -> float:
        return math.sqrt(self.variance)


@dataclass(frozen=True)
class Largest(Statistic):
    value: float

    @classmethod
    def of(cls, x: Tensor) -> Largest:
        return cls(float(x.max()) if len(x) else -math.inf)

    def __float__(self) -> float:
        return self.value if self.value > -math.inf else 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(max(self.value, other.value))


@dataclass(frozen=True)
class EffectiveSize(Statistic):
    """(sum w)^2 / sum w^2 of weights w = exp(log-weight), neither cut nor clamped; ``share``: divided by their number.

    Weights are scaled by the largest one, e^``top``, so that no log-weight overflows. The share is 1 for equal weights
    and 1/n if one of n weights has the whole mass.
    """

    top: float
    first: float
    second: float
    count: float
    share: bool

    @classmethod
    def over(cls, log_weights: Tensor, mask: Tensor, share: bool) -> EffectiveSize:
        kept = log_weights.detach()[mask].double()
        top = float(kept.max()) if len(kept) else -math.inf
        weights = (kept - top).exp()
        return cls(top, float(weights.sum()), float(weights.square().sum()), float(len(kept)), share)

    def __float__(self) -> float:
        if not self.count:
            return 0.0
        size = self.first**2 / self.second
        return size / self.count if self.share else size

    def __add__(self, other: Self) -> Self:
        top = max(self.top, other.top)
        mine, theirs = (math.exp(x.top - top) if x.count else 0.0 for x in (self, other))
        first = self.first * mine + other.first * theirs
        second = self.second * mine**2 + other.second * theirs**2
        return type(self)(top, first, second, self.count + other.count, self.share)


@dataclass(frozen=True)
class Percentile(Statistic):
    """The smallest value that at least ``share`` of the values do not exceed, up to the width of a bin."""

    counts: Counter[int]
    share: float
    integers: bool

    @classmethod
    def of_sizes(cls, x: Tensor, share: float) -> Percentile:
        """Of ``x [n]`` >= 0; the result is the upper edge of a bin, at most ``BIN`` above the value."""
        bins = (x.detach().double().log() / math.log1p(BIN)).ceil()
        bins = torch.where(x == 0, _ZERO_BIN, bins.nan_to_num(_BROKEN_BIN, _BROKEN_BIN, _ZERO_BIN)).long()
        return cls(_counted(bins), share, integers=False)

    @classmethod
    def of_integers(cls, x: Tensor, share: float) -> Percentile:
        """Of integers ``x [n]``: exact."""
        return cls(_counted(x.long()), share, integers=True)

    def __float__(self) -> float:
        # Rounded first: 0.95 * 20 is above 19.
        left = math.ceil(round(self.share * self.counts.total(), 6))
        for value in sorted(self.counts):
            left -= self.counts[value]
            if left <= 0:
                return float(value) if self.integers else _edge(value)
        return 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(self.counts + other.counts, self.share, self.integers)


def _edge(number: int) -> float:
    special = {_ZERO_BIN: 0.0, _BROKEN_BIN: math.inf}
    return special[number] if number in special else (1 + BIN) ** number


def _counted(bins: Tensor) -> Counter[int]:
    values, counts = torch.unique(bins, return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def together(parts: Iterable[dict[str, Statistic]]) -> dict[str, Statistic]:
    """All ranks' statistics merged; a name that some ranks lack is merged over the others."""

    def add(mine: dict[str, Statistic], theirs: dict[str, Statistic]) -> dict[str, Statistic]:
        both = {name: mine[name] + theirs[name] for name in mine.keys() & theirs.keys()}
        return {**mine, **theirs, **both}

    return reduce(add, parts)
