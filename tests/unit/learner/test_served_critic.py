"""The critic apart from the learner: the values of a plain forward pass, of the version it was given and no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrlhf.data.packing import pack, select
from asyncrlhf.errors import AsyncRLHFError, WeightSyncError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.step.companions import ServedCritic, ValueModel
from asyncrlhf.types import Rollout, TrainSample
from tests.numeric import assert_close
from tests.unit.learner.worlds import backend, llama, samples

PPO = AlgorithmConfig(advantage="gae", anchor="prox", coef="clip", correction="none", minibatches=2)


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Of a critic whose trunk is another model's and whose head is not zero."""
    critic = ValueModel(llama(seed=seed).double())
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.normal_(critic.head.bias)
    return {name: parameter.detach() for name, parameter in critic.named_parameters()}


def plain_values(rollout: Rollout, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """One sequence alone through transformers' own forward pass."""
    critic = ValueModel(llama().double())
    critic.load_state_dict(tensors)
    ids = torch.from_numpy(np.concatenate([rollout.prompt.token_ids, rollout.response_ids]))[None]
    with torch.no_grad():
        hidden = critic.trunk(input_ids=ids).last_hidden_state[0]
        values = hidden @ critic.head.weight[0] + critic.head.bias
    return values[len(rollout.prompt.token_ids) - 1 : -1].numpy()


def served(**options: object) -> ServedCritic:
    return ServedCritic(llama().double(), **({"precision": "none", "token_budget": 40} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_each_rollout_gets_the_values_of_the_version_at_hand(budget: int) -> None:
    critic, given = served(token_budget=budget), [sample.rollout for sample in samples(groups=4, size=3, seed=3)]
    for version in (3, 8):
        critic.load(version, weights(seed=version))
        for rollout, answer in zip(given, critic.answer(given), strict=True):
            assert isinstance(answer, np.ndarray) and answer.dtype == np.float32
            assert_close(answer, plain_values(rollout, weights(seed=version)), rtol=1e-6, atol=1e-6)


def test_without_a_version_or_with_half_of_one_there_is_no_value() -> None:
    critic, given = served(), [sample.rollout for sample in samples()]
    with pytest.raises(WeightSyncError, match="before it held a version"):
        critic.answer(given)
    with pytest.raises(WeightSyncError, match=r"critic of version 2 does not fit its worker: head\.bias"):
        critic.load(2, {name: tensor for name, tensor in weights(1).items() if name != "head.bias"})


def test_values_that_are_not_numbers_are_a_failure_and_never_a_zero() -> None:
    critic, given = served(), [sample.rollout for sample in samples()]
    critic.load(0, {name: tensor * torch.nan if name == "head.bias" else tensor for name, tensor in weights(1).items()})
    assert set(critic.answer(given)) == {"The critic's values are not all finite."}


def with_values(given: list[TrainSample], values: list[np.ndarray]) -> list[TrainSample]:
    return [
        replace(s, rollout=replace(s.rollout, values=v, critic_version=1)) for s, v in zip(given, values, strict=True)
    ]


def test_the_learner_takes_what_came_with_the_batch() -> None:
    """The same step as with its own values where they are the same, and another one where they are not."""
    given = samples(groups=4, size=3, seed=3)
    own = backend(PPO)
    own.critic.load_state_dict(weights(5))  # type: ignore[union-attr]
    critic = served()
    critic.load(1, own.critic_parameters())
    values = critic.answer([s.rollout for s in given])
    found = {}
    for name, shift in (("same", 0.0), ("other", 3.0)):
        spared = backend(PPO, critic_served=True)
        spared.critic.load_state_dict(weights(5))  # type: ignore[union-attr]
        found[name] = spared.train_step(pack(with_values(given, [v + shift for v in values]))).metrics  # type: ignore[operator]
    expected = own.train_step(pack(given)).metrics
    for key in ("loss", "value_loss", "explained_variance", "grad_norm", "advantage_mean"):
        assert_close(found["same"][key], expected[key], rtol=1e-4, atol=1e-5, what=key)
    assert found["other"]["loss"] != pytest.approx(expected["loss"], rel=1e-2)
    assert found["same"]["critic_lag_mean"] == -1.0, "of version 1, in the hands of version 0"


def test_a_batch_without_them_is_refused_and_half_of_them_cannot_be_packed() -> None:
    given = samples(groups=3, size=2)
    with pytest.raises(AsyncRLHFError, match="without the critic's values"):
        backend(PPO, critic_served=True).train_step(pack(given))
    values = [np.full(len(s.rollout.response_ids), i, np.float32) for i, s in enumerate(given)]
    full = with_values(given, values)
    with pytest.raises(ValueError, match="1 of 6 rollouts lack the critic's values"):
        pack([given[0], *full[1:]])
    chosen = select(pack(full), [4, 1])
    assert chosen.values is not None and chosen.critic_versions is not None
    assert chosen.values[chosen.response_mask].tolist() == [*values[4], *values[1]]
    assert not chosen.values[~chosen.response_mask].any() and chosen.critic_versions.tolist() == [1, 1]
