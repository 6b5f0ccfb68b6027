"""Token log-probs and entropies agree with torch's distributions, in value and gradient, whatever the chunk."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncrlhf.algorithms import logprobs
from asyncrlhf.algorithms.logprobs import collision_probability, token_logprobs
from tests.numeric import assert_close


def _inputs(dtype: torch.dtype, rows: int = 7, vocabulary: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.randint(vocabulary, (rows,), generator=generator)


@pytest.mark.parametrize("chunk", [0, 1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient_in_float64(chunk: int, temperature: float) -> None:
    logits, targets = _inputs(torch.float64)
    found, entropy = token_logprobs(logits, targets, temperature=temperature, chunk_tokens=chunk)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    expected, expected_entropy = distribution.log_prob(targets), distribution.entropy()
    assert_close(found, expected)
    assert_close(entropy, expected_entropy)
    a, b = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    pairs = (
        (found @ a, expected @ a),
        (entropy @ b, expected_entropy @ b),
        (found @ a + entropy @ b, expected @ a + expected_entropy @ b),
    )
    for ours, theirs in pairs:
        mine = torch.autograd.grad(ours, logits, retain_graph=True)[0]
        assert_close(mine, torch.autograd.grad(theirs, logits, retain_graph=True)[0])


@pytest.mark.parametrize("chunk", [0, 1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_collision_probability(chunk: int, temperature: float) -> None:
    logits, _ = _inputs(torch.float64)
    found = collision_probability(logits, temperature=temperature, chunk_tokens=chunk)
    assert_close(found, torch.distributions.Categorical(logits=logits / temperature).probs.square().sum(-1))
    assert not found.requires_grad


def test_half_precision_is_worked_in_float32() -> None:
    logits, targets = _inputs(torch.bfloat16)
    found, entropy = token_logprobs(logits, targets)
    distribution = torch.distributions.Categorical(logits=logits.detach().double())
    assert found.dtype == entropy.dtype == torch.float32
    assert_close(found.double(), distribution.log_prob(targets), rtol=1e-5, atol=1e-5)
    assert_close(entropy.double(), distribution.entropy(), rtol=1e-5, atol=1e-5)
    assert torch.autograd.grad(found.sum(), logits)[0].dtype == torch.bfloat16
    collision = collision_probability(logits)
    assert_close(collision.double(), distribution.probs.square().sum(-1), rtol=1e-5, atol=1e-5)


def test_a_filtered_token_does_not_poison_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], dtype=torch.float64, requires_grad=True)
    found, entropy = token_logprobs(logits, torch.tensor([0]))
    assert_close(entropy.item(), math.log(2.0))
    assert torch.isfinite(torch.autograd.grad((found + entropy).sum(), logits)[0]).all()


def test_the_callers_logits_are_left_alone_and_only_they_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 22)
    logits, targets = _inputs(torch.float32)
    before = logits.detach().clone()
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        found, entropy = token_logprobs(logits, targets)
    (found.sum() + entropy.sum()).backward()
    assert torch.equal(logits.detach(), before)
    assert [t.data_ptr() for t in held if t.dim() == 2] == [logits.data_ptr()]


def test_nothing_in_nothing_out_and_bad_temperature() -> None:
    found, entropy = token_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert found.shape == entropy.shape == (0,)
    assert collision_probability(torch.zeros(0, 5)).shape == (0,)
    with pytest.raises(ValueError, match="temperature=0"):
        collision_probability(torch.zeros(1, 5), temperature=0.0)
    with pytest.raises(ValueError, match="temperature=0"):
        token_logprobs(torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64), temperature=0.0)
