"""Log-probs, entropies and gradients over the sampled ids, against a plain pass in float64; and the hf engine's."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrlhf.algorithms.logprobs import KeptSets
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.learner.model import forward
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.step.companions import frozen_copy
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.models.vocabulary import limit_vocabulary
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.found import TOKENS, found
from tests.numeric import FLOAT32, assert_close
from tests.unit.learner.worlds import VOCABULARY, assert_same, llama, random_batch

ROWS = 50  # of the model; the batches of these tests have VOCABULARY ids


def policy(**options: bool) -> PackedPolicy:
    model = llama(vocab_size=ROWS).double()
    model.asyncrlhf_sampled_ids = VOCABULARY  # type: ignore[assignment]  # as ``limit_vocabulary`` notes it
    return PackedPolicy(model, **options)


def expected(model: torch.nn.Module, temperature: float) -> torch.Tensor:
    """Log-probs [M, VOCABULARY] of the batch's predicted positions, each sequence alone, by the first columns only."""
    batch, rows = random_batch(), []
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        ids = torch.from_numpy(batch.token_ids[start:end])
        logits = model(input_ids=ids[None]).logits[0, :, :VOCABULARY] / temperature
        rows.append(logits.log_softmax(-1)[:-1][torch.from_numpy(batch.response_mask[start + 1 : end])])
    return torch.cat(rows)


@pytest.mark.parametrize("chunks", [False, True])
def test_policies_are_distributions_over_the_sampled_ids(monkeypatch: pytest.MonkeyPatch, chunks: bool) -> None:
    ours, batch = policy(), random_batch()
    plain = llama(vocab_size=ROWS).double().train(False)
    if chunks:
        monkeypatch.setattr(forward, "MAX_LOGITS", 3 * ROWS)
    inputs = PackedInputs.of_batch(batch)
    facts = ours(inputs, 0.7)
    whole = expected(plain, 0.7)
    assert_close(facts.logprobs, (chosen := whole.gather(1, inputs.targets[:, None])[:, 0]), atol=1e-6)
    assert_close(facts.entropies, (entropies := -(whole.exp() * whole).sum(-1)), atol=1e-6)
    mixture = torch.randn(2, len(chosen), generator=torch.Generator().manual_seed(3)).double()
    (facts.logprobs * mixture[0] + facts.entropies * mixture[1]).sum().backward()
    (chosen * mixture[0] + entropies * mixture[1]).sum().backward()
    assert_same(
        {name: p.grad for name, p in ours.model.named_parameters()},
        {name: p.grad for name, p in plain.named_parameters()},
        tolerance=2e-6,
    )


def test_kept_sets_and_collisions_are_of_the_sampled_ids_too() -> None:
    ours, batch = policy(collision=True), random_batch()
    inputs = PackedInputs.of_batch(batch)
    with torch.no_grad():
        whole = expected(llama(vocab_size=ROWS).double().train(False), 1.0)
        assert_close(ours(inputs, 1.0).collision, whole.exp().square().sum(-1), atol=1e-6)
        sets = torch.stack([inputs.targets, (inputs.targets + 1) % VOCABULARY], dim=1)
        kept = KeptSets.of_counts(sets.flatten(), torch.full((len(sets),), 2))
        facts = ours(PackedInputs(inputs.token_ids, inputs.rows, inputs.targets, inputs.layout, kept), 1.0)
        among = whole.gather(1, sets)
        assert_close(facts.kept_mass, among.exp().sum(-1), atol=1e-6)
        assert_close(facts.logprobs, among[:, 0] - among.logsumexp(-1), atol=1e-6)


def test_the_slow_copy_leaves_out_the_same_ids() -> None:
    ours, inputs = policy(), PackedInputs.of_batch(random_batch())
    with torch.no_grad():
        slow = frozen_copy(ours, torch.device("cpu"))
        assert torch.equal(slow(inputs, 1.0).logprobs, ours(inputs, 1.0).logprobs)


def test_a_model_whose_ids_are_all_sampled_computes_the_same_bits() -> None:
    inputs, model = PackedInputs.of_batch(random_batch()), llama()
    before = PackedPolicy(model)(inputs, 0.7)
    noted = copy.deepcopy(model)
    noted.asyncrlhf_sampled_ids = VOCABULARY  # type: ignore[assignment]
    after = PackedPolicy(noted)(inputs, 0.7)
    assert torch.equal(before.stacked(), after.stacked())


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("top_k", [0, 4])
def test_the_hf_engine_samples_no_id_that_the_tokenizer_lacks(tmp_path: Path, penalty: float, top_k: int) -> None:
    config = found(tmp_path, rows=200)
    model = load_model(config)
    plain = copy.deepcopy(model)
    engine = HFEngine(model, slots=16, sampled=TOKENS)
    prompt = np.array(load_tokenizer(config)("1+2=").input_ids)
    sampling = SamplingParams(max_completion_length=12, temperature=1.3, top_k=top_k, repetition_penalty=penalty)
    engine.submit([GenerationRequest(i, 0, Prompt("", "", prompt), i, sampling) for i in range(32)])
    made: list[Rollout] = []
    while engine.in_flight():
        made += engine.step(0.0).finished  # type: ignore[arg-type]
    assert max(int(answer.response_ids.max()) for answer in made) < TOKENS
    text = np.concatenate([prompt, made[0].response_ids])
    with torch.no_grad():
        logits = plain(torch.from_numpy(text)[None]).logits[0, :-1, :TOKENS]
    scored = logits.log_softmax(-1).gather(1, torch.from_numpy(text)[1:, None])[:, 0]
    assert_close(engine.score([text])[0], scored.numpy(), rtol=0, atol=FLOAT32)
    if penalty == 1.0 and top_k == 0:
        own = (logits / 1.3).log_softmax(-1).gather(1, torch.from_numpy(text)[1:, None])[len(prompt) - 1 :, 0]
        assert_close(made[0].behavior_logprobs, own.numpy(), rtol=0, atol=FLOAT32)


def test_the_note_follows_from_the_checkpoint(tmp_path: Path) -> None:
    model = llama(vocab_size=200)
    limit_vocabulary(found(tmp_path, rows=200), model)
    assert PackedPolicy(model)._sampled == TOKENS
