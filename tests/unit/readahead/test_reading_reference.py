"""A reference that reads ahead: whatever chunks came, each log-prob is that of the whole rollout's packed pass.

What it shares with a reward model, such as its cache, is in ``test_reading_model.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GraniteConfig, LlamaForCausalLM, MistralConfig

from asyncrlhf.learner.model import forward
from asyncrlhf.learner.step.companions import ReferencePolicy
from asyncrlhf.readahead.owners import Chunk
from asyncrlhf.readahead.readers import ReadingReference
from asyncrlhf.readahead.readings import Readings
from asyncrlhf.types import Rollout
from tests.numeric import assert_close
from tests.unit.learner.worlds import SIZES as LEARNER_SIZES
from tests.unit.learner.worlds import from_config, llama
from tests.unit.readahead.stories import PROMPTS, VOCABULARY, Story, pieces, stories
from tests.unit.rewards.worlds import rollout

TEMPERATURE = 0.7
SIZES = LEARNER_SIZES | {"vocab_size": VOCABULARY}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama(vocab_size=VOCABULARY).double()


@pytest.fixture(scope="module")
def whole(model: LlamaForCausalLM) -> ReferencePolicy:
    return ReferencePolicy(model, temperature=TEMPERATURE, precision="none", token_budget=4096)


def reader(model: Any, *, cache_tokens: int = 4096, **options: Any) -> ReadingReference:
    usual = {"temperature": TEMPERATURE, "precision": "none", "token_budget": 4096}
    return ReadingReference(model, cache_tokens=cache_tokens, **(usual | options))


def readings(reads: ReadingReference) -> Readings:
    assert reads.readings is not None
    return reads.readings


def mixed(count: int, length: int, prompts: int = 3) -> list[Rollout]:
    """Rollouts of so many prompts, no two alike."""
    ids = [[(3 * i + j) % VOCABULARY for j in range(length)] for i in range(count)]
    return [rollout(i, "", prompt_ids=PROMPTS[i % prompts], ids=ids[i]) for i in range(count)]


def assert_alike(found: Sequence[np.ndarray | str], expected: Sequence[np.ndarray | str]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            assert one == other
            continue
        assert one.dtype == np.float32
        assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.in_turn
@settings(max_examples=120, deadline=None)
@given(
    stories(), st.sampled_from([64, 128, 200, 4096]), st.integers(1, 80), st.integers(1, 6), st.sampled_from([0.7, 1.9])
)
@pytest.mark.more
def test_logprobs_are_those_of_whole_rollouts_whatever_came_before(
    model: LlamaForCausalLM, story: Story, cache_tokens: int, budget: int, size: int, temperature: float
) -> None:
    options = {"temperature": temperature, "token_budget": budget}
    whole = ReferencePolicy(model, precision="none", **options)  # type: ignore[arg-type]
    reads = reader(model, cache_tokens=cache_tokens, **options)
    for number, call in enumerate(story.calls):
        assert reads.prefill(story.released if number == 2 else [], call).taken
        assert readings(reads).held <= cache_tokens
    for start in range(0, len(story.order), size):
        done = [story.rollouts[i] for i in story.order[start : start + size]]
        assert_alike(reads.answer(done), whole.answer(done))
    assert readings(reads).held == 0, "what is answered is forgotten"


def test_a_cache_of_other_tokens_is_never_taken(model: LlamaForCausalLM, whole: ReferencePolicy) -> None:
    """A generator died, and another one sampled the rollout anew: to the same length, longer, shorter, or once more
    with chunks of its own."""
    old = rollout(0, "", prompt_ids=PROMPTS[0], ids=[3] * 12)
    for ids in ([3] * 5 + [4] * 7, [4] * 20, [3] * 5, [3] * 13):
        new = rollout(0, "", prompt_ids=PROMPTS[0], ids=ids)
        for told in (False, True):
            reads = reader(model)
            reads.prefill([], pieces(old, (6, 12)))
            if told:
                reads.prefill([], pieces(new, (4, len(ids) - 1)))
            assert_alike(reads.answer([new]), whole.answer([new]))


def test_a_whole_pass_without_room_gets_that_of_the_caches(
    model: LlamaForCausalLM, whole: ReferencePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, other = (rollout(i, "", prompt_ids=[3 + i], ids=[4, 5] * 5) for i in range(2))
    expected = whole.answer([other])
    reads = reader(model)
    original = ReferencePolicy._numbers

    def crowded(self: ReferencePolicy, batch: Sequence[Rollout]) -> list[np.ndarray]:
        if readings(reads).held:
            raise torch.OutOfMemoryError("no room")
        return original(self, batch)

    monkeypatch.setattr(ReferencePolicy, "_numbers", crowded)
    reads.prefill([], pieces(begun, (5,)))
    assert_alike(reads.answer([other]), expected)
    monkeypatch.setattr(readings(reads), "give_all_up", bool)
    readings(reads).release([0])
    reads.prefill([], pieces(begun, (5,)))
    (answer,) = reads.answer([other])
    assert "out of memory with 1 sequences of up to 11 tokens; lower reference.token_budget" in str(answer)


def test_under_autocast_the_cache_has_its_type_and_the_logprobs_are_near(whole: ReferencePolicy) -> None:
    model = llama(vocab_size=VOCABULARY)  # autocast leaves float64 alone
    done = mixed(6, 30)
    reads = reader(model, precision="bfloat16")
    low = ReferencePolicy(model, temperature=TEMPERATURE, precision="bfloat16", token_budget=4096)
    for cut in (9, 20):
        reads.prefill([], [p for r in done for p in pieces(r, (cut,))])
    caches = [reading.cache for reading in readings(reads)._readings.values() if reading is not None]
    held = [
        tensor
        for cache in caches
        for layer in (cache.layers if cache is not None else ())
        for tensor in (layer.keys, layer.values)
    ]
    assert len(caches) == 6 and {tensor.dtype for tensor in held} == {torch.bfloat16}
    found, packed, exact = (p.answer(done) for p in (reads, low, whole))
    noise = np.abs(np.concatenate(packed) - np.concatenate(exact))  # type: ignore[arg-type]
    apart = np.abs(np.concatenate(found) - np.concatenate(packed))  # type: ignore[arg-type]
    # Both carry bfloat16's rounding, .03 nats on average, of sums in other groups. A token read at another place is off
    # by whole nats, thirty times the first bound.
    assert apart.any()
    assert_close(apart.mean(), 0.0, atol=4 * noise.mean())
    assert_close(apart, np.zeros_like(apart), atol=8 * noise.max())


@pytest.mark.parametrize("scaling", [None, 3.0])
def test_logits_are_the_models_own_and_few_at_a_time(scaling: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the output layer is not all that makes the logits, the model's own forward is asked."""
    made = (
        llama(vocab_size=VOCABULARY) if scaling is None else from_config(GraniteConfig(**SIZES, logits_scaling=scaling))
    )
    whole = ReferencePolicy(made, temperature=TEMPERATURE, precision="none", token_budget=4096)
    assert whole._policy._plain_head == (scaling is None)
    done = mixed(3, 25, prompts=2)
    expected = whole.answer(done)
    reads = reader(made)
    monkeypatch.setattr(forward, "MAX_LOGITS", 4 * VOCABULARY)
    sizes: list[int] = []
    original = forward.token_logprobs

    def note(logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(len(logits))
        return original(logits, *arguments, **options)

    monkeypatch.setattr(forward, "token_logprobs", note)
    for cut in (11, 20):
        reads.prefill([], [p for r in done for p in pieces(r, (cut,))])
    assert_alike(reads.answer(done), expected)
    assert sum(sizes) == 3 * 25 and max(sizes) == 4
    assert "forward" not in vars(made.base_model)


def test_a_log_prob_that_is_no_number_is_a_failure() -> None:
    broken = llama(vocab_size=VOCABULARY, tie_word_embeddings=False)
    reads = reader(broken)
    with torch.no_grad():
        broken.get_input_embeddings().weight[9] = torch.nan
    bad, good = rollout(0, "", prompt_ids=[3], ids=[4, 9, 4, 4]), rollout(1, "", prompt_ids=[3], ids=[4, 4, 4, 4])
    reads.prefill([], [p for r in (bad, good) for p in pieces(r, (3,))])
    answers = reads.answer([bad, good])
    assert "not all finite" in str(answers[0]) and isinstance(answers[1], np.ndarray)


def test_a_rollout_that_cannot_be_scored_fails_alone(model: LlamaForCausalLM) -> None:
    """Chunks that speak of no prompt, and a response that turned out to be empty."""
    reads = reader(model)
    empty, fine = rollout(0, "", prompt_ids=[3], ids=[]), rollout(1, "", prompt_ids=[3], ids=[4, 5])
    odd = rollout(2, "", prompt_ids=[], ids=[4, 5])
    reads.prefill([], [Chunk(0, 0, 1, [3]), *pieces(fine, (1,)), Chunk(2, 0, 0, [4])])
    answers = reads.answer([empty, fine, odd])
    assert [isinstance(answer, str) for answer in answers] == [True, False, True]
    assert "nothing to score" in str(answers[0])


def test_a_model_that_cannot_be_continued_reads_whole_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "precision": "none", "token_budget": 64, "cache_tokens": 64}
    window = from_config(MistralConfig(**SIZES, sliding_window=4))
    made = ReadingReference(window, **options)
    assert made.readings is None and not made.prefill([], []).taken
    full = from_config(MistralConfig(**SIZES, sliding_window=None))
    assert ReadingReference(full, **options).readings is not None
    assert ReadingReference(full, **(options | {"cache_tokens": 0})).readings is None
    moody = llama(vocab_size=VOCABULARY)
    base: Any = moody.base_model
    original = base.forward

    def forwards(*arguments: Any, **keywords: Any) -> Any:
        if hasattr(keywords.get("packed_layout"), "caches"):
            keywords["position_ids"] = keywords["position_ids"] * 2
        return original(*arguments, **keywords)

    forwards.__signature__ = signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(base, "forward", forwards)
    assert ReadingReference(moody, **options).readings is None, "the trial at the start found it"
