"""How the learner finds the right way to pass a model's sequences, and what it sees of wrong ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronConfig,
    OPTConfig,
    PretrainedConfig,
    SeedOssConfig,
)

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.attention.attention import PackedLayout
from asyncrlhf.learner.model import forward
from asyncrlhf.learner.model.model_pass import silence_dropout
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.step import wall
from asyncrlhf.learner.step.wall import choose_policy
from asyncrlhf.learner.torch_backend import TorchBackend
from tests.numeric import assert_close
from tests.unit.engines.families import family
from tests.unit.learner.ranks import run_ranks
from tests.unit.learner.test_presets import preset
from tests.unit.learner.worlds import SIZES, VOCABULARY, backend, from_config, llama, random_batch, share

STEPS = 3


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Faults are planted here: no family's result may come from, or reach, another test."""
    wall._family_ways.cache_clear()
    yield
    wall._family_ways.cache_clear()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lfm2", "change by .* with its neighbours' tokens"),
        ("granitemoehybrid", "change by .* with its neighbours' tokens"),
        ("minimax", "change by .* with its neighbours' tokens"),
        ("recurrent_gemma", "change by .* with its neighbours' tokens"),
        ("llama4_text", "log-probs are .* off the model's own pass"),
        ("bloom", "cannot be trained packed"),
        ("gptj", "cannot be trained packed"),
    ],
)
def test_a_family_whose_packed_sequences_differ_passes_one_at_a_time(name: str, why: str) -> None:
    policy, reason = choose_policy(family(name, dtype=torch.float32))
    assert not policy.packing
    assert re.search(why, reason), reason


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "opt"])
def test_a_family_that_can_be_packed_is(name: str) -> None:
    policy, reason = choose_policy(family(name, dtype=torch.float32))
    assert policy.packing and reason == ""


def test_a_model_that_keeps_the_layout_from_its_attention_passes_one_at_a_time() -> None:
    policy, reason = choose_policy(from_config(NemotronConfig(**SIZES, head_dim=8)))
    assert not policy.packing and "do not get the keyword arguments" in reason


def test_a_window_longer_than_any_affordable_text_is_seen_in_the_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Gemma 3, whose 512 tokens a large model's first pass cannot afford."""
    monkeypatch.setattr("asyncrlhf.models.plain_pass.AFFORDABLE", 0)
    config = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=512)
    assert choose_policy(from_config(config))[0].packing
    attend = PackedLayout.attend

    def blind(self: PackedLayout, *given: Any) -> Any:
        *tensors, scoring = given
        return attend(self, *tensors, scoring._replace(window=None))

    monkeypatch.setattr(PackedLayout, "attend", blind)
    policy, reason = choose_policy(from_config(config))
    assert not policy.packing and "off the model's own pass" in reason


DROPS: list[PretrainedConfig] = [
    OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, dropout=0.1,
        max_position_embeddings=64, word_embed_proj_dim=32,
    ),
    SeedOssConfig(**SIZES, head_dim=8, residual_dropout=0.1, attention_dropout=0.1),
    MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.5),
]  # fmt: skip


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config", DROPS, ids=lambda config: config.model_type)
def test_chance_is_off_in_steps(config: PretrainedConfig, checkpointing: bool) -> None:
    """Families that call ``torch.nn.functional.dropout`` have no module that could be switched off; the noise of a
    router has another name."""
    trained = [
        backend(learner=LearnerConfig(learning_rate=1e-2, gradient_checkpointing=checkpointing), model=model)
        for model in (from_config(config), from_config(config))
    ]
    for seed, one in enumerate(trained):
        torch.manual_seed(seed)
        one.train_step(random_batch())
    for name, tensor in trained[0].parameters().items():
        assert torch.equal(tensor, trained[1].parameters()[name]), name


def test_dropout_that_stays_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def left_on(model: torch.nn.Module) -> None:
        silence_dropout(model)
        for module in model.modules():
            if hasattr(module, "dropout"):
                module.dropout, module.training = 0.1, True

    monkeypatch.setattr(forward, "silence_dropout", left_on)
    with pytest.raises(ConfigError, match=r"OPTForCausalLM cannot be trained: .*; one sequence at a time with"):
        choose_policy(from_config(DROPS[0]))


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    with pytest.raises(ConfigError, match="BertLMHeadModel does not generate text from left to right"):
        choose_policy(from_config(BertConfig(**sizes)))


def test_what_is_asked_for_is_taken_or_refused() -> None:
    assert choose_policy(llama(), packing=True)[0].packing
    assert not choose_policy(llama(), packing=False)[0].packing
    with pytest.raises(ConfigError, match=r"cannot be trained with learner\.packing=true: packed sequences: Bloom"):
        choose_policy(family("bloom", dtype=torch.float32), packing=True)
    with pytest.raises(ConfigError, match=r"sequence_parallel_size=2 needs packed sequences.*learner\.packing=false"):
        LearnerConfig(packing=False, backend="deepspeed", ranks=2, sequence_parallel_size=2)
    with pytest.raises(ConfigError, match=r"routing_replay needs packed sequences"):
        LearnerConfig(packing=False, routing_replay=True)
    spread = {"ranks": 2, "context_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"context_parallel_size=2 needs packed sequences.*neighbours' tokens"):
        wall.learner_policy(family("lfm2", dtype=torch.float32), LearnerConfig(**spread), AlgorithmConfig())


def test_nothing_of_the_comparison_stays() -> None:
    model, random_state = llama(), torch.get_rng_state()
    before = copy.deepcopy(model.state_dict())
    choose_policy(model)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_steps_of_one_sequence_at_a_time_are_packed_ones(algorithm: str) -> None:
    """Policy, reference, critic and their gradients, with prompts that siblings share."""
    found = []
    for packing in (True, False):
        config = LearnerConfig(learning_rate=1e-3, token_budget=40, packing=packing)
        chosen = preset(algorithm)
        reference = llama(1) if chosen.needs_reference else None
        trained = backend(chosen, config, model=llama(), reference=reference)
        metrics = [trained.train_step(random_batch(seed=seed)).metrics for seed in range(STEPS)]
        found.append((trained.parameters(), metrics))
    for name, tensor in found[0][0].items():
        assert_close(found[1][0][name], tensor, atol=2e-5, rtol=0, what=name)
    for packed, alone in zip(found[0][1], found[1][1], strict=True):
        assert packed.keys() == alone.keys()
        assert_close(alone["loss"], packed["loss"], atol=1e-5, rtol=1e-4, what="loss")


def sharded(rank: int, ranks: int, settings: dict[str, Any]) -> tuple[bool, dict[str, np.ndarray]]:
    # Widths that two ranks can divide, and shares with different numbers of sequences.
    config = LearnerConfig(ranks=ranks, learning_rate=1e-3, token_budget=30, **settings)
    spec = BackendSpec(learner=config, algorithm=AlgorithmConfig(), steps=10)
    trained = TorchBackend(family("lfm2", dtype=torch.float32), spec, rank=rank, ranks=ranks)
    for seed in range(STEPS):
        trained.train_step(share(random_batch(3, 3, seed=seed), rank, ranks))
    found = {name: tensor.float().numpy().copy() for name, tensor in trained.parameters().items()}
    return trained.policy.packing, found


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="ddp", marks=pytest.mark.thorough),
        pytest.param({"sharding": "fsdp2"}, id="fsdp2"),
        pytest.param({"backend": "deepspeed", "zero_stage": 3}, id="zero3", marks=pytest.mark.thorough),
    ],
)
def test_two_ranks_that_pass_one_sequence_at_a_time_train_as_one(settings: dict[str, Any]) -> None:
    packing, alone = sharded(0, 1, {})
    assert not packing
    (two_packing, found), _ = run_ranks(sharded, 2, 2, settings)
    assert not two_packing
    for name, tensor in alone.items():
        assert_close(found[name], tensor, atol=1e-4, rtol=0, what=name)


def test_a_layout_whose_packed_passes_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last check, of ranks that hold parts of a model."""

    class Leaking:
        dtype = torch.float32

        def score(self, policy: Any, texts: list[np.ndarray], token_budget: int) -> list[np.ndarray]:
            return [np.full(len(text) - 1, 0.01 * len(texts), np.float32) for text in texts]

    texts = [np.arange(n) for n in (5, 9, 12)]
    passes: Any = Leaking()
    with pytest.raises(ConfigError, match=r"in this layout over the ranks: .* differ by 0\.02"):
        wall.check_shards(passes, None, texts, 40)


def test_a_small_model_that_cannot_be_built_leaves_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall.Family, "small", lambda family: None)
    assert choose_policy(from_config(LlamaConfig(**SIZES)))[0].packing
    assert not choose_policy(family("lfm2", dtype=torch.float32))[0].packing
