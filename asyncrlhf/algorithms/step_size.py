"""Step sizes that follow how much a batch is worth."""

from __future__ import annotations

import math


def sqrt_ess_factor(ess_fraction: float, base: float) -> float:
    """What the learning rate is multiplied by: min(1, ess_fraction / base)^0.5 (VCPO, 2602.17616).

    Args:
        ess_fraction: of the *uncut* behavior weights, 0 to 1; an empty batch's 0 gives 0.
        base: the fraction at which the rate is left alone, > 0.
    """
    if base <= 0:
        raise ValueError(f"the ESS fraction's base is {base}; allowed: > 0.")
    return math.sqrt(min(1.0, ess_fraction / base))
