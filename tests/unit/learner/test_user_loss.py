"""A user's own loss: its gradient is what it says, however split, and a wrong one is refused in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig, LossConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.step.user_loss import LossInputs, load_loss
from tests.loop import FAKE, run
from tests.numeric import assert_close
from tests.unit.learner.worlds import assert_same, backend, gradients, llama, random_batch

HERE = __name__
EXAMPLE = Path(__file__).resolve().parents[3] / "experiments" / "20_own_loss"


def decoupled(inputs: LossInputs) -> torch.Tensor:
    """The default preset's loss, as its paper writes it (no clip acts in the first update)."""
    weight = (inputs.proximal_logprobs - inputs.behavior_logprobs).exp()
    ratio = (inputs.policy_logprobs - inputs.proximal_logprobs).exp()
    return -torch.where(weight > 5, 0.0, weight) * ratio * inputs.advantages


def one_number(inputs: LossInputs) -> torch.Tensor:
    return decoupled(inputs).mean()


def constant(inputs: LossInputs) -> torch.Tensor:
    return torch.zeros_like(inputs.policy_logprobs)


def not_a_number(inputs: LossInputs) -> torch.Tensor:
    return inputs.policy_logprobs * torch.where(inputs.advantages > 0, torch.nan, 1.0)


def a_list(inputs: LossInputs) -> list[float]:
    return [0.0]


def two_arguments(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return logprobs * advantages


NUMBER = 3


def own(function: Callable[..., object]) -> AlgorithmConfig:
    return AlgorithmConfig(loss=LossConfig(f"{HERE}:{function.__name__}"))


def test_the_default_preset_written_as_a_users_loss_has_the_same_gradient() -> None:
    batch = random_batch()
    given, made = backend(), backend(own(decoupled))
    expected = given.train_step(batch).metrics
    assert_close(made.train_step(batch).metrics["loss"], expected["loss"], atol=1e-5)
    assert_same(gradients(made), gradients(given))


def test_microbatches_do_not_change_it() -> None:
    batch, found = random_batch(5, 3, flat_groups=1), []
    for budget in (10_000, 20, 1):
        trained = backend(own(decoupled), LearnerConfig(learning_rate=0.0, max_grad_norm=0.0, token_budget=budget))
        trained.train_step(batch)
        found.append(gradients(trained))
    assert_same(found[1], found[0], 2e-5)
    assert_same(found[2], found[0], 2e-5)


def test_the_reference_is_there_with_a_kl_only() -> None:
    seen: list[LossInputs] = []

    def look(inputs: LossInputs) -> torch.Tensor:
        seen.append(inputs)
        return decoupled(inputs)

    sys.modules[HERE].look = look
    batch = random_batch()
    backend(own(look)).train_step(batch)
    with_kl = AlgorithmConfig(loss=LossConfig(f"{HERE}:look"), kl="loss", beta=0.1)
    backend(with_kl, reference=llama(seed=1)).train_step(batch)
    plain, held = seen
    assert plain.ref_logprobs is None and held.ref_logprobs is not None
    assert len(plain.rewards) == len(plain.group_ids) == batch.num_sequences
    assert len(plain.policy_logprobs) == len(plain.version_lag) == batch.response_mask.sum()
    assert plain.policy_logprobs.requires_grad and plain.entropy.requires_grad
    assert not plain.proximal_logprobs.requires_grad


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (one_number, "returned a tensor of shape \\[\\] for \\d+ tokens; allowed: \\[\\d+\\]"),
        (constant, "without gradient"),
        (not_a_number, "not finite for \\d+ of \\d+ tokens"),
        (a_list, "returned list; allowed: a tensor"),
    ],
)
def test_what_it_returns_is_checked(function: Callable[..., object], words: str) -> None:
    with pytest.raises(AsyncRLHFError, match=f"algorithm.loss.target={HERE}:{function.__name__}.*{words}"):
        backend(own(function)).train_step(random_batch())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:loss", "cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:nothing", "has no 'nothing'"),
        (f"{HERE}:NUMBER", "is not a function but int"),
        (f"{HERE}:two_arguments", "cannot be called with one argument"),
    ],
)
def test_a_wrong_target_is_refused_before_anything_starts(tmp_path: Path, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_loss(target)
    with pytest.raises(ConfigError, match=f"algorithm.loss.target={target}.*{words}"):
        run(tmp_path / "run", *FAKE, f"algorithm.loss.target={target}")
    assert not (tmp_path / "run").exists()


def test_the_example_trains_in_the_whole_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its README says: the folder is the working directory, and the file is named without a path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(EXAMPLE)
    done = run(tmp_path, *FAKE, "algorithm.loss.target=own_loss:smooth_clip", "steps=3", "learner.learning_rate=1e-3")
    done.assert_ledger_whole()
    assert all(row["grad_norm"] > 0 and row["skipped"] == 0 for row in done.metrics)
