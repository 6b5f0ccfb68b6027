"""The metrics of a learner step, from the whole step's tokens of all ranks at once."""

from __future__ import annotations

import numpy as np
import torch

from asyncrlhf.algorithms.diagnostics import (
    by_lag,
    clip_diagnostics,
    explained_variance,
    harmful_second_moment,
    kl_diagnostics,
    lag_diagnostics,
    log_ratio_diagnostics,
    weight_diagnostics,
)
from asyncrlhf.algorithms.kl import kl_estimate
from asyncrlhf.algorithms.masked import masked_mean, moments
from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.plan import StepPlan, invalid_behavior
from asyncrlhf.learner.targets import StepRecord, Targets, correction_weight, proximal_of

Arrays = dict[str, np.ndarray]


def export(plan: StepPlan, targets: Targets, record: StepRecord) -> Arrays:
    """This rank's arrays as NumPy, to be gathered over ranks."""
    tokens = plan.tokens
    tensors = {
        "sequence_ids": tokens.sequence_ids,
        "loss_mask": tokens.loss_mask,
        "behavior": tokens.behavior,
        "version_lag": tokens.version_lag,
        "advantages": targets.advantages,
        "policy": record.policy,
        "proximal": record.proximal,
        "entropy": record.entropy,
        "clipped": record.clipped,
    }
    kept = None if plan.batch.kept_counts is None else record.kept_mass
    optionals = {"ref": targets.ref, "ema": targets.ema, "critic_lag": tokens.critic_lag, "kept_mass": kept}
    tensors |= {name: optional for name, optional in optionals.items() if optional is not None}
    if targets.returns is not None and targets.old_values is not None:
        tensors |= {"returns": targets.returns, "values": targets.old_values}
    arrays: Arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    batch = plan.batch
    lengths = np.diff(np.concatenate([[0], np.cumsum(batch.response_mask)])[batch.cu_seqlens])
    arrays["invalid_behavior"] = invalid_behavior(batch) & batch.loss_mask[batch.response_mask]
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


@torch.inference_mode()
def step_metrics(arrays: Arrays, config: AlgorithmConfig) -> dict[str, float]:
    """Everything that the step's tokens and rewards say, as floats."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    mask, ids = tensors["loss_mask"], tensors["sequence_ids"]
    drift = tensors["proximal"] - tensors["behavior"]
    count, first, second = moments(tensors["advantages"], mask).tolist()
    mean = first / max(count, 1)
    found: dict[str, torch.Tensor] = {
        **weight_diagnostics(drift, mask, ids),
        **log_ratio_diagnostics(drift, mask, "behavior"),
        **log_ratio_diagnostics(tensors["policy"] - tensors["proximal"], mask, "policy"),
        **kl_diagnostics(tensors["proximal"], tensors["behavior"], mask, "behavior"),
        **clip_diagnostics(tensors["clipped"], tensors["advantages"], mask),
        **lag_diagnostics(tensors["version_lag"], mask),
        **by_lag(drift, tensors["rewards"], tensors["version_lag"], mask, ids),
        "harmful_second_moment": harmful_second_moment(
            tensors["policy"] - tensors["behavior"], tensors["advantages"], mask
        ),
        "entropy": masked_mean(tensors["entropy"], mask),
        "negative_advantage_fraction": masked_mean((tensors["advantages"] < 0).float(), mask),
    }
    if config.correction != "none":
        between = proximal_of(
            config,
            tensors["policy"],
            tensors["behavior"],
            tensors["version_lag"],
            tensors["proximal"],
            tensors.get("ema"),
        )
        found |= correction_weight(config, between, tensors["behavior"], mask, ids)[1]
    if "ref" in tensors:
        found["ref_kl"] = masked_mean(kl_estimate(tensors["policy"], tensors["ref"], mask, estimator="k3"), mask)
    if "kept_mass" in tensors:
        found["truncation_mass"] = masked_mean(tensors["kept_mass"], mask)
    if "returns" in tensors:
        found["explained_variance"] = explained_variance(tensors["values"], tensors["returns"], mask)
    metrics = {name: float(value) for name, value in found.items()} | {
        "advantage_mean": mean,
        "advantage_std": max(0.0, second / max(count, 1) - mean**2) ** 0.5,
        "masked_token_fraction": 1 - count / max(len(mask), 1),
        "invalid_behavior_tokens": float(arrays["invalid_behavior"].sum()),
    }
    metrics["ess_fraction_seq"] = metrics.pop("sequence_ess_fraction")
    return metrics | _sequence_metrics(arrays)


def _sequence_metrics(arrays: Arrays) -> dict[str, float]:
    rewards, lengths = arrays["rewards"], arrays["lengths"]
    tokens = float(arrays["packed_tokens"].sum())
    counts = {"tokens": tokens, "sequences": float(len(rewards)), "response_tokens": float(lengths.sum())}
    if len(rewards) == 0:
        return counts
    if "critic_lag" in arrays:
        counts["critic_lag_mean"] = float(arrays["critic_lag"].mean())
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
