"""Log-probs are float32's: the log-softmax whatever the logits' dtype, and with learner.float32_head the logits too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GraniteConfig

from asyncrlhf.actors import model_annotators as reference_worker
from asyncrlhf.algorithms import logprobs
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.hf.sampling import sample_tokens
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.model import forward
from asyncrlhf.learner.model.forward import PackedPolicy, use_float32_head
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig, ReferenceConfig
from tests.numeric import assert_close
from tests.unit.learner.test_forward import GQA
from tests.unit.learner.test_presets import preset
from tests.unit.learner.worlds import VOCABULARY, backend, from_config, llama, random_batch, samples

HALF = LearnerConfig(learning_rate=0.0, max_grad_norm=0.0, mixed_precision="bfloat16")
EXACT = LearnerConfig(learning_rate=0.0, max_grad_norm=0.0, mixed_precision="bfloat16", float32_head=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_log_softmax_is_float32_whatever_the_dtype(dtype: torch.dtype, autocast: bool) -> None:
    logits = (6 * torch.randn(9, 200, generator=torch.Generator().manual_seed(0))).to(dtype)
    targets, ones = torch.arange(9), np.ones(9)
    exact = logits.double().log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        chosen = logprobs.token_logprobs(logits, targets)[0]
        drawn = sample_tokens(logits, np.full(9, 0.5), ones, ones, np.zeros(9, np.int64), np.zeros(9))
    for found, tokens in ((chosen, targets), (drawn.logprobs, drawn.tokens)):
        assert found.dtype == torch.float32
        assert_close(found.double(), exact.gather(1, tokens[:, None])[:, 0], atol=3e-5)


def logprobs_and_head_gradient(float32_head: bool, half: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the same hidden states, which bfloat16 holds exactly."""
    model = llama(tie_word_embeddings=False)
    if float32_head:
        use_float32_head(model)
    generator = torch.Generator().manual_seed(1)
    hidden = (3 * torch.randn(64, 32, generator=generator)).bfloat16().float()
    targets = torch.randint(VOCABULARY, (64,), generator=generator)
    policy = PackedPolicy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        found = policy.of_hidden(hidden.bfloat16() if half else hidden, targets, 1.0).logprobs
    found.square().sum().backward()
    gradient = model.lm_head.weight.grad
    assert gradient is not None and gradient.dtype == torch.float32
    return found.detach(), gradient


def test_a_float32_head_gives_the_log_probs_and_the_gradient_of_float32() -> None:
    exact, slope = logprobs_and_head_gradient(False, half=False)
    rounded, rounded_slope = logprobs_and_head_gradient(False, half=True)
    found, found_slope = logprobs_and_head_gradient(True, half=True)
    assert float((rounded - exact).abs().mean()) > 1e-3
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_slope, slope, atol=1e-4, rtol=1e-5)
    assert float((rounded_slope - slope).abs().max()) > 100 * float((found_slope - slope).abs().max())


def test_weights_of_a_low_dtype_are_multiplied_in_float32() -> None:
    """As where a sharded layout gathers them in bfloat16."""
    model = llama(tie_word_embeddings=False).bfloat16()
    use_float32_head(model)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = model.lm_head(hidden)
    torch.testing.assert_close(logits, hidden.float() @ model.lm_head.weight.float().T)
    logits.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """Of all logits that a policy makes log-probs of."""
    seen: set[torch.dtype] = set()

    def watched(logits: torch.Tensor, targets: torch.Tensor, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
        seen.add(logits.dtype)
        return logprobs.token_logprobs(logits, targets, **options)

    monkeypatch.setattr(forward, "token_logprobs", watched)
    return seen


@pytest.mark.parametrize("family", ["llama", "scaled logits"])
@pytest.mark.parametrize(
    "algorithm", [preset("impact"), AlgorithmConfig(kl="loss", beta=0.1)], ids=["ema", "reference"]
)
def test_a_learner_uses_it_for_every_policy(dtypes: set[torch.dtype], algorithm: AlgorithmConfig, family: str) -> None:
    """The policy, its slow copy and the reference; also where the model's own forward scales the logits."""
    for learner, expected in ((HALF, torch.bfloat16), (EXACT, torch.float32)):
        model, other = (
            llama(seed) if family == "llama" else from_config(GraniteConfig(**GQA, logits_scaling=3.0), seed)
            for seed in (0, 1)
        )
        trained = backend(algorithm, learner, model=model, reference=other if algorithm.needs_reference else None)
        dtypes.clear()  # of the comparisons at the start
        result = trained.train_step(random_batch())
        assert dtypes == {expected} and not result.skipped
        assert all(p.grad is not None for p in trained.model.get_output_embeddings().parameters())


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_reference_worker_follows_the_learner(
    dtypes: set[torch.dtype], monkeypatch: pytest.MonkeyPatch, dtype: str, expected: torch.dtype
) -> None:
    monkeypatch.setattr(reference_worker, "load_reference", lambda policy, model, device, dtype: llama().to(dtype))
    own = ReferenceConfig(workers=1, dtype=dtype)
    spec = reference_worker.ReferenceSpec(own, ModelConfig(), 1.0, "bfloat16", True)
    worker = reference_worker.ReferenceWorker(spec)
    dtypes.clear()  # of the comparisons at the start
    worker.annotate([sample.rollout for sample in samples(2)])
    assert dtypes == {expected}


def test_what_it_cannot_work_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="changes nothing under"):
        LearnerConfig(float32_head=True)
    model = llama(tie_word_embeddings=False)
    model.set_output_embeddings(nn.Sequential(model.lm_head))
    with pytest.raises(ConfigError, match="output layer of a LlamaForCausalLM is a Sequential"):
        use_float32_head(model)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"kept": True}, {"vocabulary": 60}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_known_of_logits_is_not_computed_again(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The second call is that of gradient checkpointing: same results, same gradient, no softmax in between."""
    logits, targets = torch.randn(9, 64, generator=torch.manual_seed(0)).to(dtype), torch.arange(9)
    if "kept" in options:
        ids = torch.arange(9)[:, None] + torch.arange(0, 50, 10)
        options = {"kept": logprobs.KeptSets.of_counts(ids.flatten(), torch.full((9,), 5))}
    known: list[torch.Tensor] = []

    def outcome(**more: Any) -> list[torch.Tensor]:
        given = logits.clone().requires_grad_()
        said, entropies = logprobs.token_logprobs(given, targets, chunk_tokens=4, **options, **more)
        (said.sum() + 0.3 * entropies.square().sum()).backward()
        assert given.grad is not None
        return [said.detach(), entropies.detach(), given.grad]

    plain, first = outcome(), outcome(known=known)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "_facts", None)
        second = outcome(known=known)
    for found in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.in_turn
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16])
@pytest.mark.more
def test_compiled_it_is_the_same(dtype: torch.dtype) -> None:
    targets, found = torch.arange(9), []
    for compiled in (False, True):
        logits = torch.randn(9, 64, generator=torch.manual_seed(0)).to(dtype).requires_grad_()
        said, entropies = logprobs.token_logprobs(logits, targets, temperature=0.7, chunk_tokens=4, compiled=compiled)
        (said.sum() + 0.3 * entropies.square().sum()).backward()
        assert logits.grad is not None
        found.append((said.detach(), entropies.detach(), logits.grad.float()))
    for other, plain in zip(*reversed(found), strict=True):
        assert_close(other, plain, atol=1e-5 if dtype == torch.float32 else 0.02)
