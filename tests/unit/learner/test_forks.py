"""Rows that fork: what the learner computes is what transformers computes on each branch as a text of its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.algorithms.logprobs import KeptSets
from asyncrlhf.data.branches import Branches, last_branch, pass_length, pass_lengths
from asyncrlhf.data.packing import pack, select
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.step.companions import ReferencePolicy
from asyncrlhf.learner.step.plan import plan_step
from asyncrlhf.learner.step.targets import set_targets
from asyncrlhf.learner.step.token_facts import token_facts
from asyncrlhf.rewards.model import policy_ids
from asyncrlhf.rewards.reward import texts_of
from asyncrlhf.turns import Fork, Turn
from asyncrlhf.types import OBSERVED, Prompt, Rollout, TrainBatch, TrainSample
from tests.branching import text_of
from tests.numeric import FLOAT32, assert_close
from tests.unit.learner import test_presets
from tests.unit.learner.test_observed_tokens import on_policy
from tests.unit.learner.test_presets import PRESETS, expected_gradient, one_update, step, teacher_of
from tests.unit.learner.test_served_critic import served, weights
from tests.unit.learner.worlds import VOCABULARY, assert_same, backend, llama, samples, with_gaps


def forked(sample: TrainSample) -> TrainSample:
    """The rollout with its tokens dealt out over up to five turns: each continues the row, or follows any earlier turn,
    any earlier token or nothing, and reads up to three tokens first."""
    given, draws = sample.rollout, np.random.default_rng(100 + sample.rollout.rollout_id)
    prompt, length = len(given.prompt.token_ids), len(given.response_ids)
    cuts = np.unique(np.r_[0, draws.integers(0, length, 4), length])
    ids, versions, logprobs, turns, forks = [], [], [], [], []
    for first, end in pairwise(cuts):
        start = len(ids)
        if turns and (kind := draws.integers(0, 4)):
            follows = -1 if kind == 3 else int(draws.integers(0, prompt + start))
            follows = prompt + turns[int(draws.integers(0, len(turns)))].end - 1 if kind == 2 else follows
            if follows != prompt + start - 1:
                forks.append(Fork(start, follows))
        count = int(draws.integers(1, 4)) if turns else 0
        ids += [*draws.integers(0, VOCABULARY, count), *given.response_ids[first:end]]
        versions += [OBSERVED] * count + [*given.policy_versions[first:end]]
        logprobs += [0.0] * count + [*given.behavior_logprobs[first:end]]
        turns.append(Turn(start + count, len(ids), reward=float(draws.normal())))
    rollout = replace(
        given,
        response_ids=np.array(ids),
        policy_versions=np.array(versions),
        behavior_logprobs=np.array(logprobs, np.float32),
        turns=tuple(turns),
        forks=tuple(forks),
    )
    return replace(sample, rollout=rollout)


def mixed() -> list[TrainSample]:
    """Rows that fork, episodes that do not, and answers."""
    kinds = (forked, forked, with_gaps, lambda sample: sample)
    found = [kinds[i % 4](sample) for i, sample in enumerate(samples(5, 3, seed=8, longest=12))]
    assert sum(len(s.rollout.forks) for s in found) > 10 and any(
        -1 in [f.follows for f in s.rollout.forks] for s in found
    )
    return found


def places(rollout: Rollout) -> list[int]:
    return [len(rollout.prompt.token_ids) + int(place) for place in np.flatnonzero(rollout.sampled)]


def stretches(rollout: Rollout) -> list[list[int]]:
    """The places of sampled tokens, those together that follow each other."""
    found: list[list[int]] = []
    forks = {len(rollout.prompt.token_ids) + fork.start for fork in rollout.forks}
    for place in places(rollout):
        if found and place == found[-1][-1] + 1 and place not in forks:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def logits(model: Any, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Those [M, V] of the sampled tokens, and the tokens [M]: one pass of transformers for each stretch of them."""
    model.set_attn_implementation("eager")
    rows, ids = [], []
    for own in stretches(rollout):
        text = text_of(rollout, own[-1])
        rows.append(model(input_ids=torch.tensor([text[:-1]])).logits[0, -len(own) :])
        ids += text[-len(own) :]
    return torch.cat(rows), torch.tensor(ids)


def slow(model: Any, given: list[TrainSample]) -> list[torch.Tensor]:
    """The log-probs of each row's sampled tokens."""
    found = [logits(model, sample.rollout) for sample in given]
    return [rows.log_softmax(-1).gather(1, ids[:, None])[:, 0] for rows, ids in found]


@pytest.fixture
def by_texts(monkeypatch: pytest.MonkeyPatch) -> list[TrainSample]:
    """The rows, of which the references of the presets' tests are made text by text."""
    given = mixed()
    rows = {sample.rollout.rollout_id: sample for sample in given}

    def plain_logprobs(model: Any, batch: TrainBatch) -> list[torch.Tensor]:
        return slow(model, [rows[int(number)] for number in batch.rollout_ids])

    def score_terms(batch: TrainBatch, masks: list[torch.Tensor]) -> list[np.ndarray]:
        found, model = [], llama()
        for number, mask in zip(batch.rollout_ids, masks, strict=True):
            with torch.no_grad():
                given_, ids = logits(model, rows[int(number)].rollout)
            pi = given_.double().softmax(-1)
            scores = torch.nn.functional.one_hot(ids, pi.shape[-1]) - pi
            found.append(scores.square().sum(-1)[mask].numpy())
        return found

    monkeypatch.setattr(test_presets, "plain_logprobs", plain_logprobs)
    monkeypatch.setattr(test_presets, "score_terms", score_terms)
    return given


def test_each_sampled_token_is_predicted_once_from_its_own_text() -> None:
    given = mixed()
    batch = pack(given)
    assert batch.follows is not None
    inputs, expected = PackedInputs.of_batch(batch), torch.cat(slow(llama().double(), given))
    assert inputs.targets.tolist() == batch.token_ids[batch.response_mask].tolist(), "in the order of the rows"
    for packing in (True, False):
        found = PackedPolicy(llama().double(), packing=packing)(inputs, 1.0).logprobs
        assert_close(found.detach(), expected.detach(), atol=FLOAT32)
    order = np.random.default_rng(0).permutation(len(given))
    again = PackedInputs.of_batch(select(batch, order), 2, 7)
    chosen = torch.cat(slow(llama().double(), [given[i] for i in order[2:7]]))
    assert_close(PackedPolicy(llama().double())(again, 1.0).logprobs.detach(), chosen.detach(), atol=FLOAT32)


def test_a_branch_that_goes_on_is_passed_once() -> None:
    """A conversation, a sub-agent's, the first again, a second sub-agent's, and the first again."""
    prompt, sampled = (
        Prompt("p", "", np.arange(4)),
        np.array([0, 0, OBSERVED, 0, OBSERVED, 0, OBSERVED, 0, OBSERVED, 0]),
    )
    forks = (Fork(2, -1), Fork(4, 5), Fork(6, -1), Fork(8, 9))
    row = Rollout(0, 0, prompt, np.arange(10), np.zeros(10, np.float32), sampled, "stop", forks=forks)
    batch = pack([TrainSample(row, 0.0)])
    texts = Branches.of(batch.follows, batch.cu_seqlens, batch.response_mask)  # type: ignore[arg-type]
    found = [texts.places[a:b].tolist() for a, b in pairwise(texts.cu_seqlens)]
    assert found == [[6, 7], [10, 11], [0, 1, 2, 3, 4, 5, 8, 9, 12, 13]] and texts.own.all()
    assert pass_lengths(batch).tolist() == [14] and pass_length(row) == 14
    assert last_branch(row).tolist() == found[-1] and policy_ids(row).tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 8, 9]
    assert texts_of([row])["completion_ids"] == [[0, 1, 4, 5, 8, 9]]


@pytest.mark.in_turn
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but(every=9)
@pytest.mark.thorough_but(every=3)
def test_the_gradient_is_that_of_the_branches_as_texts(name: str, by_texts: list[TrainSample]) -> None:
    algorithm = one_update(name)
    batch = on_policy(pack(by_texts))
    tolerance = 2e-4 if algorithm.level != "token" else 5e-5
    gradient, metrics = step(algorithm, batch, budget=60, reference=teacher_of(algorithm))
    assert_same(gradient, expected_gradient(batch, algorithm), tolerance)
    assert metrics["response_tokens"] == batch.response_mask.sum()


@pytest.mark.parametrize("name", ["decoupled_grpo", "ppo", "vcpo", "rloo"])
@pytest.mark.more_but("decoupled_grpo", "ppo")
def test_neither_token_budget_changes_anything(name: str) -> None:
    batch = pack(mixed())
    (gradient, metrics), *others = (step(test_presets.preset(name), batch, budget) for budget in (10_000, 40, 1))
    for other_gradient, other_metrics in others:
        assert_same(other_gradient, gradient, tolerance=3e-5)
        assert_close(other_metrics, metrics, rtol=1e-3, atol=1e-4)


def test_a_passs_tokens_are_within_the_budget() -> None:
    batch, budget = pack(mixed()), 60
    plan = plan_step(batch, AlgorithmConfig(), budget, torch.device("cpu"))
    lengths = pass_lengths(plan.batch)
    assert (lengths > np.diff(plan.batch.cu_seqlens)).any(), "some rows share tokens among their branches"
    for microbatch in plan.microbatches:
        tokens = lengths[microbatch.sequences].sum()
        assert tokens <= budget or microbatch.sequences.stop - microbatch.sequences.start == 1
        assert microbatch.inputs.token_ids.shape[1] <= tokens
    assert lengths.sum() == sum(pass_length(sample.rollout) for sample in mixed())


def test_wrong_parents_and_tokens_that_train_twice_are_noticed(by_texts: list[TrainSample]) -> None:
    """That is, the comparison with the texts has the power to find them."""
    algorithm = one_update("decoupled_grpo")
    batch = on_policy(pack(by_texts))
    expected = expected_gradient(batch, algorithm)
    assert_same(step(algorithm, batch, reference=0)[0], expected)
    assert batch.follows is not None
    starts = np.flatnonzero((np.diff(batch.follows) != 1)[:-1] & (batch.follows[1:-1] >= 0)) + 1
    parents = batch.follows.copy()
    parents[starts[0]] = max(0, parents[starts[0]] - 1) if parents[starts[0]] else 1
    repeated = np.flatnonzero(~batch.response_mask & (np.r_[batch.follows[1:], 0] >= 0) & (batch.follows > 0))[-1]
    mask = batch.response_mask.copy()
    mask[repeated] = True
    faults = (
        replace(batch, follows=None),
        replace(batch, follows=parents),
        replace(batch, response_mask=mask, loss_mask=batch.loss_mask | (mask & ~batch.response_mask)),
    )
    for fault in faults:
        with pytest.raises(AssertionError):
            assert_same(step(algorithm, fault, reference=0)[0], expected)


def test_given_that_follow_no_earlier_token_are_refused() -> None:
    rollout = next(s.rollout for s in mixed() if s.rollout.forks)
    fork = rollout.forks[0]
    for forks in (
        (replace(fork, follows=-2),),
        (replace(fork, follows=len(rollout.prompt.token_ids) + fork.start),),
        (replace(fork, start=len(rollout.response_ids)),),
        (replace(fork, start=0),),
        (fork, fork),
        (Fork(rollout.turns[1].start, -1),),
    ):
        with pytest.raises(ValueError, match="follows no token before it, or has no context"):
            replace(rollout, forks=forks)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_services_answer_by_branch(budget: int) -> None:
    given = mixed()
    critic = served(token_budget=budget)
    critic.load(3, weights(seed=3))
    reference = ReferencePolicy(llama().double(), temperature=1.0, precision="none", token_budget=budget)
    rollouts = [sample.rollout for sample in given]
    trunk, tensors = llama().double(), weights(seed=3)
    trunk.load_state_dict(
        {**trunk.state_dict(), **{f"model.{k[6:]}": v for k, v in tensors.items() if k[:6] == "trunk."}}
    )
    answers = zip(
        rollouts, reference.answer(rollouts), critic.answer(rollouts), slow(llama().double(), given), strict=True
    )
    for rollout, logprobs, values, expected in answers:
        assert isinstance(logprobs, np.ndarray) and isinstance(values, np.ndarray)
        assert_close(logprobs[rollout.sampled], expected.detach().numpy(), atol=FLOAT32)
        assert not logprobs[~rollout.sampled].any() and not values[~rollout.sampled].any()
        for place, value in zip(places(rollout), values[rollout.sampled], strict=True):
            text = torch.tensor([text_of(rollout, place)[:-1]])
            with torch.no_grad():
                hidden = trunk.model(input_ids=text).last_hidden_state[0, -1]
            assert_close(value, float(hidden @ tensors["head.weight"][0] + tensors["head.bias"][0]), atol=FLOAT32)


def test_the_state_after_a_cut_answer_is_that_of_its_branch() -> None:
    given = mixed()
    algorithm = replace(test_presets.preset("ppo"), truncated="bootstrap", minibatches=1, num_iterations=1)
    trained = backend(algorithm, LearnerConfig(learning_rate=0.0, max_grad_norm=0.0), reference=llama(seed=5))
    assert trained.critic is not None
    trained.critic.load_state_dict({name: tensor.float() for name, tensor in weights(seed=3).items()})
    plan = plan_step(pack(given), algorithm, 30, torch.device("cpu"))
    found = trained._passes.final_values(plan, 30)
    rollouts, checked = {sample.rollout.rollout_id: sample.rollout for sample in given}, 0
    for number, value in zip(plan.batch.rollout_ids.tolist(), found.tolist(), strict=True):
        rollout = rollouts[number]
        if rollout.finish_reason == "stop":
            assert value == 0.0
            continue
        text = text_of(rollout, len(rollout.prompt.token_ids) + len(rollout.response_ids) - 1)
        with torch.no_grad():
            inputs = PackedInputs.of_texts([np.array([*text, 0])])[0]
            expected = trained.critic(inputs)[-1]
        assert_close(value, float(expected), atol=FLOAT32)
        checked += bool(rollout.forks)
    assert checked > 1


def test_kept_sets_stay_with_their_tokens() -> None:
    """Truncated sampling: each log-prob is renormalised on the set of that token."""
    draws, given = np.random.default_rng(0), []
    for sample in mixed():
        counts = np.where(sample.rollout.sampled, 3, 0).astype(np.int32)
        kept = [
            np.r_[token, draws.choice(np.delete(np.arange(VOCABULARY), token), 2, replace=False)]
            for token in sample.rollout.response_ids[sample.rollout.sampled]
        ]
        rollout = replace(sample.rollout, kept_ids=np.concatenate(kept).astype(np.int32), kept_counts=counts)
        given.append(replace(sample, rollout=rollout))
    inputs = PackedInputs.of_batch(pack(given))
    assert isinstance(inputs.kept, KeptSets)
    model = llama().double()
    found, number = PackedPolicy(llama().double())(inputs, 1.0).logprobs.tolist(), 0
    for sample in given:
        rollout, sets = sample.rollout, sample.rollout.kept_ids.reshape(-1, 3)  # type: ignore[union-attr]
        for place, own in zip(places(rollout), sets, strict=True):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([text_of(rollout, place)[:-1]])).logits[0, -1]
            assert_close(found[number], float(logits[torch.tensor(own).long()].log_softmax(-1)[0]), atol=FLOAT32)
            number += 1
    assert number == len(found)


def test_credit_to_turns_keeps_the_given_order() -> None:
    """What was sampled earlier can cause a later reward, also across branches: the advantages are those of the same row
    without forks, and an earlier turn of one branch gets the reward of a later turn of another."""
    config = AlgorithmConfig(
        "reinforce", advantage="raw", credit="turn", anchor="self", coef="one", correction="none", aggregate="seq_sum"
    )
    batch, found = pack(mixed(), turns=True), []
    for own in (batch, replace(batch, follows=None)):
        tokens = plan_step(own, config, 10_000, torch.device("cpu")).tokens
        set_targets(tokens, config, lambda total: total)
        found.append((tokens.sequence_ids, tokens.advantages))
    one, other = (
        torch.stack([x[ids == i].sum() for i in range(batch.num_sequences)]).sort().values for ids, x in found
    )
    assert_close(one, other, atol=FLOAT32)
    sample = replace(next(s for s in mixed() if len(s.rollout.forks) > 1), masked_before_version=0)
    last = sum(turn.reward or 0.0 for turn in sample.rollout.turns[:-1])
    tokens = plan_step(pack([sample], turns=True), config, 10_000, torch.device("cpu")).tokens
    set_targets(tokens, config, lambda total: total)
    assert_close(float(tokens.advantages[-1]), sample.reward - last, atol=FLOAT32)
    assert_close(float(tokens.advantages[0]), sample.reward, atol=FLOAT32)


def test_the_record_of_a_given_tokens_holds_all_branches() -> None:
    given, rows = mixed(), []
    trained = backend(test_presets.preset("tis"))
    trained.observe = lambda plan: rows.extend(token_facts(plan, trained.algorithm, plan.batch.rollout_ids))
    trained.train_step(pack(given))
    found = slow(llama(), given)
    for row in rows:
        rollout = given[row["rollout_id"]].rollout
        assert row["response_ids"].tolist() == rollout.response_ids.tolist()
        own = row["policy_logprobs"][rollout.sampled]
        assert_close(own, found[row["rollout_id"]].detach().numpy(), atol=FLOAT32)
    assert len(rows) == len(given)


def test_ranks_that_must_call_a_model_equally_often_refuse_forks() -> None:
    trained = backend(learner=LearnerConfig(packing=False))
    object.__setattr__(trained.config, "zero_stage", 3)
    with pytest.raises(AsyncRLHFError, match=r"allowed: episode\.history=keep"):
        trained.train_step(pack(mixed()))
