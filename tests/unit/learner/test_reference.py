"""The reference apart from the learner: the same log-probs as a plain forward pass, whatever shares its batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.data.packing import pack, select
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.step.companions import ReferencePolicy
from asyncrlhf.types import Rollout, TrainSample
from tests.numeric import assert_close
from tests.unit.learner.worlds import backend, llama, samples

TEMPERATURE = 0.7


def plain_logprobs(rollout: Rollout, temperature: float = TEMPERATURE) -> np.ndarray:
    """One sequence alone through transformers' own forward pass."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt.token_ids, rollout.response_ids]))[None]
    with torch.no_grad():
        logprobs = (llama().double().eval()(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    first = len(rollout.prompt.token_ids)
    return logprobs[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0].numpy()


def policy(**options: object) -> ReferencePolicy:
    settings = {"temperature": TEMPERATURE, "precision": "none", "token_budget": 40} | options
    return ReferencePolicy(llama() if settings["precision"] != "none" else llama().double(), **settings)  # type: ignore[arg-type]


def rollouts() -> list[Rollout]:
    made = [sample.rollout for sample in samples(groups=5, size=3, seed=3)]
    return [made[i] for i in np.random.default_rng(0).permutation(len(made))]  # siblings apart


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_each_rollout_gets_its_own_logprobs(budget: int) -> None:
    given = rollouts()
    answers = policy(token_budget=budget).answer(given)
    for rollout, answer in zip(given, answers, strict=True):
        assert isinstance(answer, np.ndarray) and answer.dtype == np.float32
        assert_close(answer, plain_logprobs(rollout), atol=1e-5)


def test_passes_keep_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    original = ReferencePolicy._numbers

    def note(self: ReferencePolicy, batch: list[Rollout]) -> list[np.ndarray]:
        asked.append([len(r.prompt.token_ids) + len(r.response_ids) for r in batch])
        return original(self, batch)

    monkeypatch.setattr(ReferencePolicy, "_numbers", note)
    given = rollouts()
    policy(token_budget=30).answer(given)
    assert sum(map(len, asked)) == len(given) and len(asked) < len(given)
    assert all(sum(lengths) <= 30 or len(lengths) == 1 for lengths in asked), "rollouts are packed, not padded"


def test_a_rollout_that_cannot_be_scored_fails_alone() -> None:
    given = rollouts()[:4]
    nothing = np.zeros(0, np.int64)
    given[1] = replace(
        given[1], response_ids=nothing, behavior_logprobs=nothing.astype(np.float32), policy_versions=nothing
    )
    answers = policy().answer(given)
    assert [isinstance(answer, str) for answer in answers] == [False, True, False, False]
    assert "nothing to score" in str(answers[1])


def test_logprobs_that_are_not_numbers_are_a_failure_and_never_a_zero() -> None:
    broken = policy()
    with torch.no_grad():
        broken._policy.model.get_input_embeddings().weight[3] = torch.nan
    given = rollouts()
    for rollout, answer in zip(given, broken.answer(given), strict=True):
        seen = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])[:-1]
        assert isinstance(answer, str) or 3 not in seen
        assert not isinstance(answer, str) or "not all finite" in answer


def test_running_out_of_memory_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ReferencePolicy, "_numbers", full)
    answers = policy().answer(rollouts())
    assert all("lower reference.token_budget" in str(answer) for answer in answers)


def test_lower_precision_is_near_and_not_equal() -> None:
    given = rollouts()
    exact, low = policy().answer(given), policy(precision="bfloat16").answer(given)
    differences = np.concatenate([a - b for a, b in zip(exact, low, strict=True)])  # type: ignore[operator]
    assert differences.any()
    assert_close(differences, np.zeros_like(differences), atol=0.5)  # rounding gives .1, another token's log-prob nats


def with_reference(sample: TrainSample, answer: Any) -> TrainSample:
    return replace(sample, rollout=replace(sample.rollout, ref_logprobs=answer))


KL = AlgorithmConfig(advantage="loo", anchor="self", coef="one", correction="none", kl="loss", beta=0.2)


def test_the_learner_takes_what_came_with_the_batch_and_holds_no_reference() -> None:
    """The same step as with a reference of its own, also when the batch is reordered into minibatches."""
    algorithm = replace(KL, anchor="prox", coef="clip", minibatches=2)
    given = samples(groups=4, size=3, seed=3)
    answers = policy().answer([sample.rollout for sample in given])
    served = [with_reference(s, a) for s, a in zip(given, answers, strict=True)]
    other = llama(seed=1)
    own = backend(algorithm, model=other, reference=llama(), temperature=TEMPERATURE)
    spared = backend(algorithm, model=llama(seed=1), reference_served=True, temperature=TEMPERATURE)
    assert spared.reference is None
    a, b = own.train_step(pack(given)), spared.train_step(pack(served))
    for key in ("loss", "ref_kl", "grad_norm"):
        assert_close(a.metrics[key], b.metrics[key], rtol=1e-5, atol=1e-6, what=key)
    assert a.metrics["ref_kl"] > 0.01


def test_a_batch_without_them_is_refused() -> None:
    spared = backend(KL, reference_served=True)
    with pytest.raises(AsyncRLHFError, match="without the reference's log-probs"):
        spared.train_step(pack(samples()))
    with pytest.raises(ConfigError, match="needs a reference model"):
        backend(KL)


def test_half_a_batch_of_them_cannot_be_packed_and_a_shard_keeps_its_own() -> None:
    given = samples(groups=3, size=2)
    answers = policy().answer([sample.rollout for sample in given])
    served = [with_reference(s, a) for s, a in zip(given, answers, strict=True)]
    with pytest.raises(ValueError, match="1 of 6 rollouts lack the reference's log-probs"):
        pack([given[0], *served[1:]])
    chosen = select(pack(served), [4, 1])
    expected = [x for i in (4, 1) for x in answers[i].tolist()]  # type: ignore[union-attr]
    assert chosen.ref_logprobs is not None
    assert chosen.ref_logprobs[chosen.response_mask].tolist() == expected
    assert not chosen.ref_logprobs[~chosen.response_mask].any()
