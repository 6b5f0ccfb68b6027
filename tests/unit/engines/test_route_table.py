"""The experts that the hf engine reports, against transformers' own forward passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrlhf.engines.engine import CacheMode, named_weights
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.errors import ConfigError
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.mixtures import FAMILIES, mixture, own_routes
from tests.unit.learner.worlds import llama


def request(number: int, prompt: Prompt, length: int) -> GenerationRequest:
    return GenerationRequest(number, number // 3, prompt, number, SamplingParams(max_completion_length=length))


def finished(engine: HFEngine) -> list[Rollout]:
    made: list[Rollout] = []
    while engine.in_flight():
        made += [found for found in engine.step(0.0).finished if isinstance(found, Rollout)]
    return sorted(made, key=lambda rollout: rollout.rollout_id)


def told(rollout: Rollout, layers: int) -> np.ndarray:
    assert rollout.routed_experts is not None
    return np.sort(rollout.routed_experts.reshape(len(rollout.routed_experts), layers, -1), axis=2)


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "deepseek_v3"])
@pytest.mark.more_but(every=2)
def test_the_experts_told_are_those_of_one_pass_over_the_text(kind: str) -> None:
    """With siblings that share a prefill, rows taken again, moved, and copied from an earlier sibling, and prompts of
    one token."""
    model = mixture(kind)
    engine = HFEngine(mixture(kind), slots=4, routes=True)
    draws = np.random.default_rng(0)
    prompts = [Prompt(str(i), "", draws.integers(1, 96, size)) for i, size in enumerate((5, 1, 9, 12))]
    engine.submit([request(i, prompts[i // 3], int(draws.integers(1, 14))) for i in range(12)])
    made = finished(engine)
    assert len(made) == 12
    for rollout in made:
        text = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])[:-1]
        assert np.array_equal(told(rollout, 3), own_routes(model, text))


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_tokens_keep_the_experts_under_which_they_were_sampled(cache: CacheMode) -> None:
    """A load in mid-response: tokens before it keep their experts, though ``recompute`` passes them once more; the
    first layer's experts of later tokens are those of the new weights."""
    before, after = mixture(seed=0), mixture(seed=1)
    engine = HFEngine(mixture(seed=0), slots=2, routes=True)
    prompt = Prompt("0", "", np.arange(1, 7))
    engine.submit([request(0, prompt, 12), request(1, prompt, 12)])
    for _ in range(5):
        engine.step(0.0)
    engine.load_weights(1, named_weights(after), cache)
    for rollout in finished(engine):
        text = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])[:-1]
        found, old = told(rollout, 3), own_routes(before, text)
        passed = 6 + int((rollout.policy_versions == 0).sum()) - 1  # the last of them is the first new input
        assert np.array_equal(found[:passed], old[:passed])
        assert not np.array_equal(found[passed:], old[passed:])
        # The first layer's experts follow from the token and its keys and values, which "recompute" makes anew.
        if cache == "recompute":
            assert np.array_equal(found[passed:, 0], own_routes(after, text)[passed:, 0])


def test_without_the_setting_nothing_is_told_and_a_dense_model_is_refused() -> None:
    engine = HFEngine(mixture(), slots=1)
    engine.submit([request(0, Prompt("0", "", np.arange(1, 4)), 3)])
    assert finished(engine)[0].routed_experts is None
    with pytest.raises(ConfigError, match=r"learner\.routing_replay=true needs a mixture of experts"):
        HFEngine(llama(), slots=1, routes=True)


def test_scoring_between_steps_leaves_the_experts_alone() -> None:
    model, engine = mixture(), HFEngine(mixture(), slots=1, routes=True)
    engine.submit([request(0, Prompt("0", "", np.arange(1, 4)), 6)])
    engine.step(0.0)
    engine.score([np.arange(20)])
    rollout = finished(engine)[0]
    text = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])[:-1]
    assert np.array_equal(told(rollout, 3), own_routes(model, torch.from_numpy(text).numpy()))
