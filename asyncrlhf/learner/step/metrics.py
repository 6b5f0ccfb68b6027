"""The metrics of a learner step: each rank's statistics of its own tokens, added up over the ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from asyncrlhf.algorithms.diagnostics import (
    Found,
    by_lag,
    clip_diagnostics,
    explained_variance,
    harmful_second_moment,
    kl_diagnostics,
    lag_diagnostics,
    log_ratio_diagnostics,
    weight_diagnostics,
    without_empty_lags,
)
from asyncrlhf.algorithms.kl import kl_estimate
from asyncrlhf.algorithms.statistics import Mean, Spread, Total, together
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.step.plan import StepPlan, invalid_behavior
from asyncrlhf.learner.step.targets import correction_weight
from asyncrlhf.learner.step.without_gradient import flat_groups


def figures(parts: Iterable[Found]) -> dict[str, float]:
    """The metrics of the step, from the statistics of all ranks."""
    return without_empty_lags({name: float(found) for name, found in together(parts).items()})


@torch.inference_mode()
def step_statistics(plan: StepPlan, config: AlgorithmConfig) -> Found:
    """The statistics of this rank's tokens and rewards, once the host has what the passes found."""
    tokens = plan.host
    mask, ids, advantages = tokens.loss_mask, tokens.sequence_ids, tokens.advantages
    policy, behavior, proximal = tokens.policy_logprobs, tokens.behavior_logprobs, tokens.proximal_logprobs
    assert proximal is not None
    rewards = torch.from_numpy(plan.batch.rewards)  # as they came, without a penalty
    drift = proximal - behavior
    found: Found = {
        **weight_diagnostics(drift, mask, ids),
        **log_ratio_diagnostics(drift, mask, "behavior"),
        **log_ratio_diagnostics(policy - proximal, mask, "policy"),
        **kl_diagnostics(proximal, behavior, mask, "behavior"),
        **clip_diagnostics(tokens.clipped, advantages, mask),
        **lag_diagnostics(tokens.version_lag, mask),
        **by_lag(drift, rewards, tokens.version_lag, mask, ids),
        "harmful_second_moment": harmful_second_moment(policy - behavior, advantages, mask),
        "entropy": Mean.over(tokens.entropy, mask),
        "negative_advantage_fraction": Mean.over((advantages < 0).float(), mask),
        "advantage_mean": Mean.over(advantages, mask),
        "advantage_std": Spread.over(advantages, mask),
        "masked_token_fraction": Mean(float((~mask).sum()), float(len(mask))),
    }
    if config.correction != "none":
        count = float(mask.sum())
        cut = correction_weight(config, tokens)[1]
        found |= {name: Mean(float(mean) * count, count) for name, mean in cut.items()}
    if tokens.ref_logprobs is not None:
        found["ref_kl"] = Mean.over(kl_estimate(policy, tokens.ref_logprobs, mask, estimator="k3"), mask)
    if plan.batch.kept_counts is not None:
        found["truncation_mass"] = Mean.over(tokens.kept_mass, mask)
    if tokens.returns is not None and tokens.values is not None:
        found["explained_variance"] = explained_variance(tokens.values, tokens.returns, mask)
    found["ess_fraction_seq"] = found.pop("sequence_ess_fraction")
    return found | _of_sequences(plan)


def _of_sequences(plan: StepPlan) -> Found:
    batch, count = plan.batch, float(plan.batch.num_sequences)
    responses = batch.response_mask
    invalid = invalid_behavior(batch) & batch.loss_mask[responses]
    counts: Found = {
        "tokens": Total(float(len(batch.token_ids))),
        "sequences": Total(count),
        "response_tokens": Total(float(responses.sum())),
        "invalid_behavior_tokens": Total(float(invalid.sum())),
    }
    if not count:
        return counts
    rewards = torch.from_numpy(batch.rewards)
    spread = Spread.over(rewards, torch.ones(len(rewards), dtype=torch.bool))
    _, first = np.unique(batch.group_ids, return_index=True)
    if plan.host.critic_lag is not None:
        counts["critic_lag_mean"] = Mean(float(plan.host.critic_lag.sum()), count)
    return counts | {
        "reward_mean": spread.mean,
        "reward_std": spread,
        "response_length_mean": Mean(float(responses.sum()), count),
        "truncated_fraction": Mean(float(batch.truncated.sum()), count),
        "zero_spread_groups": Mean(float(flat_groups(batch)[first].sum()), float(len(first))),
    }
