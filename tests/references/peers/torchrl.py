"""torchrl's functional returns on one long row of trajectories, end to end."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.objectives.value.functional import generalized_advantage_estimate, vtrace_advantage_estimate

Array = NDArray[np.float64]


def _row(array: NDArray[np.generic]) -> torch.Tensor:
    """[M] to torchrl's [batch, time, feature]."""
    return torch.from_numpy(array)[None, :, None]


def gae(
    rewards: Array, values: Array, next_values: Array, done: NDArray[np.bool_], gamma: float, lam: float
) -> tuple[Array, Array]:
    """(advantages, value targets) [M]."""
    found = generalized_advantage_estimate(gamma, lam, *map(_row, (values, next_values, rewards, done)))
    return found[0][0, :, 0].numpy(), found[1][0, :, 0].numpy()


def vtrace(
    log_pi: Array,
    log_mu: Array,
    rewards: Array,
    values: Array,
    next_values: Array,
    done: NDArray[np.bool_],
    gamma: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Array, Array]:
    """(advantages, value targets) [M]."""
    found = vtrace_advantage_estimate(
        gamma, *map(_row, (log_pi, log_mu, values, next_values, rewards, done)), rho_thresh=rho_bar, c_thresh=c_bar
    )
    return found[0][0, :, 0].numpy(), found[1][0, :, 0].numpy()
