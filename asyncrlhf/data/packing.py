"""Packing: rollouts into a flat batch, and that batch into shards, minibatches and microbatches of whole sequences."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrlhf.data.branches import follows_of
from asyncrlhf.turns import Turn
from asyncrlhf.types import OBSERVED, FloatArray, IdArray, IntArray, Prompt, Rollout, TrainBatch, TrainSample

# Arrays of a TrainBatch by the unit of their entries; the kept sets of truncated sampling have another layout.
_TOKENS = (
    "token_ids", "loss_mask", "response_mask", "behavior_logprobs", "policy_versions", "ref_logprobs", "values",
    "routed_experts", "turns", "turn_rewards", "follows",
)  # fmt: skip
_ROWS = ("rewards", "weights", "group_ids", "rollout_ids", "truncated", "critic_versions")


def pack(samples: Sequence[TrainSample], *, turns: bool = False) -> TrainBatch:
    """Concatenate N samples, prompt then response, in the order given.

    Sampled tokens older than ``masked_before_version`` leave ``loss_mask`` and stay in ``response_mask``; an episode's
    observed tokens are in neither. ``turns``: with the turns of episodes and their rewards; the last turn's is what the
    sample's reward exceeds those of the turns before it by, so that it is the whole where no turn has one.

    Raises ValueError for an empty list, for an empty prompt or response or one without a sampled token, which leave no
    token to condition on or to train, and if only some rollouts have reference log-probs, values, or experts.
    """
    if not samples:
        raise ValueError("cannot pack a batch of no samples")
    for sample in samples:
        rollout = sample.rollout
        if len(rollout.prompt.token_ids) == 0 or len(rollout.response_ids) == 0:
            raise ValueError(f"rollout {rollout.rollout_id} has an empty prompt or response and cannot be packed")
        if not rollout.sampled.any():
            raise ValueError(f"rollout {rollout.rollout_id} has no sampled token and cannot be packed")
    rollouts = [sample.rollout for sample in samples]
    prompts = [r.prompt.token_ids for r in rollouts]
    responses = [r.response_ids for r in rollouts]
    spans = np.array([[len(p), len(r)] for p, r in zip(prompts, responses, strict=True)], dtype=np.int64)
    answered = np.repeat(np.tile([False, True], len(samples)), spans.reshape(-1))  # whole responses
    versions = np.full(len(answered), OBSERVED, dtype=np.int64)
    versions[answered] = np.concatenate([r.policy_versions for r in rollouts])
    logprobs = np.zeros(len(answered), dtype=np.float32)
    logprobs[answered] = np.concatenate([r.behavior_logprobs for r in rollouts])
    response_mask = versions != OBSERVED
    versions_of_critic = [r.critic_version for r in rollouts if r.critic_version is not None]
    kept_ids, kept_counts = _kept(rollouts, answered, response_mask)
    inputs = np.ones(len(answered), dtype=np.bool_)
    inputs[np.cumsum(spans.sum(axis=1)) - 1] = False  # the last token of a sequence is no model's input
    numbers, turn_rewards = _turns(samples, answered) if turns else (None, None)
    oldest = np.repeat([sample.masked_before_version for sample in samples], spans.sum(axis=1))
    return TrainBatch(
        token_ids=np.concatenate([part for pair in zip(prompts, responses, strict=True) for part in pair]).astype(
            np.int64
        ),
        cu_seqlens=_boundaries(spans.sum(axis=1)),
        loss_mask=response_mask & (versions >= oldest),
        response_mask=response_mask,
        behavior_logprobs=logprobs,
        policy_versions=versions,
        rewards=np.array([sample.reward for sample in samples], dtype=np.float32),
        weights=np.array([sample.weight for sample in samples], dtype=np.float32),
        group_ids=np.array([r.group_id for r in rollouts], dtype=np.int64),
        rollout_ids=np.array([r.rollout_id for r in rollouts], dtype=np.int64),
        truncated=np.array([r.finish_reason == "length" for r in rollouts], dtype=np.bool_),
        ref_logprobs=_laid_out([r.ref_logprobs for r in rollouts], answered, "the reference's log-probs"),
        values=_laid_out([r.values for r in rollouts], answered, "the critic's values"),
        critic_versions=np.array(versions_of_critic, dtype=np.int64) if versions_of_critic else None,
        kept_ids=kept_ids,
        kept_counts=kept_counts,
        routed_experts=_laid_out([r.routed_experts for r in rollouts], inputs, "their experts"),
        turns=numbers,
        turn_rewards=turn_rewards,
        follows=np.concatenate([follows_of(r) for r in rollouts]) if any(r.forks for r in rollouts) else None,
    )


def _turns(samples: Sequence[TrainSample], answered: np.ndarray) -> tuple[IntArray, FloatArray]:
    """The number of each token's turn, -1 outside, and each turn's reward on its last token: [T], [T]. A plain answer
    is one turn."""
    numbers, rewards = [], []
    for sample in samples:
        length = len(sample.rollout.response_ids)
        number, earned = np.full(length, OBSERVED, np.int64), np.zeros(length)
        turns = sample.rollout.turns or (Turn(0, length),)
        for index, turn in enumerate(turns):
            number[turn.start : turn.end] = index
        number[~sample.rollout.sampled] = OBSERVED
        places = np.flatnonzero(number != OBSERVED)
        last = places[np.searchsorted(number[places], np.arange(len(turns)), side="right") - 1]
        before = [turn.reward or 0.0 for turn in turns[:-1]]
        earned[last] = [*before, sample.reward - sum(before)]
        numbers.append(number)
        rewards.append(earned)
    laid, given = np.full(len(answered), OBSERVED, np.int64), np.zeros(len(answered), np.float32)
    laid[answered], given[answered] = np.concatenate(numbers), np.concatenate(rewards)
    return laid, given


def _kept(
    rollouts: Sequence[Rollout], answered: np.ndarray, response_mask: np.ndarray
) -> tuple[IdArray | None, IdArray | None]:
    """The sets that truncated sampling kept, their counts laid out over all tokens [T]; None if there are none. Raises
    ValueError for a set at an observed token: the sets of the tokens after it would move."""
    ids = [r.kept_ids for r in rollouts if r.kept_ids is not None]
    if not ids:
        return None, None
    counts = np.zeros(len(answered), dtype=np.int32)
    given = [np.zeros(len(r.response_ids), np.int32) if r.kept_counts is None else r.kept_counts for r in rollouts]
    counts[answered] = np.concatenate(given)
    if counts[~response_mask].any():
        raise ValueError("a rollout has a kept set at an observed token, which was not sampled from one")
    return np.concatenate(ids), counts


def _laid_out(given: Sequence[np.ndarray | None], where: np.ndarray, what: str) -> np.ndarray | None:
    """The rollouts' arrays, an entry for each token of ``where`` [T], laid out over all tokens [T, ...], 0 elsewhere;
    None if no rollout has one."""
    there = [array for array in given if array is not None]
    if not there:
        return None
    if len(there) < len(given):
        raise ValueError(f"{len(given) - len(there)} of {len(given)} rollouts lack {what}")
    joined = np.concatenate(there)
    laid = np.zeros((len(where), *joined.shape[1:]), joined.dtype)
    laid[where] = joined
    return laid


def select(batch: TrainBatch, indices: Sequence[int] | IntArray) -> TrainBatch:
    """The sequences at ``indices``, in that order; without an index an empty batch."""
    chosen = np.asarray(indices, dtype=np.int64)
    lengths = sequence_lengths(batch)[chosen]
    cu_seqlens = _boundaries(lengths)
    tokens = np.repeat(batch.cu_seqlens[chosen] - cu_seqlens[:-1], lengths) + np.arange(cu_seqlens[-1])
    kept_ids, kept_counts = _select_kept(batch, tokens)

    def cut(names: Sequence[str], where: IntArray) -> dict[str, Any]:
        arrays = {name: getattr(batch, name) for name in names}
        return {name: None if array is None else array[where] for name, array in arrays.items()}

    return TrainBatch(
        cu_seqlens=cu_seqlens, kept_ids=kept_ids, kept_counts=kept_counts, **cut(_TOKENS, tokens), **cut(_ROWS, chosen)
    )


def _select_kept(batch: TrainBatch, tokens: IntArray) -> tuple[IdArray | None, IdArray | None]:
    if batch.kept_ids is None or batch.kept_counts is None:
        return None, None
    starts, counts = _boundaries(batch.kept_counts), batch.kept_counts[tokens]
    ends = _boundaries(counts)
    where = np.repeat(starts[tokens] - ends[:-1], counts) + np.arange(ends[-1])
    return batch.kept_ids[where], counts


def microbatch_indices(lengths: IntArray, token_budget: int) -> list[IntArray]:
    """Indices into ``lengths`` [N] of each microbatch, in order. Greedy from the left, so neighbours stay together."""
    parts: list[list[int]] = []
    used = 0
    for index, length in enumerate(lengths.tolist()):
        if not parts or used + length > token_budget:
            parts.append([])
            used = 0
        parts[-1].append(index)
        used += length
    return [np.array(part, dtype=np.int64) for part in parts]


def empty_batch(*, reference: bool, values: bool, turns: bool = False) -> TrainBatch:
    """The share of a rank without any group.

    ``reference``, ``values``, ``turns``: whether the other ranks' shares have the reference's log-probs, values, turns.
    """
    ids, floats = np.zeros(1, np.int64), np.zeros(1, np.float32)
    rollout = Rollout(
        0, 0, Prompt("", "", ids), ids, floats, ids, "stop", "", "",
        ref_logprobs=floats if reference else None,
        values=floats if values else None,
        critic_version=0 if values else None,
    )  # fmt: skip
    return select(pack([TrainSample(rollout, 0.0)], turns=turns), [])


def minibatch_indices(batch: TrainBatch, n: int) -> list[IntArray]:
    """Sequence indices of each of ``n`` minibatches of whole groups, balanced by tokens, in the order of the batch;
    some are empty when there are fewer groups than ``n``."""
    return share_out(batch.group_ids, sequence_lengths(batch), n)


def sequence_lengths(batch: TrainBatch) -> IntArray:
    """Tokens of each sequence, prompt and response [N]."""
    return np.diff(batch.cu_seqlens)


def _boundaries(lengths: IntArray | IdArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def share_out(group_ids: IntArray, lengths: IntArray, parts: int) -> list[IntArray]:
    """Indices [n] of each part's sequences, in order: whole groups, balanced by tokens; a part may be empty.

    Groups go, longest first, to the part with the fewest tokens; ties go to the earlier group and the lower part.
    ``group_ids`` [N], ``lengths`` [N] in tokens.
    """
    _, first, group_of = np.unique(group_ids, return_index=True, return_inverse=True)
    tokens = np.bincount(group_of, weights=lengths, minlength=len(first))
    heap = [(0.0, part) for part in range(parts)]
    part_of_group = np.zeros(len(first), dtype=np.int64)
    for group in np.lexsort((first, -tokens)):
        load, part = heapq.heappop(heap)
        part_of_group[group] = part
        heapq.heappush(heap, (load + tokens[group], part))
    part_of_sequence = part_of_group[group_of]
    return [np.flatnonzero(part_of_sequence == part) for part in range(parts)]
