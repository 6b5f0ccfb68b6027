"""What some algorithms must know of a whole optimizer update, with the present policy, before its backward pass.

Gates look at all tokens of the update on all ranks; the minimum-variance baseline and the heads look at whole groups,
which lie on one rank, but may be spread over its microbatches. So passes are put on record first and ``fill`` writes
the update's gate, advantages or head coefficients; microbatches then only read them.
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
from asyncrlhf.learner.plan import Microbatch, ResponseTokens
from asyncrlhf.learner.targets import correction_weight

# A rejected sequence has weight 0; its logarithm only has to be far below that of any other.
LOG_OF_ZERO = -80.0


def fills(config: AlgorithmConfig) -> bool:
    """Whether each update of the algorithm has targets of its own."""
    return config.head != "policy" or config.gate in ("m2", "sat") or config.advantage == "opob"


def needs_policy(config: AlgorithmConfig) -> bool:
    """Whether these depend on the present policy; who is the best of a group does not."""
    return fills(config) and not (config.head == "pair" and config.pair_loss == "best")


def sequence_ess_fraction(tokens: ResponseTokens, proximal: torch.Tensor, peers: Peers) -> float:
    """ESS of the step's sequences over their number, from the products of prox / mu, on all ranks and not cut."""
    mask, ids, count = tokens.loss_mask, tokens.sequence_ids, len(tokens.rewards)
    products = segment_sum(masked_values(proximal - tokens.behavior_logprobs, mask).double(), ids, count)
    present = segment_sum(mask.long(), ids, count) > 0
    found = {"fraction": EffectiveSize.over(products, present, share=True)}
    return float(together(all_gather(found, peers))["fraction"])


@torch.no_grad()
def fill(config: AlgorithmConfig, tokens: ResponseTokens, update: Sequence[Microbatch], peers: Peers) -> None:
    """Write the targets of ``update``, from what is on record of the present policy.

    Called by all ranks together, also by one whose share of the update is empty.
    """
    part = tokens.part(update)
    if part.gate is not None:
        part.gate.copy_(_gate(config, part, peers))
    if not update:
        return
    if config.advantage == "opob":
        part.advantages.copy_(broadcast(_opob(config, part), part.sequence_ids))
    if part.head_losses is not None:
        coefficients, losses = _head(config, part)
        part.advantages.copy_(broadcast(coefficients, part.sequence_ids))
        part.head_losses.copy_(losses)


def _gate(config: AlgorithmConfig, part: ResponseTokens, peers: Peers) -> torch.Tensor:
    """This rank's part of the gate over the update's tokens of all ranks: [m] bool."""
    mask = part.loss_mask
    log_ratio = masked_values(part.policy_logprobs - part.behavior_logprobs, mask)
    mine = tuple(x.cpu() for x in (log_ratio, part.advantages, mask))
    shares = all_gather(mine, peers)
    ratios, gains, masks = (torch.cat(pieces) for pieces in zip(*shares, strict=True))
    if config.gate == "m2":
        keep = m2_gate(ratios, gains, masks, threshold=config.m2_threshold)
    else:
        bounds = {"eps_low": config.epsilon, "eps_high": config.epsilon_high}
        keep = sat_gate(ratios, gains, masks, quantile=config.sat_quantile, **bounds)
    return keep.split([len(share[0]) for share in shares])[peers.rank].to(mask.device)


def _opob(config: AlgorithmConfig, part: ResponseTokens) -> torch.Tensor:
    """[n]. The weights are those of the loss, cut as there: the baseline is best for the estimator that is used."""
    mask, ids, count = part.loss_mask, part.sequence_ids, len(part.rewards)
    log_weights = torch.zeros_like(part.rewards)
    if config.correction != "none":
        per_token = correction_weight(config, part)[0].log().clamp(min=LOG_OF_ZERO)
        lengths = segment_sum(mask.long(), ids, count).clamp(min=1)
        log_weights = segment_sum(masked_values(per_token, mask), ids, count) / lengths
    norms = score_norms(part.policy_logprobs, part.collision, mask, ids, count)
    return opob(part.rewards, part.group_ids, log_weights=log_weights, score_norms=norms)


def _head(config: AlgorithmConfig, part: ResponseTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """(coefficients [n], losses [n])."""
    anchor = {"ref": part.ref_logprobs, "mu": part.behavior_logprobs}.get(config.anchor)
    log_ratio = torch.zeros_like(part.policy_logprobs) if anchor is None else part.policy_logprobs - anchor
    sums = segment_sum(masked_values(log_ratio, part.loss_mask), part.sequence_ids, len(part.rewards))
    given = (sums, part.rewards, part.group_ids)
    if config.head == "pair":
        return pair(*given, beta=config.beta, kind=config.pair_loss)
    return regress(*given, beta=config.beta, target=config.regress_target, vstar_beta=config.vstar_beta)
