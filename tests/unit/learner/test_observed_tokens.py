"""Rows of sampled and observed stretches: no observed token reaches a loss, a metric or a weight, under any preset."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.algorithms.aggregate import normaliser_count
from asyncrlhf.data.packing import pack
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.ranks import Peers
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.step.companions import ReferencePolicy
from asyncrlhf.learner.step.loss import MicrobatchLosses, critic_loss
from asyncrlhf.learner.step.plan import PER_SEQUENCE, Microbatch, ResponseTokens
from asyncrlhf.learner.step.targets import fill, fills, set_targets
from asyncrlhf.learner.step.token_facts import token_facts
from asyncrlhf.readahead.owners import Chunk
from asyncrlhf.readahead.readers import ReadingReference
from asyncrlhf.rewards.model import policy_ids
from asyncrlhf.types import OBSERVED, TrainBatch, TrainSample
from tests.numeric import FLOAT32, assert_close
from tests.unit.learner.test_presets import (
    PRESETS,
    expected_gradient,
    model_logprobs,
    one_update,
    preset,
    step,
    teacher_of,
)
from tests.unit.learner.test_served_critic import plain_values, served, weights
from tests.unit.learner.worlds import assert_same, backend, llama, plain_logprobs, samples, with_gaps

GROUPS, SIZE = 4, 3


def plain_rows(sets: bool = True) -> list[TrainSample]:
    """With numbers of services, and with ``sets`` one kept token, its own, at each place."""
    found = []
    for sample in samples(GROUPS, SIZE, seed=8):
        ids = sample.rollout.response_ids.astype(np.int32)
        numbers = np.arange(len(ids), dtype=np.float32)
        more: dict[str, Any] = {"kept_ids": ids, "kept_counts": np.ones_like(ids)} if sets else {}
        rollout = replace(sample.rollout, ref_logprobs=-numbers, values=numbers, critic_version=0, **more)
        found.append(replace(sample, rollout=rollout))
    return found


def gapped() -> list[TrainSample]:
    return [with_gaps(sample) for sample in samples(GROUPS, SIZE, seed=8)]


def test_the_sampled_tokens_of_a_packed_row_are_those_of_the_row_without_gaps() -> None:
    rows = [with_gaps(sample, garbage=-7.0) for sample in plain_rows()]
    batch, wanted = pack(rows, turns=True), pack(plain_rows(), turns=True)
    left = np.concatenate([np.r_[np.full(len(r.prompt.token_ids), True), r.sampled] for r in (s.rollout for s in rows)])
    assert (~left).sum() > 20 and not (batch.response_mask | batch.loss_mask)[~left].any()
    assert set(batch.policy_versions[~left].tolist()) == {OBSERVED} and batch.cu_seqlens[-1] == len(left)
    for name in {own.name for own in fields(TrainBatch)} - {"cu_seqlens", "routed_experts", "follows"}:
        found, expected = getattr(batch, name), getattr(wanted, name)
        np.testing.assert_array_equal(found[left] if len(found) == len(left) else found, expected, err_msg=name)


def test_rows_that_cannot_be_packed_are_named() -> None:
    row = gapped()[1]
    never = replace(row.rollout, policy_versions=np.full(len(row.rollout.response_ids), OBSERVED))
    with pytest.raises(ValueError, match="rollout 1 has no sampled token"):
        pack([replace(row, rollout=never)])
    kept = np.ones(len(row.rollout.response_ids), np.int32)
    with pytest.raises(ValueError, match="kept set at an observed token"):
        pack([replace(row, rollout=replace(row.rollout, kept_ids=kept, kept_counts=kept))])


# --- formulas, on tensors ------------------------------------------------------------------------------------------


def random_tokens(config: AlgorithmConfig) -> ResponseTokens:
    draws = torch.Generator().manual_seed(0)
    count, lengths = GROUPS * SIZE, torch.randint(1, 8, (GROUPS * SIZE,), generator=draws)
    ids = torch.arange(count).repeat_interleave(lengths)

    def noise(base: float | torch.Tensor, size: float, n: int = len(ids)) -> torch.Tensor:
        return base + size * torch.randn(n, generator=draws, dtype=torch.float64)

    behavior, zeros = noise(-2.5, 0.5), torch.zeros(len(ids), dtype=torch.float64)
    critic = {"values": noise(0.0, 1.0), "final_values": noise(0.0, 1.0, count)} if config.needs_critic else {}
    return ResponseTokens(
        sequence_ids=ids,
        loss_mask=torch.rand(len(ids), generator=draws) < 0.85,
        version_lag=torch.randint(0, 4, (len(ids),), generator=draws),
        rewards=noise(2.0 if config.advantage == "mean_norm" else 0.0, 1.0, count),  # MaxRL's are not below 0
        weights=noise(1.0, 0.1, count),
        group_ids=torch.arange(count) // SIZE,
        truncated=torch.arange(count) % 4 == 0,
        behavior_logprobs=behavior,
        policy_logprobs=noise(behavior, 0.2),
        entropy=noise(2.0, 0.1),
        collision=noise(0.3, 0.01),
        kept_mass=zeros.clone(),
        clipped=zeros.clone(),
        advantages=zeros.clone(),
        proximal_logprobs=noise(behavior, 0.2) if config.looks_first else None,
        ref_logprobs=noise(behavior, 0.2) if config.needs_reference else None,
        ema_logprobs=noise(behavior, 0.2) if config.anchor == "ema" else None,
        **critic,
    )


def stretched(tokens: ResponseTokens, garbage: float) -> tuple[ResponseTokens, torch.Tensor]:
    """The same with up to two observed tokens after each, and which are observed: [T]."""
    draws = torch.Generator().manual_seed(1)
    more = torch.randint(0, 3, (len(tokens.loss_mask),), generator=draws)
    source = torch.arange(len(more)).repeat_interleave(1 + more)
    observed = torch.cat([torch.ones(1, dtype=torch.bool), source.diff() > 0]).logical_not()
    spread = {name: None if x is None or name in PER_SEQUENCE else x[source] for name, x in vars(tokens).items()}
    for name, x in spread.items():
        if x is not None and name not in ("sequence_ids", "clipped", "advantages"):
            x[observed] = {torch.bool: False, torch.int64: 99}.get(x.dtype, garbage)
    return replace(tokens, **{name: x for name, x in spread.items() if x is not None}), observed


def update(config: AlgorithmConfig, given: ResponseTokens) -> dict[str, torch.Tensor]:
    """One optimizer update's targets, losses and gradients: 0-dim or [T]."""
    tokens = replace(given, **{name: x.clone() for name, x in vars(given).items() if x is not None})
    set_targets(tokens, config, lambda total: total)
    everything = [Microbatch(None, slice(0, len(tokens.loss_mask)), slice(0, len(tokens.rewards)), True)]  # type: ignore[arg-type]
    if fills(config):
        fill(config, tokens, everything, Peers())
    found = {"advantages": tokens.advantages.masked_fill(~tokens.loss_mask, 0.0)}
    leaves = {name: getattr(tokens, name).requires_grad_() for name in ("policy_logprobs", "entropy")}
    where = (tokens.loss_mask, tokens.sequence_ids)
    count = normaliser_count(config.aggregate, *where, constant_length=9.0)
    loss, clipped = MicrobatchLosses(config)(tokens, count)
    found |= {"loss": loss, "clipped": (clipped & tokens.loss_mask).double()}
    if tokens.values is not None and tokens.returns is not None:
        leaves["values"] = (tokens.values + 0.1).detach().requires_grad_()
        value_loss = critic_loss(config, tokens, leaves["values"], normaliser_count("token", *where))
        found |= {"value_loss": value_loss, "returns": tokens.returns}
        loss = loss + value_loss
    loss.backward()
    slopes = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return {name: x.detach() for name, x in found.items()} | {f"d {name}": x for name, x in slopes.items()}


def assert_unseen(config: AlgorithmConfig, row: ResponseTokens, observed: torch.Tensor, plain: ResponseTokens) -> None:
    """Nothing at observed tokens, and everywhere else what the row without them has."""
    found, expected = update(config, row), update(config, plain)
    assert expected["d policy_logprobs"].any()
    for name, x in found.items():
        assert not x.dim() or not x[observed].any(), f"{name} is not zero at an observed token"
    assert_close({n: x[~observed] if x.dim() else x for n, x in found.items()}, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_with_gaps_is_its_sampled_tokens(name: str) -> None:
    """Loss, advantages, value targets, clip and gradients, whatever numbers stand at the observed tokens; and one
    observed token in the mask is noticed."""
    config, plain = preset(name), random_tokens(preset(name))
    for garbage in (float("nan"), -9.0):
        row, observed = stretched(plain, garbage)
        assert_unseen(config, row, observed, plain)
    # Of the best rollout, because some presets look at no other.
    wrong = observed & (row.sequence_ids == row.rewards.argmax())
    row.loss_mask[wrong.nonzero()[0]] = True
    with pytest.raises(AssertionError):
        assert_unseen(config, row, observed, plain)


# --- steps of a tiny model -----------------------------------------------------------------------------------------


def on_policy(batch: TrainBatch) -> TrainBatch:
    behavior = batch.behavior_logprobs.copy()
    behavior[batch.response_mask] = model_logprobs(batch)
    return replace(batch, behavior_logprobs=behavior)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but(every=8)
def test_the_gradient_on_policy_is_that_of_the_sampled_tokens(name: str) -> None:
    """By a padded pass of transformers over the whole row, without any of our packing."""
    batch, algorithm = on_policy(pack(gapped())), one_update(name)
    gradient, metrics = step(algorithm, batch, budget=40, reference=teacher_of(algorithm))
    assert_same(gradient, expected_gradient(batch, algorithm), tolerance=2e-4 if algorithm.level != "token" else 5e-5)
    assert metrics["response_length_mean"] == pytest.approx(batch.response_mask.sum() / len(batch.rewards))
    assert metrics["response_tokens"] == batch.response_mask.sum() < metrics["tokens"] == len(batch.token_ids)


@pytest.mark.in_turn
@pytest.mark.parametrize(("name", "packing"), [*((name, True) for name in PRESETS), ("ppo", False), ("tis", False)])
@pytest.mark.more_but("False", "ppo", "decoupled_grpo", "oapl")
def test_garbage_at_observed_tokens_changes_neither_weights_nor_metrics(name: str, packing: bool) -> None:
    config = LearnerConfig(learning_rate=1e-2, token_budget=60, packing=packing)
    ends = []
    for garbage in (0.0, -50.0):
        batch = on_policy(pack([with_gaps(sample, garbage) for sample in plain_rows(sets=False)]))
        assert (batch.behavior_logprobs == -50.0).any() == (garbage == -50.0)
        trained = backend(preset(name), config, reference_served=True, critic_served=True, max_completion_length=9)
        before = {key: x.clone() for key, x in trained.parameters().items()}
        metrics = trained.train_step(batch).metrics
        ends.append((metrics, {key: x.clone() for key, x in trained.parameters().items()}))
        assert any(not torch.equal(x, before[key]) for key, x in ends[-1][1].items())
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(x, ends[0][1][key]) for key, x in ends[1][1].items())


def test_the_record_of_a_rows_tokens_holds_all_of_its_response() -> None:
    given, rows = gapped(), []
    trained = backend(preset("tis"))
    trained.observe = lambda plan: rows.extend(token_facts(plan, trained.algorithm, plan.batch.rollout_ids))
    trained.train_step(pack(given))
    assert len(rows) == len(given)
    for row in rows:
        rollout = given[row["rollout_id"]].rollout
        for name in ("response_ids", "policy_versions", "behavior_logprobs"):
            np.testing.assert_array_equal(row[name], getattr(rollout, name))
        assert row["prompt_ids"].tolist() == rollout.prompt.token_ids.tolist()
        assert not row["loss_mask"][~rollout.sampled].any() and not row["importance_weight"][~rollout.sampled].any()
        assert row["importance_weight"][rollout.sampled].all()


# --- services ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 10_000])
def test_services_answer_for_the_whole_row(budget: int) -> None:
    """Values and log-probs [L] at sampled tokens, zero at observed ones, whether read ahead or not."""
    given = [sample.rollout for sample in gapped()]
    critic = served(token_budget=budget)
    critic.load(3, weights(seed=3))
    model = llama().double()
    options: dict[str, Any] = {"temperature": 1.0, "precision": "none", "token_budget": budget}
    whole = ReferencePolicy(model, **options).answer(given)
    ahead = ReadingReference(model, cache_tokens=4096, **options)
    for turn in range(2):  # the second turn's request has the first and what followed it as its prompt
        chunks = [(r, len(r.prompt.token_ids) + turn, policy_ids(r)[: -1 if turn else -2].tolist()) for r in given]
        ahead.prefill([], [Chunk(rollout.rollout_id, 0, length, ids) for rollout, length, ids in chunks])
    assert ahead.readings is not None and all(ahead.readings._begun(rollout) for rollout in given)
    expected = plain_logprobs(llama().double(), pack(gapped()))
    answers = zip(given, critic.answer(given), whole, ahead.answer(given), expected, strict=True)
    for rollout, values, logprobs, read, own in answers:
        assert_close(values, np.where(rollout.sampled, plain_values(rollout, weights(seed=3)), 0), atol=FLOAT32)
        assert not np.any(logprobs[~rollout.sampled])  # type: ignore[index]
        assert_close(logprobs[rollout.sampled], own.detach().numpy(), atol=FLOAT32)  # type: ignore[index]
        assert_close(read, logprobs, atol=FLOAT32)


def test_a_prompt_ends_at_the_first_predicted_token() -> None:
    """Siblings share what lies before it and nothing after it, also where both rows go on with equal tokens."""
    ids, predicted = np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 6]), np.array([0, 0, 1, 0, 1] * 2, dtype=bool)
    inputs = PackedInputs.build(ids, np.array([0, 5, 10]), predicted)
    assert inputs.token_ids.tolist() == [[1, 2, 3, 4, 3, 4]]
    assert inputs.rows.tolist() == [1, 3, 1, 5] and inputs.targets.tolist() == [3, 5, 3, 6]
