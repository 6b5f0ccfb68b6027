"""The plan of one learner step: this rank's batch as tensors, cut into minibatches and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from asyncrlhf.data.branches import pass_lengths
from asyncrlhf.data.packing import microbatch_indices, minibatch_indices, select, sequence_lengths
from asyncrlhf.learner.model.forward import TokenFacts
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.step.without_gradient import zero_gradient_sequences
from asyncrlhf.models.copies import to_device, to_host
from asyncrlhf.types import IntArray, TrainBatch


@dataclass(frozen=True)
class Microbatch:
    """The content of one forward pass: a run of sequences, whose response tokens are ``span`` of the rank's M."""

    inputs: PackedInputs
    span: slice
    sequences: slice
    trains: bool  # False: nothing in it has a gradient, so a forward pass for the metrics is all it needs


ON_RECORD = ("policy_logprobs", "entropy", "collision", "kept_mass", "clipped")
# What a step's passes find on the device, and what is computed from it on the host.
FOUND = (*ON_RECORD, "proximal_logprobs", "ref_logprobs", "ema_logprobs", "values", "final_values")
TARGETS = ("rewards", "advantages", "returns", "gate", "head_losses")
PER_SEQUENCE = frozenset(("rewards", "weights", "group_ids", "truncated", "critic_lag", "final_values", "head_losses"))


@dataclass
class ResponseTokens:
    """A step's facts about the M response tokens and N sequences of this rank, packed without their prompts.

    A token whose behavior log-prob is NaN or infinite is excluded from the loss mask: normalisers do not count it, and
    a sequence's product or mean of ratios uses its other tokens. Its log-prob is 0 here.

    ``advantages``, ``gate`` and ``head_losses`` are fixed before the first update, unless the algorithm needs a whole
    update under the present policy: then ``targets.fill`` writes each update's part.
    """

    sequence_ids: torch.Tensor  # [M] 0 to N-1, sorted
    loss_mask: torch.Tensor  # [M] bool
    version_lag: torch.Tensor  # [M] int64: learner steps between the version that sampled the token and the present one
    rewards: torch.Tensor  # [N] less a KL penalty, where one is counted in the reward
    weights: torch.Tensor  # [N]
    group_ids: torch.Tensor  # [N]
    truncated: torch.Tensor  # [N] bool: truncated at the longest answer allowed
    behavior_logprobs: torch.Tensor  # [M]
    policy_logprobs: torch.Tensor  # [M] of the last pass; with its gradient if a loss is computed from it
    entropy: torch.Tensor  # [M] of the last pass, with the gradient likewise
    collision: torch.Tensor  # [M] of the last pass, where the policy gives it
    kept_mass: torch.Tensor  # [M] of the first pass, where sampling was truncated; 0 before it
    clipped: torch.Tensor  # [M] share of the passes in which the clip rule or a gate acted
    advantages: torch.Tensor  # [M]
    proximal_logprobs: torch.Tensor | None = None  # [M] None: the policy of the pass itself, which has not moved yet
    ref_logprobs: torch.Tensor | None = None  # [M]
    ema_logprobs: torch.Tensor | None = None  # [M] the target network's
    values: torch.Tensor | None = None  # [M] the critic's before the first update
    critic_lag: torch.Tensor | None = None  # [N] learner steps between the critic that served them and the present one
    final_values: torch.Tensor | None = None  # [N] of the state after a truncated answer; 0 after a complete one
    returns: torch.Tensor | None = None  # [M] the critic's targets
    gate: torch.Tensor | None = None  # [M] bool: the tokens that are kept
    head_losses: torch.Tensor | None = None  # [N]
    turns: torch.Tensor | None = None  # [M] number of the turn within its episode, under credit=turn
    turn_rewards: torch.Tensor | None = None  # [M] of each turn, on its last token

    def part(self, microbatches: Sequence[Microbatch]) -> ResponseTokens:
        """The tokens of neighbouring microbatches, or of none: views, whose sequences are counted from 0."""
        span = sequences = slice(0, 0)
        if microbatches:
            span = slice(microbatches[0].span.start, microbatches[-1].span.stop)
            sequences = slice(microbatches[0].sequences.start, microbatches[-1].sequences.stop)
        views: dict[str, Any] = {
            name: None if whole is None else whole[sequences if name in PER_SEQUENCE else span]
            for name, whole in vars(self).items()
        }
        return ResponseTokens(**views | {"sequence_ids": self.sequence_ids[span] - sequences.start})

    def on(self, device: torch.device) -> ResponseTokens:
        """The same facts on ``device``; itself on a CPU."""
        if device.type == "cpu":
            return self
        there = {name: to_device(value, device) for name, value in vars(self).items() if value is not None}
        return replace(self, **there)

    def keep(self, facts: TokenFacts) -> None:
        """Record a pass's facts about these tokens, without gradient."""
        self.policy_logprobs.copy_(facts.logprobs.detach())
        self.entropy.copy_(facts.entropies.detach())
        if len(facts.collision):
            self.collision.copy_(facts.collision)
        if len(facts.kept_mass):
            self.kept_mass.copy_(torch.where(self.kept_mass > 0, self.kept_mass, facts.kept_mass.to(self.kept_mass)))


@dataclass(frozen=True)
class StepPlan:
    """This rank's batch, reordered so that every minibatch and microbatch is a run of sequences.

    Targets and metrics are computed on the host: a GPU would stop for each of a hundred small numbers. ``host`` is
    ``tokens`` itself on a CPU. Beside a GPU it holds what came with the batch, the targets, and what was fetched of
    what the passes found (``FOUND``).
    """

    batch: TrainBatch
    tokens: ResponseTokens
    minibatches: tuple[tuple[Microbatch, ...], ...]  # one entry a minibatch, some may be empty
    host: ResponseTokens

    def fetch(self, *more: torch.Tensor) -> list[torch.Tensor]:
        """Bring what the passes found up to now to the host, with ``more``, which is returned: one wait for the
        device."""
        if self.host is self.tokens:
            return list(more)
        there = {name: value for name in FOUND if (value := getattr(self.tokens, name)) is not None}
        parts = to_host([*there.values(), *more])
        for name, value in zip(there, parts, strict=False):
            setattr(self.host, name, value)
        return parts[len(there) :]

    def send(self) -> None:
        """Copy the targets to the device."""
        for name in TARGETS if self.host is not self.tokens else ():
            value = getattr(self.host, name)
            setattr(self.tokens, name, None if value is None else to_device(value, self.tokens.loss_mask.device))

    @property
    def microbatches(self) -> list[Microbatch]:
        return [microbatch for minibatch in self.minibatches for microbatch in minibatch]


def plan_step(
    batch: TrainBatch, config: AlgorithmConfig, token_budget: int, device: torch.device, version: int = 0
) -> StepPlan:
    """Order the sequences by minibatch, by whether they train, and so that siblings share a microbatch.

    ``version``: the policy's present version, from which the tokens' lag is counted. Under ``truncated=mask`` the
        tokens of truncated answers are excluded from the loss and its normaliser; their rewards remain in their group's
        baseline, as in TRL's ``mask_truncated_completions``.
    """
    lengths = sequence_lengths(batch)
    if config.truncated == "mask":
        batch = replace(batch, loss_mask=batch.loss_mask & ~np.repeat(batch.truncated, lengths))
    idle, passed = zero_gradient_sequences(batch, config), pass_lengths(batch)
    groups: list[tuple[int, bool, IntArray]] = []  # minibatch, trains, sequences
    for index, members in enumerate(minibatch_indices(batch, config.minibatches)):
        for trains in (True, False):
            part = members[idle[members] != trains]
            part = part[_siblings_together(batch.group_ids[part], lengths[part])]
            groups += [(index, trains, part[run]) for run in microbatch_indices(passed[part], token_budget)]
    order = np.concatenate([part for _, _, part in groups]) if groups else np.zeros(0, dtype=np.int64)
    ordered = select(batch, order)
    minibatches: list[list[Microbatch]] = [[] for _ in range(config.minibatches)]
    first = 0
    ends = np.concatenate([[0], np.cumsum(ordered.response_mask)])[ordered.cu_seqlens]  # [N+1] response tokens so far
    for index, trains, part in groups:
        last = first + len(part)
        inputs = PackedInputs.of_batch(ordered, first, last, device)
        span = slice(int(ends[first]), int(ends[last]))
        minibatches[index].append(Microbatch(inputs, span, slice(first, last), trains))
        first = last
    host = _response_tokens(ordered, ends, version)
    return StepPlan(ordered, host.on(device), tuple(tuple(part) for part in minibatches), host)


def invalid_behavior(batch: TrainBatch) -> np.ndarray:
    """Response tokens [M] whose behavior log-prob is NaN or infinite."""
    return ~np.isfinite(batch.behavior_logprobs[batch.response_mask])


def _siblings_together(group_ids: IntArray, lengths: IntArray) -> IntArray:
    """An order: siblings side by side for their prompt, long groups and long siblings first."""
    names, group_of = np.unique(group_ids, return_inverse=True)
    longest = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(longest, group_of, lengths)
    return np.lexsort((-lengths, group_ids, -longest[group_of]))


def _response_tokens(batch: TrainBatch, ends: IntArray, version: int) -> ResponseTokens:
    where = batch.response_mask

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    broken = invalid_behavior(batch)
    return ResponseTokens(
        sequence_ids=tensor(np.repeat(np.arange(batch.num_sequences), np.diff(ends))),
        loss_mask=tensor(batch.loss_mask[where] & ~broken),
        version_lag=tensor(version - batch.policy_versions[where]),
        rewards=tensor(batch.rewards),
        weights=tensor(batch.weights),
        group_ids=tensor(batch.group_ids),
        truncated=tensor(batch.truncated),
        behavior_logprobs=tensor(np.where(broken, np.float32(0), batch.behavior_logprobs[where])),
        **{name: torch.zeros(len(broken)) for name in ("advantages", *ON_RECORD)},
        ref_logprobs=None if batch.ref_logprobs is None else tensor(batch.ref_logprobs[where]),
        values=None if batch.values is None else tensor(batch.values[where]),
        critic_lag=None if batch.critic_versions is None else tensor(version - batch.critic_versions),
        turns=None if batch.turns is None else tensor(batch.turns[where]),
        turn_rewards=None if batch.turn_rewards is None else tensor(batch.turn_rewards[where]),
    )
