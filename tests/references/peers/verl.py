"""verl's core algorithms on padded arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import FSDPActorConfig

Array = NDArray[np.float64]


def _tensors(*arrays: Array) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in arrays)


def gradient(
    name: str,
    theta: Array,
    old: Array,
    mask: Array,
    advantages: Array,
    weights: Array | None = None,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: int | None = None,
    **settings: Any,
) -> Array:
    """d loss / d theta [N, L] of the policy loss that verl registers as ``name``; ``advantages`` [N, L]."""
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        global_batch_info={} if loss_scale_factor is None else {"loss_scale_factor": loss_scale_factor},
        **settings,
    )
    leaf = torch.from_numpy(theta).requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        *_tensors(old), leaf, *_tensors(advantages, mask), loss_agg_mode, config,
        None if weights is None else torch.from_numpy(weights),
    )  # fmt: skip
    (found,) = torch.autograd.grad(loss, leaf)
    return found.numpy()


def value_gradient(values: Array, old_values: Array, returns: Array, mask: Array, clip: float, how: str) -> Array:
    leaf = torch.from_numpy(values).requires_grad_()
    loss, _ = core_algos.compute_value_loss(leaf, *_tensors(returns, old_values, mask), clip, loss_agg_mode=how)
    (found,) = torch.autograd.grad(loss, leaf)
    return found.numpy()


def kl(theta: Array, ref: Array, estimator: str) -> tuple[Array, Array]:
    """The estimates [N, L] and their gradient in theta."""
    leaf = torch.from_numpy(theta).requires_grad_()
    estimates = core_algos.kl_penalty(leaf, torch.from_numpy(ref), estimator)
    (found,) = torch.autograd.grad(estimates.sum(), leaf)
    return estimates.detach().numpy(), found.numpy()


def correction(log_ratio: Array, mask: Array, level: str, threshold: str) -> Array:
    weights, _ = compute_rollout_correction_weights(*_tensors(log_ratio, mask), level, threshold)
    return weights.numpy()


def gae(rewards: Array, values: Array, mask: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """(whitened advantages, returns) [N, L]; it whitens inside."""
    advantages, returns = core_algos.compute_gae_advantage_return(*_tensors(rewards, values, mask), gamma, lam)
    return advantages.numpy(), returns.numpy()


def reinforce_plus_plus(rewards: Array, mask: Array, gamma: float) -> Array:
    advantages, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        *_tensors(rewards, mask), config=AlgoConfig(gamma=gamma)
    )
    return advantages.numpy()


def outcome_advantages(name: str, rewards: Array, groups: NDArray[np.int64], **settings: Any) -> Array:
    """[N] of verl's estimator ``name`` from one reward a sequence."""
    scores = torch.from_numpy(rewards.copy())[:, None]
    found, _ = core_algos.get_adv_estimator_fn(name)(scores, torch.ones_like(scores), index=groups, **settings)
    return found[:, 0].numpy()


def optimal_baseline_advantages(
    rewards: Array, weights: Array, logprobs: Array, collision: Array, groups: NDArray[np.int64]
) -> Array:
    """[N, L] advantages under verl's least-variance baseline a token; ``weights`` and the log-probs are [N, L]."""
    scores = torch.zeros(logprobs.shape)
    scores[:, -1] = torch.from_numpy(rewards)
    found, _ = core_algos.compute_optimal_token_baseline_advantage(
        scores,
        torch.ones_like(scores),
        groups,
        *_tensors(logprobs, collision),
        rollout_is_weights=torch.from_numpy(weights),
    )
    return found.numpy()
