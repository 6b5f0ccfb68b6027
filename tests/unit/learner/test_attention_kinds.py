"""Every kind of attention: the learner's passes against transformers' own eager attention.

A further kind is one line of ``KINDS``, which pass packed, or of ``ALONE``, which pass one sequence at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    Gemma2Config,
    GptOssConfig,
    GraniteSWAConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    VaultGemmaConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrlhf.data.packing import select
from asyncrlhf.learner.attention import tiles
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.model.model_pass import checkpoint_layers
from asyncrlhf.learner.step.wall import choose_policy
from asyncrlhf.types import TrainBatch
from tests.numeric import assert_close
from tests.unit.engines.families import family
from tests.unit.learner.worlds import VOCABULARY, from_config, plain_logprobs, random_batch

STEPS = 20
WINDOW = 4  # of samples with up to 35 tokens
GQA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "initializer_range": 0.3, "pad_token_id": None,
}  # fmt: skip
# Caps near the size of the scores, and a scale that is not the head's size.
CAPPED = {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 5, "sliding_window": WINDOW}
KINDS: dict[str, Callable[[], PretrainedConfig]] = {
    "full": lambda: LlamaConfig(**GQA),
    "sliding window": lambda: MistralConfig(**GQA, sliding_window=WINDOW),
    "soft cap": lambda: VaultGemmaConfig(**GQA, **CAPPED, layer_types=["full_attention"] * 2),
    "soft cap and windows": lambda: Gemma2Config(**GQA, **CAPPED),
    "sinks": lambda: GraniteSWAConfig(**GQA, layer_types=["full_attention"] * 2),
    "sinks and windows": lambda: GptOssConfig(
        **GQA, sliding_window=WINDOW, num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager"
    ),
}
ALONE = {
    "alibi": "bloom",
    "alibi without an interface": "falcon",
    "chunks": "llama4_text",
    "state space": "mamba2",
    "state space and experts": "granitemoehybrid",
    "convolution": "lfm2",
    "linear attention": "minimax",
    "gated delta rule": "qwen3_next",
}


class InFloat64(TorchFunctionMode):
    """transformers computes norms and softmaxes in float32 whatever the model: here they are float64, like the rest."""

    @classmethod
    def within(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with cls():
                return function(*args, **kwargs)

        return called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        return func(*args, **{k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()})


def random_model(kind: str) -> PreTrainedModel:
    """In float64, with sinks that differ from head to head."""
    model = family(ALONE[kind]) if kind in ALONE else from_config(KINDS[kind]()).double()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def pair(kind: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(the learner's model, the same with transformers' eager attention)."""
    model = random_model(kind)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):  # the backward pass runs it again, outside of any mode
            layer.forward = InFloat64.within(layer.forward)
    return model, plain


def policy_of(model: PreTrainedModel, kind: str) -> Callable[[TrainBatch], torch.Tensor]:
    """The log-probs [M] of a batch as the learner computes them."""
    policy, _ = choose_policy(model)
    assert policy.packing is (kind not in ALONE)
    return lambda batch: policy(PackedInputs.of_batch(batch), 1.0).logprobs


def one_at_a_time(model: PreTrainedModel, batch: TrainBatch) -> torch.Tensor:
    rows = (select(batch, np.array([row])) for row in range(batch.num_sequences))
    return torch.cat([found for row in rows for found in plain_logprobs(model, row)])


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, how) for kind in KINDS for how in ("plain", "many tiles", "gradient checkpointing")]
    + [(kind, how) for kind in ALONE for how in ("plain", "gradient checkpointing")],
)
@pytest.mark.more_but(every=4)
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(
    kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = pair(kind)
    logprobs_of = policy_of(model, kind)
    if how == "gradient checkpointing":
        checkpoint_layers(model)
    if how != "plain":
        for name, value in (("RUN", 8), ("SHORTEST_RUN", 3), ("TILE", 32), ("TILE_SCORES", 400), ("KEPT_SCORES", 0)):
            monkeypatch.setattr(tiles, name, value)
    tiles._tiles.cache_clear()
    batch = random_batch(3, 3, longest=30)
    with InFloat64():
        found, expected = logprobs_of(batch), one_at_a_time(plain, batch)
        mixture = torch.randn(len(expected), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        for logprobs in (found, expected):
            (logprobs * mixture).sum().backward()
    assert_close(found, expected, rtol=0, atol=1e-10)
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    assert all(gradient.any() for name, gradient in wanted.items() if "sinks" in name)
    assert_close({name: p.grad for name, p in model.named_parameters()}, wanted, rtol=0, atol=0, of_largest=1e-10)


def curve(model: PreTrainedModel, logprobs_of: Callable[[TrainBatch], torch.Tensor]) -> list[float]:
    """The losses of policy gradients, minus the mean of advantage times log-prob; each batch is used once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        batch = random_batch(2, 3, seed=step, longest=30)
        lengths = np.add.reduceat(batch.response_mask.astype(np.int64), batch.cu_seqlens[:-1])
        advantages = torch.from_numpy(np.repeat(batch.rewards, lengths)).double()
        with InFloat64():
            loss = -(logprobs_of(batch) * advantages).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ALONE)])
@pytest.mark.more_but(every=3)
def test_twenty_steps_have_the_losses_of_a_padded_loop(kind: str) -> None:
    model, plain = pair(kind)
    found = curve(model, policy_of(model, kind))
    expected = curve(plain, lambda batch: torch.cat(plain_logprobs(plain, batch)))
    assert_close(found, expected, rtol=0, atol=1e-6)
    assert len(set(np.round(expected, 3))) > STEPS / 2  # the policy moves
