"""Packing: nothing is lost or moved to another token, groups stay whole, splits are balanced and repeatable."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.data.packing import empty_batch, pack, select, share_out, split_microbatches, split_minibatches
from asyncrlhf.types import Prompt, Rollout, TrainBatch, TrainSample


def sample(index: int, group: int, prompt: int, response: int, oldest: int = 0) -> TrainSample:
    tokens = np.arange(prompt + response) + 100 * index
    rollout = Rollout(
        rollout_id=index,
        group_id=group,
        prompt=Prompt(str(group), "", tokens[:prompt]),
        response_ids=tokens[prompt:],
        behavior_logprobs=-tokens[prompt:].astype(np.float32),
        policy_versions=np.arange(response),
        finish_reason="length" if index % 2 else "stop",
        response_text="",
        generator_id="g",
    )
    return TrainSample(rollout, reward=index / 2, weight=index + 1.0, masked_before_version=oldest)


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    shapes = draw(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=20)
    )
    return pack([sample(i, group, p, r) for i, (group, p, r) in enumerate(shapes)])


def rows(batch: TrainBatch) -> dict[int, tuple]:
    """Everything the batch says of each rollout id."""
    found = {}
    for i, rollout_id in enumerate(batch.rollout_ids.tolist()):
        part = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        per_token = (
            batch.token_ids,
            batch.loss_mask,
            batch.response_mask,
            batch.behavior_logprobs,
            batch.policy_versions,
        )
        per_sequence = (batch.rewards, batch.weights, batch.group_ids, batch.truncated)
        found[rollout_id] = (*(tuple(x[part].tolist()) for x in per_token), *(x[i].item() for x in per_sequence))
    return found


def test_every_array_speaks_of_its_own_token() -> None:
    batch = pack([sample(0, 7, 2, 3, oldest=1), sample(1, 7, 1, 2, oldest=9)])
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 4, 100, 101, 102]
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.response_mask.tolist() == [False, False, True, True, True, False, True, True]
    assert batch.policy_versions.tolist() == [-1, -1, 0, 1, 2, -1, 0, 1]
    assert batch.loss_mask.tolist() == [False, False, False, True, True, False, False, False]
    assert batch.behavior_logprobs.tolist() == [0, 0, -2, -3, -4, 0, -101, -102]
    assert batch.rewards.tolist() == [0.0, 0.5] and batch.weights.tolist() == [1.0, 2.0]
    assert batch.truncated.tolist() == [False, True] and batch.group_ids.tolist() == [7, 7]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty_prompt_or_response_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="rollout 4 has an empty"):
        pack([sample(4, 0, *shape)])
    with pytest.raises(ValueError, match="no samples"):
        pack([])


@given(batches(), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_microbatches_hold_every_sequence_once_within_the_budget(batch: TrainBatch, budget: int) -> None:
    parts = split_microbatches(batch, budget)
    assert [i for part in parts for i in part.rollout_ids.tolist()] == batch.rollout_ids.tolist()
    assert {key: row for part in parts for key, row in rows(part).items()} == rows(batch)
    assert all(part.num_tokens <= budget or part.num_sequences == 1 for part in parts)


@given(batches(), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_shards_and_minibatches_partition_whole_groups(batch: TrainBatch, parts: int) -> None:
    shares = [select(batch, own) for own in share_out(batch.group_ids, np.diff(batch.cu_seqlens), parts)]
    for split in (shares, split_minibatches(batch, parts)):
        assert {key: row for part in split for key, row in rows(part).items()} == rows(batch)
        assert sum(part.num_sequences for part in split) == batch.num_sequences
        homes = [set(part.group_ids.tolist()) for part in split]
        assert sum(len(home) for home in homes) == len(set(batch.group_ids.tolist()))
        group_tokens = np.bincount(batch.group_ids, weights=np.diff(batch.cu_seqlens))
        loads = [part.num_tokens for part in split]
        assert max(loads) - min(loads) <= group_tokens.max()


def test_select_keeps_the_order_asked_for() -> None:
    batch = pack([sample(i, i, 1 + i, 2) for i in range(4)])
    chosen = select(batch, [3, 0, 2])
    assert chosen.rollout_ids.tolist() == [3, 0, 2]
    assert rows(chosen) == {key: row for key, row in rows(batch).items() if key != 1}
    assert select(batch, []).num_sequences == 0 and select(batch, []).num_tokens == 0


@pytest.mark.parametrize("served", [False, True])
def test_a_share_without_a_rollout_is_like_an_empty_selection(served: bool) -> None:
    """Ranks make their collective passes by what the batch comes with, so an empty share must say the same."""
    whole = sample(0, 0, 1, 2)
    if served:
        numbers = np.zeros(2, np.float32)
        whole = replace(whole, rollout=replace(whole.rollout, ref_logprobs=numbers, values=numbers, critic_version=3))
    expected, found = select(pack([whole]), []), empty_batch(reference=served, values=served)
    for field in fields(TrainBatch):
        theirs, ours = getattr(expected, field.name), getattr(found, field.name)
        assert (theirs is None) == (ours is None), field.name
        assert theirs is None or (theirs.dtype == ours.dtype and theirs.shape == ours.shape), field.name
