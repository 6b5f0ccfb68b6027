"""Truncated sampling under vLLM: the kept sets that its log-probs tell, and ratios of 1 at equal weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.data.packing import pack
from asyncrlhf.engines.engine import named_weights
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.types import SamplingParams
from tests.truncated import renormalised, sampled, scored, sets_of
from tests.vllm_tiny import VOCABULARY, TinyVllm, needs_vllm

pytestmark = [*needs_vllm, pytest.mark.more]

TOP_K = SamplingParams(12, temperature=0.6, top_k=6)
# The float32 rounding of vLLM's forward pass and transformers'.
AGREE = 1e-4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyVllm]:
    running = TinyVllm(tmp_path_factory.mktemp("tiny"), tied=True)
    yield running
    running.close()


def own_weights(tiny: TinyVllm) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(tiny.model).items()}


@pytest.mark.in_turn
def test_under_top_k_alone_vllm_tells_what_was_kept(tiny: TinyVllm) -> None:
    engine = tiny.engine(4)
    engine.load_weights(0, own_weights(tiny), "recompute")
    for rollout in sampled(engine, TOP_K, VOCABULARY):
        text = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])
        with torch.no_grad():
            logits = tiny.model(torch.from_numpy(text)[None]).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
        sets = sets_of(rollout)
        assert sets == [set(row.topk(6).indices.tolist()) for row in logits]
        own = renormalised(logits, sets, 0.6).gather(1, torch.from_numpy(rollout.response_ids)[:, None])[:, 0]
        np.testing.assert_allclose(rollout.behavior_logprobs, own.numpy(), atol=AGREE)


@pytest.mark.in_turn
def test_tokens_that_tie_with_the_last_kept_one_are_told(tiny: TinyVllm) -> None:
    """Four tokens with one row in the tied head have one logit, to the bit."""
    engine = tiny.engine(4)
    weights = own_weights(tiny)
    embedding = weights["model.embed_tokens.weight"]
    embedding[4:8] = embedding[4]
    engine.load_weights(0, weights, "recompute")
    sizes = set()
    for rollout in sampled(engine, TOP_K, VOCABULARY):
        for kept in sets_of(rollout):
            assert kept & {4, 5, 6, 7} in (set(), {4, 5, 6, 7})
            sizes.add(len(kept))
    assert max(sizes) > 6 and min(sizes) == 6


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["decoupled_grpo", "tba"])
def test_ratios_are_1_at_equal_weights_under_top_k(tiny: TinyVllm, name: str) -> None:
    """And not without the sets. The tolerance is that between vLLM's forward pass and transformers' in float32."""
    engine = tiny.engine(4)
    engine.load_weights(0, own_weights(tiny), "recompute")
    batch = pack(scored(sampled(engine, TOP_K, VOCABULARY)))
    found = []
    for given in (batch, replace(batch, kept_ids=None, kept_counts=None)):
        algorithm = load_config([f"algorithm={name}"]).algorithm
        reference_model = copy.deepcopy(tiny.model) if algorithm.needs_reference else None
        learner = LearnerConfig(learning_rate=0.0)
        spec = BackendSpec(learner=learner, algorithm=algorithm, steps=1, temperature=0.6)
        trained = TorchBackend(copy.deepcopy(tiny.model), spec, reference=reference_model)
        found.append(trained.train_step(given).metrics)
    assert found[0]["behavior_log_ratio_abs_max"] < AGREE and found[0]["clip_fraction"] == 0
    assert found[1]["behavior_log_ratio_abs_max"] > 50 * AGREE and "truncation_mass" not in found[1]
    assert found[0]["truncation_mass"] < 1 - 50 * AGREE
