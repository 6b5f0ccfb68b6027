"""Routing replay: each token passes the experts that came with the batch, in every pass of the policy and in no other
model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrlhf.data.packing import pack
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.step.routing_replay import RoutingReplay
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.types import TrainBatch
from tests.mixtures import FAMILIES, mixture, own_routes, random_routes
from tests.numeric import assert_close
from tests.unit.learner.worlds import VOCABULARY, samples

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY}


def batch_with_routes(kind: str = "qwen3_moe", seed: int = 0) -> TrainBatch:
    """Random experts, but 0 in layers that have none, and on the last token of each sequence."""
    batch = pack(samples(seed=seed))
    routes = random_routes(batch, 3, 8, 2, seed)
    if kind == "qwen3_moe":
        routes[:, 2:4] = 0
    if kind == "deepseek_v3":
        routes[:, :2] = 0
    routes[batch.cu_seqlens[1:] - 1] = 0
    return replace(batch, routed_experts=routes)


class OneExpertAtATime(nn.Module):
    """In place of a layer's block: the experts of ``routes`` [T, chosen], one token after the other, weighed by the
    router's softmax over all experts, normalised over those of the token."""

    def __init__(self, block: Any, routes: torch.Tensor, normalised: bool) -> None:
        super().__init__()
        self.block, self.routes, self.normalised = block, routes, normalised

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden[0]
        scores = (flat @ self.block.gate.weight.T).softmax(-1)
        out = []
        for state, given, mine in zip(flat, scores, self.routes, strict=True):
            weights = given[mine]
            weights = weights / weights.sum() if self.normalised else weights
            total = torch.zeros_like(state)
            for weight, expert in zip(weights, mine, strict=True):
                experts = self.block.experts
                gate, up = (experts.gate_up_proj[expert] @ state).chunk(2)
                total = total + weight * (experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
            out.append(total)
        return torch.stack(out)[None]


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_log_probs_and_gradients_are_those_of_the_experts_given(kind: str) -> None:
    """Against one sequence at a time through transformers' own model, whose blocks take the experts from the batch."""
    batch = batch_with_routes(kind)
    assert batch.routed_experts is not None
    calm = SIZES | {"initializer_range": 0.15}  # norms and routers compute in float32, whatever the weights
    model = mixture(kind, **calm).double()
    model.set_experts_implementation("eager")  # the grouped products know no float64
    RoutingReplay(model)
    found = PackedPolicy(model)(PackedInputs.of_batch(batch), 1.0).logprobs
    found.square().sum().backward()

    plain = mixture(kind, **calm).double()
    with_experts = [0, 2] if kind == "qwen3_moe" else [0, 1, 2]
    total = []
    blocks = {place: plain.model.layers[place].mlp for place in with_experts}
    for first, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        routes = torch.from_numpy(batch.routed_experts[first:end].astype(np.int64)).view(end - first, 3, 2)
        for place, block in blocks.items():
            plain.model.layers[place].mlp = OneExpertAtATime(block, routes[:, place], kind != "olmoe")
        ids = torch.from_numpy(batch.token_ids[first:end])
        logprobs = plain(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        here = torch.from_numpy(batch.response_mask[first:end])
        total.append(logprobs.gather(1, ids[1:, None])[:, 0][here[1:]])
    for place, block in blocks.items():
        plain.model.layers[place].mlp = block
    wanted = torch.cat(total)
    assert_close(found.detach(), wanted.detach(), atol=1e-5, what="log-probs")
    wanted.square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4, what=name)


def backend(
    algorithm: AlgorithmConfig | None = None, model: PreTrainedModel | None = None, **learner: Any
) -> TorchBackend:
    config = LearnerConfig(**({"learning_rate": 1e-3, "routing_replay": True} | learner))
    spec = BackendSpec(learner=config, algorithm=algorithm or AlgorithmConfig(), steps=10)
    reference = mixture(**SIZES) if spec.algorithm.needs_reference else None
    return TorchBackend(model or mixture(**SIZES), spec, reference=reference)


def stepped(**settings: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    trained = backend(**settings)
    metrics = [trained.train_step(batch_with_routes(seed=seed)).metrics for seed in range(2)][-1]
    return metrics, {name: tensor.clone() for name, tensor in trained.parameters().items()}


@pytest.mark.parametrize(
    "other", [{"gradient_checkpointing": True}, {"token_budget": 12}], ids=["checkpointed", "split"]
)
def test_experts_hold_in_passes_that_are_made_again_and_in_small_ones(other: dict[str, Any]) -> None:
    """Under gradient checkpointing a layer's second pass follows the same experts, and prompts that only differ in
    their experts are not merged: else the gradient would depend on the microbatches."""
    metrics, weights = stepped()
    again, found = stepped(**other)
    assert_close(again["grad_norm"], metrics["grad_norm"], rtol=1e-4, what="gradient's norm")
    for name, tensor in weights.items():
        assert_close(found[name], tensor, atol=1e-5, what=name)


def test_other_models_choose_for_themselves() -> None:
    """The reference, the critic and the target network have no generator whose experts they could follow."""
    kl = AlgorithmConfig(kl="loss", beta=0.1, advantage="gae", anchor="ema", ema_decay=0.9)
    trained = backend(kl)
    inputs = PackedInputs.of_batch(batch_with_routes())
    free = PackedPolicy(mixture(**SIZES))(inputs, 1.0).logprobs
    assert trained.reference is not None and trained.ema is not None and trained.critic is not None
    with torch.no_grad():
        for policy in (trained.reference, trained.ema):
            assert_close(policy(inputs, 1.0).logprobs, free, atol=1e-6, what="another policy")
        assert (trained.policy(inputs, 1.0).logprobs - free).abs().max() > 0.1
        before = trained.critic(inputs)
        bare = replace(batch_with_routes(), routed_experts=None)
        assert_close(trained.critic(PackedInputs.of_batch(bare)), before, atol=1e-6, what="values")
    trained.train_step(batch_with_routes())


def test_the_share_of_changed_routes_is_counted() -> None:
    """0 with the policy's own experts, whatever their order; 1 with experts that it would never choose."""
    model = mixture(**SIZES)
    batch = pack(samples())
    routes = np.zeros((len(batch.token_ids), 3, 2), np.uint8)
    for first, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        routes[first:end] = own_routes(model, batch.token_ids[first:end])[:, :, ::-1]
    mine = replace(batch, routed_experts=routes.reshape(len(routes), 6))
    trained = backend(model=model)
    assert trained.train_step(mine).metrics["routes_changed"] == 0
    only = mixture(**SIZES, mlp_only_layers=[1, 2])  # in later layers the choice depends on what was imposed before
    routes = np.zeros_like(routes)
    for first, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        for token, own in enumerate(own_routes(only, batch.token_ids[first:end])[:, 0], start=first):
            routes[token, 0] = np.setdiff1d(np.arange(8), own)[:2]
    others = replace(batch, routed_experts=routes.reshape(len(routes), 6))
    assert backend(model=only).train_step(others).metrics["routes_changed"] == 1


def test_a_batch_without_experts_is_an_error() -> None:
    trained = backend()
    with pytest.raises(AsyncRLHFError, match=r"without its tokens' experts, which learner\.routing_replay follows"):
        trained.train_step(pack(samples()))
    with pytest.raises(ConfigError, match=r"routing_replay does not work with learner\.compile"):
        LearnerConfig(routing_replay=True, compile=True)
    with pytest.raises(ConfigError, match="of the kind phimoe do not"):
        backend(model=mixture("phimoe", num_local_experts=8, num_experts_per_tok=2, **SIZES))


def test_every_family_trains_by_the_experts_given() -> None:
    for kind in FAMILIES:
        metrics = backend(model=mixture(kind, **SIZES)).train_step(batch_with_routes(kind)).metrics
        assert np.isfinite(metrics["grad_norm"]) and metrics["routes_changed"] > 0.3, kind
