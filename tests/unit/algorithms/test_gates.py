"""Gates keep what their papers keep: the fewest drops of M2PO, SAT's interval inside PPO's, OPSM's whole sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.algorithms.gates import GATES, GateInputs, binary_kl_gate, entropy_gate, m2_gate, opsm_gate, sat_gate
from tests import reference
from tests.unit.algorithms.batches import ragged_batch
from tests.unit.algorithms.cases import gate_inputs

SEEDS = st.integers(0, 2**32 - 1)


def _drift(seed: int, spread: float = 0.4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-ratio, advantages, mask) [T] with poison outside the mask."""
    batch = ragged_batch(seed, max_sequences=9, spread=spread)
    log_ratio = torch.from_numpy(batch.theta) - torch.from_numpy(batch.mu)
    return log_ratio, torch.from_numpy(batch.token_advantages), torch.from_numpy(batch.mask)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=SEEDS, threshold=st.sampled_from([0.0, 0.04, 0.2, 1e6]))
def test_m2_keeps_the_mean_low_with_the_fewest_drops(seed: int, threshold: float) -> None:
    log_ratio, advantages, mask = _drift(seed)
    keep = m2_gate(log_ratio, advantages, mask, threshold=threshold).numpy()
    x, a, m = log_ratio.numpy(), advantages.numpy(), mask.numpy()
    harmful = m & (((a > 0) & (x > 0)) | ((a < 0) & (x < 0)))
    assert keep[m & ~harmful].all(), "a harmless token is never dropped"
    kept, dropped = np.sort(x[harmful & keep] ** 2), np.sort(x[harmful & ~keep] ** 2)
    assert len(kept) == 0 or kept.mean() <= threshold + 1e-12
    if len(dropped):
        assert len(kept) == 0 or kept[-1] <= dropped[0]
        # No choice of one more token to keep would do: the smallest of the dropped is the best candidate.
        assert np.append(kept, dropped[0]).mean() > threshold


def test_m2_counts_the_trust_region_tokens_of_the_paper_and_not_all_tokens() -> None:
    """Two harmless tokens that moved far neither leave nor change what the harmful ones are allowed."""
    now, adv = [np.array([0.1, 0.3, 1.0, -2.0])], [np.array([1.0, 1.0, -1.0, 1.0])]
    mu, ones = [np.zeros(4)], torch.ones(4, dtype=torch.bool)
    keep = m2_gate(torch.from_numpy(now[0]), torch.from_numpy(adv[0]), ones, threshold=0.04)
    assert keep.tolist() == [True, False, True, True]
    np.testing.assert_array_equal(reference.m2_keep(now, mu, adv, 0.04)[0], keep.numpy())
    assert reference.m2_keep(now, mu, adv, 0.04, all_tokens=True)[0].tolist() == [1, 0, 0, 0], "AReaL's reading"


def test_m2_of_the_whole_update_is_not_that_of_its_parts() -> None:
    log_ratio, advantages = torch.tensor([0.1, 0.3]), torch.ones(2)
    both = torch.tensor([True, True])
    assert m2_gate(log_ratio, advantages, both, threshold=0.06).tolist() == [True, True]
    assert m2_gate(log_ratio, advantages, torch.tensor([False, True]), threshold=0.06).tolist() == [True, False]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=SEEDS, quantile=st.sampled_from([0.5, 0.9, 1.0]))
def test_sat_keeps_an_interval_inside_that_of_ppo(seed: int, quantile: float) -> None:
    log_ratio, advantages, mask = _drift(seed, spread=0.2)
    low, high = 0.2, 0.28
    keep = sat_gate(log_ratio, advantages, mask, quantile=quantile, eps_low=low, eps_high=high).numpy()[mask.numpy()]
    x, a = log_ratio.numpy()[mask.numpy()], advantages.numpy()[mask.numpy()]
    lower, upper = reference.sat_interval(x, quantile, low, high, np.sign(a))
    assert (lower >= 1 - low).all() and (upper <= 1 + high).all()
    assert ((lower == 1 - low) | (a < 0)).all() and ((upper == 1 + high) | (a > 0)).all(), "one side only is narrowed"
    ratio = np.exp(x)
    np.testing.assert_array_equal(keep, ~(((a > 0) & (ratio > upper)) | ((a < 0) & (ratio < lower))))
    clipped_by_ppo = ((a > 0) & (ratio > 1 + high)) | ((a < 0) & (ratio < 1 - low))
    assert not (keep & clipped_by_ppo).any()
    if quantile == 1.0:
        np.testing.assert_array_equal(keep, ~clipped_by_ppo)


def test_sat_narrows_in_proportion_to_the_drift() -> None:
    """Nine tokens of drift 0.1 set q; one of drift 0.2 has half the room: 1.1 in place of 1.2."""
    mask, gain = torch.ones(10, dtype=torch.bool), torch.ones(10)
    log_ratio = torch.tensor([0.1] * 9 + [0.2])
    for eps_high, kept in ((0.45, True), (0.44, False)):  # exp(0.2) is 1.221: between 1 + 0.44 / 2 and 1 + 0.45 / 2
        keep = sat_gate(log_ratio, gain, mask, quantile=0.9, eps_low=0.2, eps_high=eps_high)
        assert keep.tolist() == [True] * 9 + [kept]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_opsm_drops_negative_sequences_that_drifted(seed: int) -> None:
    batch = ragged_batch(seed)
    gains = torch.from_numpy(batch.rewards)[batch.tensors()[1]]
    keep = opsm_gate(gate_inputs(batch, gains), 0.05)
    adv = [np.full(len(s), batch.rewards[i]) for i, s in zip(batch.trained, batch.split(batch.theta), strict=True)]
    expected = reference.opsm_keep(batch.split(batch.theta), batch.split(batch.mu), adv, 0.05)
    np.testing.assert_array_equal(keep.numpy()[batch.mask], np.concatenate(expected) > 0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS, delta=st.sampled_from([0.0, 0.01, 0.05]))
def test_binary_kl_drops_whole_sequences_of_either_sign(seed: int, delta: float) -> None:
    """And each for itself: alone in the batch it meets the same fate."""
    batch = ragged_batch(seed)
    inputs = gate_inputs(batch, torch.from_numpy(batch.token_advantages))
    keep = binary_kl_gate(inputs, delta).numpy()
    expected = reference.binary_kl_keep(batch.split(batch.theta), batch.split(batch.mu), delta)
    np.testing.assert_array_equal(keep[batch.mask], np.concatenate(expected) > 0)
    for sequence in batch.trained:
        own = inputs.sequence_ids == sequence
        alone = GateInputs(*(x[own] for x in inputs))._replace(sequence_ids=torch.zeros(int(own.sum())).long())
        np.testing.assert_array_equal(binary_kl_gate(alone, delta).numpy(), keep[own.numpy()])


def inputs_of(pi: torch.Tensor, mu: torch.Tensor, ids: torch.Tensor | None = None, **others: Any) -> GateInputs:
    plain = torch.zeros(len(pi))
    ids = plain.long() if ids is None else ids
    return GateInputs(pi, mu, plain, plain, torch.ones(len(pi), dtype=torch.bool), ids)._replace(**others)


def test_binary_kl_is_that_of_the_sampler_to_the_policy() -> None:
    """By hand: mu 1/2 and pi 1/4 give log(4 / 3) / 2 = 0.1438; the other way round it is 0.1308."""
    half, quarter = (torch.full((2,), p, dtype=torch.float64).log() for p in (0.5, 0.25))
    down = inputs_of(quarter, half, advantages=torch.tensor([1.0, -1.0]))
    up = down._replace(policy_logprobs=half, behavior_logprobs=quarter)
    assert binary_kl_gate(down, 0.1439).all() and not binary_kl_gate(down, 0.1437).any()
    assert binary_kl_gate(up, 0.1309).all() and not binary_kl_gate(up, 0.1307).any()


def test_binary_kl_at_certainty_is_finite_and_sees_no_rounding() -> None:
    """A log-prob that rounds to 0, or above it, is that of a certain token: no drift from one of -1e-7. One that the
    policy holds impossible is infinitely far."""
    mu, pi = torch.tensor([0.0, -1e-7, -0.7]), torch.tensor([1e-7, 0.0, -torch.inf])
    assert binary_kl_gate(inputs_of(pi, mu, torch.arange(3)), 1e-6).tolist() == [True, True, False]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS, tau=st.sampled_from([0.0, 0.3, 1.0]))
def test_the_entropy_widens_a_tokens_bound(seed: int, tau: float) -> None:
    batch = ragged_batch(seed)
    keep = entropy_gate(gate_inputs(batch, torch.from_numpy(batch.theta)), tau).numpy()[batch.mask]
    expected = reference.estr_keep(batch.split(batch.theta), batch.split(batch.mu), batch.split(batch.entropy), tau)
    np.testing.assert_array_equal(keep, np.concatenate(expected) > 0)


def test_the_same_move_is_noise_where_the_policy_is_certain_and_exploration_where_it_is_not() -> None:
    """By hand, at a threshold of 1: |log r| up to 0.1 without entropy, also where rounding has it below 0, and up to
    0.5 with 0.24 nats; either way."""
    entropy = torch.tensor([0.0, 0.0, -1e-7, 0.24, 0.24, 0.24])
    moved = torch.tensor([0.099, 0.101, 0.101, 0.499, -0.499, -0.501])
    keep = entropy_gate(inputs_of(moved - 1, torch.full((6,), -1.0), entropy=entropy), 1.0)
    assert keep.tolist() == [True, False, False, True, True, False]


@pytest.mark.parametrize("size", [0, 3])
def test_gates_of_an_empty_mask(size: int) -> None:
    x, mask, ids = torch.full((size,), float("nan")), torch.zeros(size, dtype=torch.bool), torch.zeros(size).long()
    assert len(m2_gate(x, x, mask, threshold=0.04)) == size
    assert len(sat_gate(x, x, mask, quantile=0.9, eps_low=0.2, eps_high=0.2)) == size
    for gate in GATES.values():
        assert len(gate(GateInputs(x, x, x, x, mask, ids), 0.1)) == size


def test_gates_leave_an_on_policy_batch_alone() -> None:
    mask, ids, still = torch.ones(6, dtype=torch.bool), torch.zeros(6).long(), torch.zeros(6)
    advantages = torch.tensor([1.0, -1.0, 0.0, 2.0, -2.0, 0.5])
    assert m2_gate(still, advantages, mask, threshold=0.04).all()
    assert sat_gate(still, advantages, mask, quantile=0.9, eps_low=0.2, eps_high=0.2).all()
    for gate in GATES.values():
        assert gate(GateInputs(still, still, still, advantages, mask, ids), 0.0).all()
