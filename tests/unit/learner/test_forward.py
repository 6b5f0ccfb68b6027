"""The packed forward pass against transformers' own padded one, for several model families."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    MistralConfig,
    NemotronConfig,
    PretrainedConfig,
    Qwen3Config,
)

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.model import forward
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.types import TrainBatch
from tests.numeric import assert_close
from tests.unit.learner.worlds import VOCABULARY, assert_same, from_config, llama, plain_logprobs, random_batch

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
GQA = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "gpt_neox": GPTNeoXConfig(**SMALL),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
    "qwen3": Qwen3Config(**GQA),
    "sliding window": MistralConfig(**GQA, sliding_window=4),
    "scaled logits": GraniteConfig(**GQA, logits_scaling=3.0),
}


def inputs_of(batch: TrainBatch) -> PackedInputs:
    return PackedInputs.build(batch.token_ids, batch.cu_seqlens, batch.response_mask)


def compare(model: torch.nn.Module, batch: TrainBatch, temperature: float) -> None:
    """Log-probs, and the gradient of a random combination of them, packed against padded.

    In float64, for these models amplify float32's rounding up to three hundredfold. transformers computes the norms in
    float32 whatever the model, which leaves gradients of 2e-7.
    """
    model = model.double()
    plain = copy.deepcopy(model).train(False)
    policy = PackedPolicy(model)
    logprobs, entropies = policy(inputs_of(batch), temperature)[:2]
    expected = torch.cat(plain_logprobs(plain, batch, temperature))
    assert_close(logprobs, expected, atol=1e-6)
    assert (entropies > 0).all() and (entropies <= np.log(VOCABULARY) + 1e-4).all()
    mixture = torch.randn(len(expected), generator=torch.Generator().manual_seed(3)).double()
    (logprobs * mixture).sum().backward()
    (expected * mixture).sum().backward()
    assert_same(
        {name: p.grad for name, p in model.named_parameters()},
        {name: p.grad for name, p in plain.named_parameters()},
        tolerance=2e-6,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_llama_packed_equals_padded(temperature: float) -> None:
    compare(llama(), random_batch(), temperature)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_packed_equals_padded(family: str) -> None:
    config: PretrainedConfig = FAMILIES[family]
    compare(from_config(config), random_batch(3, 2, seed=1), 1.0)


def test_equal_lengths_agree_too() -> None:
    batch = random_batch(3, 2)
    lengths = np.full(4, 6)
    ids = batch.token_ids[:24].copy()
    ids[::6] = np.arange(4)  # four different prompts
    predicted = np.tile(np.arange(6) > 1, 4)
    inputs = PackedInputs.build(ids, np.concatenate([[0], np.cumsum(lengths)]), predicted)
    model = llama().double()
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids).view(4, 6)).logits.log_softmax(-1)[:, 1:-1]
        expected = expected.gather(-1, torch.from_numpy(ids).view(4, 6)[:, 2:, None]).flatten()
        assert_close(PackedPolicy(model)(inputs, 1.0)[0], expected, atol=1e-6)


def test_a_large_vocabulary_goes_through_the_head_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, batch = llama().double(), llama().double(), random_batch()
    whole = PackedPolicy(model)(inputs_of(batch), 0.8)
    monkeypatch.setattr(forward, "MAX_LOGITS", 3 * VOCABULARY)
    parts = PackedPolicy(other)(inputs_of(batch), 0.8)
    for logprobs, entropies, *_ in (whole, parts):
        (logprobs.square().sum() + entropies.sum()).backward()
    assert_close(whole[0], parts[0], atol=1e-6)
    assert_close(whole[1], parts[1], atol=1e-6)
    assert_same({n: p.grad for n, p in other.named_parameters()}, {n: p.grad for n, p in model.named_parameters()})


def test_a_prompt_of_siblings_is_computed_once() -> None:
    prompt, replies = [3, 1, 4, 1], ([5], [9, 2], [5, 6, 5])
    ids = np.array([token for reply in replies for token in (*prompt, *reply)])
    predicted = np.array([flag for reply in replies for flag in [False] * 4 + [True] * len(reply)])
    inputs = PackedInputs.build(ids, np.array([0, 5, 11, 18]), predicted)
    assert inputs.token_ids.tolist() == [[3, 1, 4, 1, 9, 5, 6]]
    assert inputs.layout.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 5]]
    assert inputs.targets.tolist() == [5, 9, 2, 5, 6, 5]
    assert inputs.rows.tolist() == [3, 3, 4, 3, 5, 6]


def test_dropout_is_off() -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0.5, embd_pdrop=0.5)
    policy, batch = PackedPolicy(from_config(config)).train(), random_batch()
    assert torch.equal(policy(inputs_of(batch), 1.0)[0], policy(inputs_of(batch), 1.0)[0])


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4), "cannot be trained packed"),
        (NemotronConfig(**GQA), "do not get the keyword arguments"),
    ],
)
def test_models_that_cannot_be_packed_are_refused(config: PretrainedConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        PackedPolicy(from_config(config))
