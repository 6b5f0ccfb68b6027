"""vLLM leaves out the ids that the tokenizer lacks: in what it samples, in its log-probs and in scored texts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from asyncrlhf.engines.engine import named_weights
from asyncrlhf.types import SamplingParams
from tests.truncated import renormalised, sampled, sets_of
from tests.vllm_tiny import VOCABULARY, TinyVllm, needs_vllm, own_logprobs

pytestmark = [*needs_vllm, pytest.mark.more]

SAMPLED = 14  # of VOCABULARY
AGREE = 1e-4  # the float32 rounding of vLLM's forward pass and transformers'


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyVllm]:
    running = TinyVllm(tmp_path_factory.mktemp("tiny"), sampled=SAMPLED)
    yield running
    running.close()


@pytest.mark.in_turn
@pytest.mark.parametrize("reloaded", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(24, temperature=1.3),
        SamplingParams(24, temperature=0.7, top_k=6),
        SamplingParams(24, temperature=0.0),
        SamplingParams(24, temperature=1.0, repetition_penalty=1.2),
    ],
    ids=["plain", "top_k", "greedy", "penalty"],
)
def test_only_the_sampled_ids_have_a_probability(tiny: TinyVllm, sampling: SamplingParams, reloaded: bool) -> None:
    engine = tiny.engine(4)
    if reloaded:
        engine.load_weights(1, {n: t.clone() for n, t in named_weights(tiny.model).items()}, "recompute")
    for rollout in sampled(engine, sampling, SAMPLED):
        assert int(rollout.response_ids.max()) < SAMPLED
        if sampling.repetition_penalty != 1 or not sampling.temperature:
            continue
        text = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])
        with torch.no_grad():
            logits = tiny.model(torch.from_numpy(text)[None]).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
        logits = logits[:, :SAMPLED]
        if sampling.top_k:
            levels = renormalised(logits, sets_of(rollout), sampling.temperature)
        else:
            levels = (logits / sampling.temperature).log_softmax(-1)
        own = levels.gather(1, torch.from_numpy(rollout.response_ids)[:, None])[:, 0]
        np.testing.assert_allclose(rollout.behavior_logprobs, own.numpy(), atol=AGREE)


@pytest.mark.in_turn
def test_scored_texts_are_of_the_same_distribution(tiny: TinyVllm) -> None:
    texts = [np.random.default_rng(seed).integers(0, SAMPLED, 30) for seed in range(3)]
    for text, found in zip(texts, tiny.engine(4).score(texts), strict=True):
        with torch.no_grad():
            logits = tiny.model(torch.from_numpy(text)[None]).logits[0]
        assert logits.shape[1] == VOCABULARY
        np.testing.assert_allclose(found, own_logprobs(logits[:, :SAMPLED], text), atol=AGREE)
