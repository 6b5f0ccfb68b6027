"""The hf engine's passes by the model's own forward, in many families, against plain passes over each sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrlhf.engines.hf import hf_engine as hf
from asyncrlhf.engines.hf import own_cache
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.engines.hf.own_cache import OwnCachePasses
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.numeric import FLOAT32, assert_close
from tests.unit.engines.families import FAMILIES, UNCACHED, VOCABULARY, family

STATEFUL = ["mamba", "falcon_h1", "lfm2", "minimax", "qwen3_next"]


def make_engine(
    model: PreTrainedModel, slots: int, monkeypatch: pytest.MonkeyPatch, *, caches: bool = True
) -> HFEngine:
    monkeypatch.setattr(hf, "find_passes", lambda model, slots, *_: (OwnCachePasses(model, caches=caches), ""))
    return HFEngine(model, slots=slots)


def make_requests(prompts: list[int], siblings: int, most: int, **sampling: Any) -> list[GenerationRequest]:
    """Siblings of each prompt in a row; each response has another length up to ``most``."""
    rng = np.random.default_rng(0)
    texts = [Prompt("", "", rng.integers(1, VOCABULARY, length)) for length in prompts]
    lengths = 1 + (5 * np.arange(len(texts) * siblings)) % most
    return [
        GenerationRequest(i, i // siblings, texts[i // siblings], 7 + i, SamplingParams(int(length), **sampling))
        for i, length in enumerate(lengths)
    ]


def run(engine: HFEngine, requests: list[GenerationRequest], steps: int | None = None) -> dict[int, Rollout]:
    engine.submit(requests)
    done: dict[int, Rollout] = {}
    while engine.in_flight() and steps != 0:
        for result in engine.step(0.0).finished:
            assert isinstance(result, Rollout), result
            done[result.rollout_id] = result
        steps = None if steps is None else steps - 1
    return done


@torch.no_grad()
def plain(model: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """Log-probs of the response by one pass over the whole text, alone and without a cache."""
    text = torch.from_numpy(np.concatenate([rollout.prompt.token_ids, rollout.response_ids]))
    logits = model(text[None], use_cache=False).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
    return picked(logits, rollout.response_ids)


def picked(logits: torch.Tensor, ids: np.ndarray) -> np.ndarray:
    return logits.log_softmax(-1).gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()


@pytest.mark.in_turn
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.more_but(every=4)
def test_behavior_logprobs_equal_a_plain_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With siblings, prompts of one token, rows that are taken again, rows that move, and texts beyond any window."""
    requests = make_requests([5, 1, 9, 1, 17, 4], siblings=3, most=12)
    model = family(name)
    done = run(make_engine(model, 5, monkeypatch, caches=name not in UNCACHED), requests)
    assert len(done) == len(requests)
    for rollout in done.values():
        assert_close(rollout.behavior_logprobs, plain(model, rollout), atol=FLOAT32)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in UNCACHED])
@pytest.mark.more_but(every=4)
def test_greedy_tokens_equal_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests([4, 2, 11], siblings=2, most=10, temperature=0.0)
    model = family(name)
    done = run(make_engine(model, 3, monkeypatch), requests)
    for request in requests:
        prompt = torch.from_numpy(request.prompt_ids)[None]
        length = request.sampling.max_completion_length
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=False)
        np.testing.assert_array_equal(done[request.rollout_id].response_ids, made[0, prompt.shape[1] :].numpy())


@pytest.mark.parametrize("name", STATEFUL)
def test_after_a_recompute_logprobs_are_those_of_the_new_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests([5, 1, 9], siblings=2, most=12)
    old, new = family(name), family(name, seed=1)
    engine = make_engine(family(name), 4, monkeypatch)
    done = run(engine, requests, steps=4)
    engine.load_weights(1, dict(new.named_parameters()), "recompute")
    done |= run(engine, [])
    for rollout in done.values():
        expected = np.where(rollout.policy_versions == 0, plain(old, rollout), plain(new, rollout))
        assert_close(rollout.behavior_logprobs, expected, atol=FLOAT32)
    assert sum(len(set(rollout.policy_versions.tolist())) > 1 for rollout in done.values()) >= 3


@torch.no_grad()
def on_a_kept_cache(models: list[PreTrainedModel], rollout: Rollout, change: int) -> np.ndarray:
    """Log-probs of the response of a row alone, whose first ``change`` tokens the first model sampled, and the others
    the second one behind the first one's cache."""
    text = torch.from_numpy(np.concatenate([rollout.prompt.token_ids, rollout.response_ids]))[None]
    known = len(rollout.prompt.token_ids) + change - 1  # tokens in the cache at the update
    first = models[0](text[:, :known], use_cache=True)
    logits, cache = [first.logits[0]], {"cache_params" if "cache_params" in first else "past_key_values": None}
    [name] = cache
    cache[name] = first[name]
    for place in range(known, text.shape[1] - 1):
        positions = {} if name == "cache_params" else {"position_ids": torch.tensor([[place]])}
        logits.append(models[1](text[:, place : place + 1], use_cache=True, **cache, **positions).logits[0])
    return picked(torch.cat(logits)[len(rollout.prompt.token_ids) - 1 :], rollout.response_ids)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_kept_cache_goes_on_under_the_new_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    prompts = [Prompt("", "", rng.integers(1, VOCABULARY, length)) for length in (5, 9, 3)]
    requests = [GenerationRequest(i, i // 2, prompts[i // 2], i, SamplingParams(8 + i)) for i in range(6)]
    models = [family(name), family(name, seed=1)]
    engine = make_engine(family(name), 6, monkeypatch)
    done = run(engine, requests, steps=3)
    engine.load_weights(1, dict(models[1].named_parameters()), "keep")
    done |= run(engine, [])
    for rollout in done.values():
        assert rollout.policy_versions.tolist() == [0] * 3 + [1] * (len(rollout.response_ids) - 3)
        assert_close(rollout.behavior_logprobs, on_a_kept_cache(models, rollout, 3), atol=FLOAT32)
        assert np.abs(rollout.behavior_logprobs - plain(models[1], rollout))[3:].max() > 1e-2


def test_rows_go_on_after_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, model = make_requests([5, 1, 9], siblings=2, most=12), family("falcon_h1")
    engine = make_engine(model, 4, monkeypatch)
    done = run(engine, requests, steps=3)
    engine.sleep()
    assert not engine._passes._kept
    engine.wake()
    done |= run(engine, [])
    for rollout in done.values():
        assert_close(rollout.behavior_logprobs, plain(model, rollout), atol=FLOAT32)


def test_siblings_share_one_pass_over_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    own_pass = own_cache.own_pass

    def counted(model: Any, tokens: np.ndarray, **given: Any) -> Any:
        sizes.append(tokens.shape)
        return own_pass(model, tokens, **given)

    monkeypatch.setattr(own_cache, "own_pass", counted)
    requests = [
        GenerationRequest(i, i // 3, Prompt("", "", np.arange(1, 9) + i // 3), i, SamplingParams(2)) for i in range(6)
    ]
    run(make_engine(family("mamba"), 6, monkeypatch), requests)
    assert sizes == [(2, 7), (6, 1), (6, 1)]


@pytest.mark.parametrize("name", ["falcon_h1", "gpt_neo"])
def test_scores_equal_a_plain_pass_while_rows_are_in_flight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    texts = [rng.integers(1, VOCABULARY, length) for length in (7, 2, 40, 1)]
    model = family(name)
    engine = make_engine(model, 3, monkeypatch)
    done = run(engine, make_requests([4, 8], siblings=2, most=9), steps=3)
    for text, score in zip(texts, engine.score(texts), strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(text)[None], use_cache=False).logits[0, :-1]
        assert_close(score, picked(logits, text[1:]), atol=FLOAT32)
    for rollout in (done | run(engine, [])).values():
        assert_close(rollout.behavior_logprobs, plain(model, rollout), atol=FLOAT32)
