"""The metrics of a learner step, from the whole step's tokens of all ranks at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncrlhf.algorithms.diagnostics import (
    clip_diagnostics,
    explained_variance,
    kl_diagnostics,
    log_ratio_diagnostics,
    weight_diagnostics,
)
from asyncrlhf.algorithms.kl import kl_estimate
from asyncrlhf.algorithms.masked import masked_mean, masked_values
from asyncrlhf.learner.config import AlgorithmConfig
from asyncrlhf.learner.step import StepPlan, Targets, correction_weight


@dataclass
class StepRecord:
    """Detached values of the M response tokens of a rank, filled in by the forward passes of a step."""

    policy: torch.Tensor  # [M] of the last pass
    proximal: torch.Tensor  # [M] of the first pass, before any update
    entropy: torch.Tensor  # [M] of the last pass
    values: torch.Tensor  # [M] of the last pass; zero without a critic
    clipped: torch.Tensor  # [M] share of the passes in which the clip rule acted

    @classmethod
    def empty(cls, tokens: int, device: torch.device) -> StepRecord:
        return cls(*(torch.zeros(tokens, device=device) for _ in range(5)))


Arrays = dict[str, np.ndarray]

# Advantage plus value gives equal returns back only up to float32 rounding, which no critic can explain.
RETURN_NOISE = 1e-5


def export(plan: StepPlan, targets: Targets, record: StepRecord) -> Arrays:
    """This rank's arrays as NumPy, to be gathered over ranks."""
    tokens = plan.tokens
    tensors = {
        "sequence_ids": tokens.sequence_ids,
        "loss_mask": tokens.loss_mask,
        "behavior": tokens.behavior,
        "advantages": targets.advantages,
        "policy": record.policy,
        "proximal": record.proximal,
        "entropy": record.entropy,
        "clipped": record.clipped,
    }
    if targets.ref is not None:
        tensors["ref"] = targets.ref
    if targets.returns is not None and targets.old_values is not None:
        tensors |= {"returns": targets.returns, "values": targets.old_values}
    arrays: Arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    batch = plan.batch
    lengths = np.diff(np.concatenate([[0], np.cumsum(batch.response_mask)])[batch.cu_seqlens])
    sequences: Arrays = {"rewards": batch.rewards, "group_ids": batch.group_ids, "truncated": batch.truncated}
    return arrays | sequences | {"lengths": lengths, "packed_tokens": np.diff(batch.cu_seqlens)}


def merge(parts: list[Arrays]) -> Arrays:
    """All ranks' arrays as one rank's, with sequence ids that go on from rank to rank."""
    if len(parts) == 1:
        return parts[0]
    first = np.cumsum([0] + [len(part["rewards"]) for part in parts])
    shifted = [
        part | {"sequence_ids": part["sequence_ids"] + offset} for part, offset in zip(parts, first, strict=False)
    ]
    return {name: np.concatenate([part[name] for part in shifted]) for name in parts[0]}


def step_metrics(arrays: Arrays, config: AlgorithmConfig) -> dict[str, float]:
    """Everything that the step's tokens and rewards say, as floats."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    mask, ids = tensors["loss_mask"], tensors["sequence_ids"]
    drift = tensors["proximal"] - tensors["behavior"]
    found: dict[str, torch.Tensor] = {
        **weight_diagnostics(drift, mask, ids),
        **log_ratio_diagnostics(drift, mask, "behavior"),
        **log_ratio_diagnostics(tensors["policy"] - tensors["proximal"], mask, "policy"),
        **kl_diagnostics(tensors["proximal"], tensors["behavior"], mask, "behavior"),
        **clip_diagnostics(tensors["clipped"], tensors["advantages"], mask),
        "entropy": masked_mean(tensors["entropy"], mask),
        "advantage_mean": masked_mean(tensors["advantages"], mask),
        "advantage_std": _std(tensors["advantages"], mask),
        "masked_token_fraction": 1 - mask.float().sum() / max(len(mask), 1),
    }
    if config.correction != "none":
        found |= correction_weight(config, tensors["proximal"], tensors["behavior"], mask, ids)[1]
    if "ref" in tensors:
        found["ref_kl"] = masked_mean(kl_estimate(tensors["policy"], tensors["ref"], mask, estimator="k3"), mask)
    if "returns" in tensors:
        varies = _std(tensors["returns"], mask) > RETURN_NOISE
        found["explained_variance"] = explained_variance(tensors["values"], tensors["returns"], mask) * varies
    metrics = {name: float(value) for name, value in found.items()}
    metrics["ess_fraction_seq"] = metrics.pop("sequence_ess_fraction")
    return metrics | _sequence_metrics(arrays)


def _sequence_metrics(arrays: Arrays) -> dict[str, float]:
    rewards, lengths = arrays["rewards"], arrays["lengths"]
    tokens = float(arrays["packed_tokens"].sum())
    counts = {"tokens": tokens, "sequences": float(len(rewards)), "response_tokens": float(lengths.sum())}
    if len(rewards) == 0:
        return counts
    _, group_of = np.unique(arrays["group_ids"], return_inverse=True)
    low, high = np.full(group_of.max() + 1, np.inf), np.full(group_of.max() + 1, -np.inf)
    np.minimum.at(low, group_of, rewards)
    np.maximum.at(high, group_of, rewards)
    return counts | {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "response_length_mean": float(lengths.mean()),
        "truncated_fraction": float(arrays["truncated"].mean()),
        "zero_spread_groups": float((low == high).mean()),
    }


def _std(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return masked_mean((masked_values(x, mask) - masked_mean(x, mask)).square(), mask).sqrt()
