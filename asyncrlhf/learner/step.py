"""One learner step as pure pieces: its plan of minibatches, its advantages, and the loss of one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from asyncrlhf.algorithms.advantages import SEQUENCE_ADVANTAGES, broadcast, gae, terminal_rewards
from asyncrlhf.algorithms.aggregate import aggregate_loss, normaliser_count
from asyncrlhf.algorithms.coefficients import COEFFICIENTS, Coefficient
from asyncrlhf.algorithms.kl import kl_loss, kl_sequence_rewards, kl_token_rewards
from asyncrlhf.algorithms.losses import policy_loss
from asyncrlhf.algorithms.masked import moments, whiten
from asyncrlhf.algorithms.weights import behavior_weight
from asyncrlhf.data.packing import microbatch_indices, minibatch_indices, select, sequence_lengths
from asyncrlhf.learner.config import AlgorithmConfig
from asyncrlhf.learner.forward import PackedInputs
from asyncrlhf.types import IntArray, TrainBatch


@dataclass(frozen=True)
class ResponseTokens:
    """The M response tokens of this rank's batch, packed sequence by sequence; prompts are gone."""

    sequence_ids: torch.Tensor  # [M] 0 to N-1, sorted
    loss_mask: torch.Tensor  # [M] bool
    behavior: torch.Tensor  # [M] behavior log-probs
    rewards: torch.Tensor  # [N]
    weights: torch.Tensor  # [N]
    group_ids: torch.Tensor  # [N]


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass holds: a run of sequences, whose response tokens are ``span`` of the rank's M."""

    inputs: PackedInputs
    span: slice
    sequences: slice
    trains: bool  # False: every advantage is zero, so a forward pass for the metrics is all it needs


@dataclass(frozen=True)
class StepPlan:
    """This rank's batch, reordered so that every minibatch and microbatch is a run of sequences."""

    batch: TrainBatch
    tokens: ResponseTokens
    minibatches: tuple[tuple[Microbatch, ...], ...]  # one entry a minibatch, some may be empty

    @property
    def microbatches(self) -> list[Microbatch]:
        return [microbatch for minibatch in self.minibatches for microbatch in minibatch]


@dataclass(frozen=True)
class Targets:
    """What is fixed before the first update of a step."""

    advantages: torch.Tensor  # [M]
    returns: torch.Tensor | None  # [M] with a critic
    old_values: torch.Tensor | None  # [M] with a critic
    ref: torch.Tensor | None  # [M] reference log-probs, with a KL
    proximal: torch.Tensor | None  # [M] None: the policy of the pass itself, which has not moved yet


@dataclass(frozen=True)
class MicrobatchLoss:
    """``loss`` carries the gradient; the rest is [m] and detached."""

    loss: torch.Tensor
    clipped: torch.Tensor


def plan_step(batch: TrainBatch, config: AlgorithmConfig, token_budget: int, device: torch.device) -> StepPlan:
    """Order the sequences by minibatch, by whether they train, and so that siblings share a microbatch."""
    lengths = sequence_lengths(batch)
    idle = zero_gradient_sequences(batch, config)
    groups: list[tuple[int, bool, IntArray]] = []  # minibatch, trains, sequences
    for index, members in enumerate(minibatch_indices(batch, config.minibatches)):
        for trains in (True, False):
            part = members[idle[members] != trains]
            part = part[_siblings_together(batch.group_ids[part], lengths[part])]
            groups += [(index, trains, part[run]) for run in microbatch_indices(lengths[part], token_budget)]
    order = np.concatenate([part for _, _, part in groups]) if groups else np.zeros(0, dtype=np.int64)
    ordered = select(batch, order)
    minibatches: list[list[Microbatch]] = [[] for _ in range(config.minibatches)]
    first = 0
    ends = np.concatenate([[0], np.cumsum(ordered.response_mask)])[ordered.cu_seqlens]  # [N+1] response tokens so far
    for index, trains, part in groups:
        last = first + len(part)
        inputs = _inputs(ordered, first, last, device)
        span = slice(int(ends[first]), int(ends[last]))
        minibatches[index].append(Microbatch(inputs, span, slice(first, last), trains))
        first = last
    return StepPlan(ordered, _response_tokens(ordered, ends, device), tuple(tuple(part) for part in minibatches))


def zero_gradient_sequences(batch: TrainBatch, config: AlgorithmConfig) -> np.ndarray:
    """Sequences [N] whose loss has no gradient whatever the policy: groups without reward spread, and no other term."""
    others = config.kl != "none" or config.whiten or config.entropy_coef > 0
    if not config.group_relative or others or batch.num_sequences == 0:
        return np.zeros(batch.num_sequences, dtype=np.bool_)
    _, group_of, sizes = np.unique(batch.group_ids, return_inverse=True, return_counts=True)
    low = np.full(len(sizes), np.inf)
    high = np.full(len(sizes), -np.inf)
    np.minimum.at(low, group_of, batch.rewards)
    np.maximum.at(high, group_of, batch.rewards)
    return (low == high)[group_of]


def compute_advantages(
    tokens: ResponseTokens,
    config: AlgorithmConfig,
    ref: torch.Tensor | None,
    values: torch.Tensor | None,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(advantages [M], returns [M] or None). Whole groups must lie on this rank.

    A KL in the reward is that of the policy that sampled the tokens, so it needs no forward pass of its own: per token
    with a critic, summed onto the sequence's reward otherwise. Whitening takes its moments over all ranks.
    """
    returns = None
    ids, mask = tokens.sequence_ids, tokens.loss_mask
    penalty = config.beta if config.kl == "reward" else 0.0
    if values is not None:
        rewards = terminal_rewards(tokens.rewards, mask, ids)
        if penalty and ref is not None:
            rewards = kl_token_rewards(rewards, tokens.behavior, ref, mask, beta=penalty, estimator=config.kl_estimator)
        advantages, returns = gae(rewards, values, mask, ids, gamma=config.gamma, lam=config.lam)
    else:
        rewards = tokens.rewards
        if penalty and ref is not None:
            rewards = kl_sequence_rewards(
                rewards, tokens.behavior, ref, mask, ids, beta=penalty, estimator=config.kl_estimator
            )
        name = "raw" if config.advantage == "whiten" else config.advantage
        options = {"eps": config.advantage_eps} if name == "group_norm" else {}
        advantages = broadcast(SEQUENCE_ADVANTAGES[name](rewards, tokens.group_ids, **options), ids)
    if config.whiten or config.advantage == "whiten":
        advantages = whiten(advantages, mask, sum_over_ranks(moments(advantages, mask)))
    return advantages, returns


def normaliser_counts(plan: StepPlan, how: str, constant_length: float | None) -> torch.Tensor:
    """What this rank adds to the normaliser of each minibatch under aggregate ``how``: [minibatches] float64."""
    counts = torch.zeros(len(plan.minibatches), dtype=torch.float64, device=plan.tokens.loss_mask.device)
    for index, minibatch in enumerate(plan.minibatches):
        for microbatch in minibatch:
            mask = plan.tokens.loss_mask[microbatch.span]
            ids = plan.tokens.sequence_ids[microbatch.span]
            counts[index] += normaliser_count(how, mask, ids - ids[0], constant_length=constant_length)
    return counts


def coefficient_rule(config: AlgorithmConfig) -> Coefficient:
    """The clip rule that ``algorithm.coef`` and its bounds name."""
    bounds = {
        "one": (),
        "clip": (config.epsilon, config.epsilon_high, config.dual_clip),
        "cap": (config.cap_low, config.cap_high),
        "band": (config.cap_low, config.cap_high),
    }
    return COEFFICIENTS[config.coef](*bounds[config.coef])


def microbatch_loss(
    config: AlgorithmConfig,
    rule: Coefficient,
    plan: StepPlan,
    microbatch: Microbatch,
    targets: Targets,
    policy: torch.Tensor,
    entropy: torch.Tensor,
    normaliser: torch.Tensor,
) -> MicrobatchLoss:
    """The policy's part of one microbatch in the loss of its optimizer update, divided by the update's normaliser.

    ``policy`` and ``entropy`` [m] carry the gradient. The KL in the loss lives under the same ratio and weight as the
    policy loss; its gradient is that of KL(pi || ref) on every token that neither clips.
    """
    span, tokens = microbatch.span, plan.tokens
    mask, behavior = tokens.loss_mask[span], tokens.behavior[span]
    ids = tokens.sequence_ids[span] - microbatch.sequences.start
    weights = tokens.weights[microbatch.sequences]
    proximal = policy.detach() if targets.proximal is None else targets.proximal[span]
    anchor = {"self": None, "mu": behavior, "prox": proximal}[config.anchor]
    weight = None
    if config.correction != "none":
        weight = correction_weight(config, proximal, behavior, mask, ids)[0]
    result = policy_loss(
        policy,
        anchor,
        targets.advantages[span],
        mask,
        ids,
        coefficient=rule,
        normaliser=normaliser,
        level=config.level,
        aggregate=config.aggregate,
        weight=weight,
        sample_weights=weights,
    )
    loss = result.loss
    if config.kl == "loss" and targets.ref is not None:
        loss = loss + config.beta * kl_loss(
            policy,
            targets.ref[span],
            anchor,
            mask,
            ids,
            estimator=config.kl_estimator,
            normaliser=normaliser,
            importance_weighted=config.kl_importance_weighted,
            weight=weight,
            aggregate=config.aggregate,
            sample_weights=weights,
        )
    if config.entropy_coef > 0:
        bonus = aggregate_loss(entropy, mask, ids, how=config.aggregate, normaliser=normaliser, sample_weights=weights)
        loss = loss - config.entropy_coef * bonus
    return MicrobatchLoss(loss, result.clipped)


def correction_weight(
    config: AlgorithmConfig, proximal: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The behavior weight under the settings of ``algorithm.correction``."""
    return behavior_weight(
        proximal,
        behavior,
        mask,
        ids,
        level=config.correction_level,
        mode=config.correction,
        low=config.correction_low,
        high=config.correction_high,
    )


def _siblings_together(group_ids: IntArray, lengths: IntArray) -> IntArray:
    """An order: siblings side by side for their prompt, long groups first so that attention pads little."""
    names, group_of = np.unique(group_ids, return_inverse=True)
    longest = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(longest, group_of, lengths)
    return np.lexsort((-lengths, group_ids, -longest[group_of]))


def _inputs(batch: TrainBatch, first: int, last: int, device: torch.device) -> PackedInputs:
    start, stop = batch.cu_seqlens[first], batch.cu_seqlens[last]
    boundaries = batch.cu_seqlens[first : last + 1] - start
    return PackedInputs.build(batch.token_ids[start:stop], boundaries, batch.response_mask[start:stop], device)


def _response_tokens(batch: TrainBatch, ends: IntArray, device: torch.device) -> ResponseTokens:
    where = batch.response_mask

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return ResponseTokens(
        sequence_ids=tensor(np.repeat(np.arange(batch.num_sequences), np.diff(ends))),
        loss_mask=tensor(batch.loss_mask[where]),
        behavior=tensor(batch.behavior_logprobs[where]),
        rewards=tensor(batch.rewards),
        weights=tensor(batch.weights),
        group_ids=tensor(batch.group_ids),
    )
