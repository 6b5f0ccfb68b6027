"""What some algorithms must know of a whole optimizer update, with the present policy, before its backward pass.

Gates look at all tokens of the update on all ranks; the minimum-variance baseline and the heads look at whole groups,
which lie on one rank, but may be spread over its microbatches. So the facts are collected first and ``fill`` writes
the update's gate, advantages or head coefficients into the step's targets; microbatches then only read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrlhf.algorithms.advantages import broadcast, opob, score_norms
from asyncrlhf.algorithms.gates import m2_gate, sat_gate
from asyncrlhf.algorithms.heads import pair, regress
from asyncrlhf.algorithms.masked import masked_values, segment_sum
from asyncrlhf.algorithms.statistics import EffectiveSize, together
from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.distributed import Peers, all_gather
from asyncrlhf.learner.plan import Microbatch, ResponseTokens, StepPlan, span_of
from asyncrlhf.learner.targets import Targets, correction_weight, proximal_of

# A rejected sequence has weight 0; its logarithm only has to be far below that of any other.
LOG_OF_ZERO = -80.0


def fills(config: AlgorithmConfig) -> bool:
    """Whether each update of the algorithm has targets of its own."""
    return config.head != "policy" or config.gate in ("m2", "sat") or config.advantage == "opob"


def needs_policy(config: AlgorithmConfig) -> bool:
    """Whether these depend on the present policy; who is the best of a group does not."""
    return fills(config) and not (config.head == "pair" and config.pair_loss == "best")


def sequence_ess_fraction(plan: StepPlan, proximal: torch.Tensor, peers: Peers) -> float:
    """ESS of the step's sequences over their number, from the products of prox / mu, on all ranks and not cut."""
    tokens = plan.tokens
    mask, ids, count = tokens.loss_mask, tokens.sequence_ids, len(tokens.rewards)
    products = segment_sum(masked_values(proximal - tokens.behavior, mask).double(), ids, count)
    present = segment_sum(mask.long(), ids, count) > 0
    found = {"fraction": EffectiveSize.over(products, present, share=True)}
    return float(together(all_gather(found, peers))["fraction"])


def new_targets(config: AlgorithmConfig, targets: Targets) -> None:
    """Room for what ``fill`` writes."""
    if config.gate in ("m2", "sat"):
        targets.gate = torch.ones_like(targets.advantages, dtype=torch.bool)
    if config.head != "policy":
        targets.head_losses = torch.zeros_like(targets.rewards)


def fill(
    config: AlgorithmConfig,
    plan: StepPlan,
    update: Sequence[Microbatch],
    targets: Targets,
    policy: torch.Tensor,
    collision: torch.Tensor,
    peers: Peers,
) -> None:
    """Write the targets of ``update``.

    ``policy`` and ``collision`` [M] hold the present policy's log-probs, and sum_v pi_v^2 (for opob), of the update's
    response tokens. Called by all ranks together, also by one whose share of the update is empty.
    """
    span, sequences = span_of(update)
    policy = policy[span]
    part = _part(plan.tokens, span, sequences)
    if config.gate in ("m2", "sat"):
        assert targets.gate is not None
        targets.gate[span] = _gate(config, policy - part.behavior, targets.advantages[span], part.loss_mask, peers)
    if not update:
        return
    if config.advantage == "opob":
        proximal = None if targets.proximal is None else targets.proximal[span]
        ema = None if targets.ema is None else targets.ema[span]
        between = proximal_of(config, policy, part.behavior, part.version_lag, proximal, ema)
        advantages = _opob(config, part, targets.rewards[sequences], policy, between, collision[span])
        targets.advantages[span] = broadcast(advantages, part.sequence_ids)
    if config.head != "policy":
        assert targets.head_losses is not None
        anchor = {"ref": targets.ref, "mu": plan.tokens.behavior}.get(config.anchor)
        from_anchor = torch.zeros_like(policy) if anchor is None else policy - anchor[span]
        coefficients, losses = _head(config, part, targets.rewards[sequences], from_anchor)
        targets.advantages[span] = broadcast(coefficients.to(policy.dtype), part.sequence_ids)
        targets.head_losses[sequences] = losses.to(policy.dtype)


def _part(tokens: ResponseTokens, span: slice, sequences: slice) -> ResponseTokens:
    return ResponseTokens(
        sequence_ids=tokens.sequence_ids[span] - sequences.start,
        loss_mask=tokens.loss_mask[span],
        behavior=tokens.behavior[span],
        version_lag=tokens.version_lag[span],
        rewards=tokens.rewards[sequences],
        weights=tokens.weights[sequences],
        group_ids=tokens.group_ids[sequences],
        truncated=tokens.truncated[sequences],
    )


def _gate(
    config: AlgorithmConfig, log_ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, peers: Peers
) -> torch.Tensor:
    """This rank's part of the gate over the update's tokens of all ranks: [m] bool."""
    mine = tuple(x.cpu() for x in (masked_values(log_ratio, mask), advantages, mask))
    shares = all_gather(mine, peers)
    ratios, gains, masks = (torch.cat(pieces) for pieces in zip(*shares, strict=True))
    if config.gate == "m2":
        keep = m2_gate(ratios, gains, masks, threshold=config.m2_threshold)
    else:
        keep = sat_gate(
            ratios,
            gains,
            masks,
            quantile=config.sat_quantile,
            eps_low=config.epsilon,
            eps_high=config.epsilon_high,
        )
    return keep.split([len(share[0]) for share in shares])[peers.rank].to(mask.device)


def _opob(
    config: AlgorithmConfig,
    part: ResponseTokens,
    rewards: torch.Tensor,
    policy: torch.Tensor,
    proximal: torch.Tensor,
    collision: torch.Tensor,
) -> torch.Tensor:
    """[n]. The weights are those of the loss, cut as there: the baseline is best for the estimator that is used."""
    mask, ids = part.loss_mask, part.sequence_ids
    log_weights = torch.zeros_like(rewards)
    if config.correction != "none":
        weight = correction_weight(config, proximal, part.behavior, mask, ids)[0]
        per_token = weight.log().clamp(min=LOG_OF_ZERO)
        count = segment_sum(mask.long(), ids, len(rewards)).clamp(min=1)
        log_weights = segment_sum(masked_values(per_token, mask), ids, len(rewards)) / count
    norms = score_norms(policy, collision, mask, ids, len(rewards))
    return opob(rewards, part.group_ids, log_weights=log_weights, score_norms=norms)


def _head(
    config: AlgorithmConfig, part: ResponseTokens, rewards: torch.Tensor, log_ratio: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(coefficients [n], losses [n])."""
    sums = segment_sum(masked_values(log_ratio, part.loss_mask), part.sequence_ids, len(rewards))
    if config.head == "pair":
        return pair(sums, rewards, part.group_ids, beta=config.beta, kind=config.pair_loss)
    return regress(
        sums,
        rewards,
        part.group_ids,
        beta=config.beta,
        target=config.regress_target,
        vstar_beta=config.vstar_beta,
    )
