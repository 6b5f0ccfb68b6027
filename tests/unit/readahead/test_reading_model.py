"""Chunks are hints: whatever of them comes, in whatever order, every score is that of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.actors.annotator import RewardWorker
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import RewardError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.readahead.outlook import reward_outlook
from asyncrlhf.readahead.owners import Chunk
from asyncrlhf.readahead.readers import ReadingModel, read_ahead, reading_model
from asyncrlhf.readahead.readings import Reading, token_batches
from asyncrlhf.rewards.model import ModelSource, score_batch
from asyncrlhf.rewards.reward import RewardSource, Scorer, WeightedSource
from asyncrlhf.rewards.reward_config import RewardConfig, RewardModelConfig
from asyncrlhf.types import Rollout
from tests.numeric import assert_close
from tests.unit.readahead.stories import PROMPTS, VOCABULARY, Story, chunk, pieces, stories
from tests.unit.rewards.test_reward_model import bert, bloom, gpt2, gpt_neox, opt
from tests.unit.rewards.worlds import rollout, save_reward_model

CONTEXT, END = 64, 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = save_reward_model(tmp_path_factory.mktemp("rm"), VOCABULARY, context=CONTEXT)
    return load(folder)


def load(folder: Path, **options: Any) -> ModelSource:
    config = RewardModelConfig(path=str(folder), inputs="ids", **options)
    made = ModelSource(config, "reward", load_tokenizer(ModelConfig()), max_batch_tokens=4096)
    made.model.double()  # two ways to compute then agree to rounding; scores leave as float32
    return made


def reader(source: ModelSource, cache_tokens: int = 4096, budget: int = 4096) -> ReadingModel:
    return ReadingModel(source, cache_tokens, budget)


def read(reads: ReadingModel, chunks: Sequence[Chunk]) -> list[int]:
    """The rollouts that were evicted for them."""
    return reads.prefill([], chunks).evicted


def reference(source: ModelSource, done: Rollout) -> float:
    """transformers' own forward on the sequence alone; without a pad token it reads the very last one."""
    before, source.model.config.pad_token_id = source.model.config.pad_token_id, None
    ids = [*done.prompt.token_ids.tolist(), *done.response_ids.tolist()]
    with torch.inference_mode():
        value = float(source.model(torch.tensor([ids])).logits[0, 0])
    source.model.config.pad_token_id = before
    return value


@settings(max_examples=150, deadline=None)
@given(stories(), st.sampled_from([64, 128, 200, 4096]), st.integers(1, 80), st.integers(1, 6))
def test_scores_are_those_of_whole_sequences_whatever_came_before(
    source: ModelSource, story: Story, cache_tokens: int, budget: int, size: int
) -> None:
    reads = reader(source, cache_tokens, budget)
    for number, call in enumerate(story.calls):
        read(reads, call)
        assert reads.held <= cache_tokens
        if number == 1:
            reads.release(story.released)
    for start in range(0, len(story.order), size):
        done = [story.rollouts[i] for i in story.order[start : start + size]]
        expected = [reference(source, r) for r in done]
        assert_close(reads.scores(done), expected, atol=1e-5)
        reads.release([r.rollout_id for r in done])
    assert reads.held == 0


@settings(max_examples=30, deadline=None)
@given(story=stories(), side=st.sampled_from(["left", "right"]))
def test_scores_are_those_of_padded_batches(source: ModelSource, story: Story, side: str) -> None:
    """What ``rollout`` makes of the same rollouts, padded on either side."""
    sequences = [np.concatenate([r.prompt.token_ids, r.response_ids]) for r in story.rollouts]
    width = max(map(len, sequences))
    ids, mask = torch.full((len(sequences), width), END), torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        span = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        ids[row, span], mask[row, span] = torch.from_numpy(sequence), 1
    reads = reader(source)
    for call in story.calls:
        read(reads, call)
    assert_close(reads.scores(story.rollouts), score_batch(source.model, ids, mask).tolist(), atol=1e-5)
    assert_close(reads.scores(story.rollouts), source.scores(story.rollouts), atol=1e-5)


def tokens_computed(reads: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """New tokens of each forward pass from now on."""
    seen: list[int] = []
    original = reads._extend

    def extend(sequences: Sequence[Any]) -> list[torch.Tensor]:
        seen.append(sum(len(ids) for _, ids in sequences))
        return original(sequences)

    monkeypatch.setattr(reads, "_extend", extend)
    return seen


def test_at_the_end_only_the_last_tokens_are_left(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = reader(source)
    seen = tokens_computed(reads, monkeypatch)
    done = rollout(0, "", prompt_ids=PROMPTS[0], ids=[3] * 30)
    for piece in pieces(done, (10, 20)):
        assert read(reads, [piece]) == []
    assert seen == [13, 10]
    assert_close(reads.scores([done]), [reference(source, done)], atol=1e-5)
    assert seen == [13, 10, 10]
    reads.release([0])
    assert reads.held == 0
    assert read(reads, pieces(done, (30,))) == []
    assert_close(reads.scores([done]), [reference(source, done)], atol=1e-5)
    assert seen[3:] == [33], "where none is left there is no pass at all"


def test_a_full_cache_evicts_what_was_touched_least_recently(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = reader(source, cache_tokens=128)
    first, second, third = (rollout(i, "", prompt_ids=[3 + i], ids=[3 + i] * 60) for i in range(3))
    assert read(reads, pieces(first, (10,)) + pieces(second, (10,))) == []
    assert read(reads, [chunk(first, 11, 21)]) == []
    assert read(reads, pieces(third, (10,))) == [1]
    assert read(reads, [chunk(second, 11, 21)]) == [], "what was evicted is not read again before its end"
    assert reads.held == 128
    seen = tokens_computed(reads, monkeypatch)
    assert_close(
        reads.scores([first, second, third]), [reference(source, r) for r in (first, second, third)], atol=1e-5
    )
    assert seen == [2 * 61 - 21 - 11], "of the evicted one nothing was left to continue"


def test_what_can_never_be_scored_or_held_is_not_read(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = reader(source, cache_tokens=64)
    seen = tokens_computed(reads, monkeypatch)
    long = rollout(0, "", prompt_ids=[1], ids=[3] * 80)
    strange = rollout(1, "", prompt_ids=[1], ids=[VOCABULARY])
    kept = rollout(2, "", prompt_ids=[1], ids=[3] * 9)
    assert read(reads, pieces(kept, (5,))) == []
    assert read(reads, [*pieces(long, (80,)), *pieces(strange, (1,))]) == [0, 1]
    assert seen == [6] and reads.held == 64, "and takes nobody's place"
    scores = reads.scores([long, strange, kept])
    assert [isinstance(s, RewardError) for s in scores] == [True, True, False]


def test_memory_that_runs_out_costs_the_cache_alone(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = reader(source)
    done = [rollout(i, "", prompt_ids=[3 + i], ids=[4] * 9) for i in range(2)]
    expected = [reference(source, r) for r in done]
    read(reads, pieces(done[0], (5,)))
    original = reads._extend

    def crowded(sequences: Sequence[Any]) -> list[torch.Tensor]:
        if len(sequences) > 1 or sequences[0][0].get_seq_length():
            raise torch.OutOfMemoryError("no room")
        return original(sequences)

    monkeypatch.setattr(reads, "_extend", crowded)
    assert read(reads, [*pieces(done[1], (5,)), chunk(done[0], 6, 9)]) == [0, 1]
    assert reads.held == 0
    assert_close(reads.scores(done), expected, atol=1e-5)
    reads.release([0, 1])
    for one in done:
        assert read(reads, pieces(one, (5,))) == []
    assert reads.held == 2 * 64
    caches = [ref(reading.cache) for reading in reads._readings.values() if reading is not None]

    def whole(rollouts: Sequence[Rollout]) -> Any:
        assert rollouts == done and all(cache() is None for cache in caches), "the caches' memory is not free yet"
        return source.scores(rollouts)

    monkeypatch.setattr(reads, "_whole", whole)
    assert_close(reads.scores(done), expected, atol=1e-5)
    assert read(reads, []) == [0, 1], "and the controller is told"


def test_a_whole_pass_without_room_says_what_to_lower(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    reads = reader(source)
    monkeypatch.setattr("asyncrlhf.rewards.model.score_batch", crowded)
    with pytest.raises(RewardError, match=r"out of memory with 1 sequences .* lower reward\.max_batch_tokens"):
        reads.scores([rollout(0, "", prompt_ids=[3], ids=[4] * 9)])


def test_a_scorer_hands_chunks_to_the_models_and_forgets_what_is_scored(source: ModelSource) -> None:
    class Seven(RewardSource):
        def scores(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
            return [RewardError("no") if r.rollout_id == 1 else 7.0 for r in rollouts]

        def close(self) -> None: ...

    parts = {"rule": WeightedSource(Seven(), 2.0), "rm": WeightedSource(source, 0.5)}
    config = RewardConfig(kind="sum", parts={name: {"kind": "task"} for name in parts})
    inner = Scorer(parts, config, 64)
    scorer = RewardWorker(inner, read_ahead(inner, 4096, 4096))
    (reads,) = scorer.readers
    done = [rollout(i, "", prompt_ids=[3 + i], ids=[4] * 9) for i in range(3)]
    assert scorer.prefill([], [c for r in done for c in pieces(r, (5,))]).taken
    assert reads.held == 3 * 64
    (one, failed, _), _ = scorer.annotate(done)
    assert_close(one.reward, 14 + 0.5 * reference(source, done[0]), atol=1e-5)
    assert failed.reward is None
    assert reads.held == 0, "the one that another part failed is forgotten too"
    scorer.prefill([], pieces(done[0], (5,)))
    scorer.prefill([0], [])
    assert reads.held == 0
    for cache_tokens, made in ((4096, Seven()), (0, source)):
        inner = Scorer({"score": WeightedSource(made)}, RewardConfig(), 64)
        assert not RewardWorker(inner, read_ahead(inner, cache_tokens, 4096)).prefill([], []).taken
        inner.close()


@pytest.mark.parametrize("make", [gpt_neox, gpt2, opt])
def test_other_architectures_are_read_alike(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary and learned positions."""
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    made = load(tmp_path)
    reads = reading_model(made, 4096, 4096)
    assert isinstance(reads, ReadingModel)
    done = [rollout(i, "", prompt_ids=PROMPTS[i % 2], ids=[3 + i] * (4 + 9 * i)) for i in range(4)]
    for stop in (3, 8, 20):
        read(reads, [chunk(r, 0, len(r.prompt.token_ids) + min(stop, len(r.response_ids) - 1)) for r in done])
    expected = [reference(made, r) for r in done]
    seen = tokens_computed(reads, monkeypatch)
    assert_close(reads.scores(done), expected, atol=1e-5)
    assert np.ptp(expected) > 1e-2 and sum(seen) < 20


def mistral(folder: Path, window: int | None) -> Path:
    from transformers import MistralConfig, MistralForSequenceClassification

    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=1, sliding_window=window, pad_token_id=END,
    )  # fmt: skip
    MistralForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_what_cannot_be_read_in_pieces_is_scored_whole(tmp_path: Path, source: ModelSource) -> None:
    bert().save_pretrained(tmp_path / "bert")
    bloom().save_pretrained(tmp_path / "bloom")  # alibi knows nothing of packing
    encoder, window = load(tmp_path / "bert"), load(mistral(tmp_path / "window", 4))
    for made in (encoder, window, load(tmp_path / "bloom")):
        assert reading_model(made, 4096, 4096) is made
    assert isinstance(reading_model(load(mistral(tmp_path / "full", None)), 4096, 4096), ReadingModel)
    text = ModelSource(
        RewardModelConfig(path=source.model.config.name_or_path, inputs="ids"), "reward",
        load_tokenizer(ModelConfig()), max_batch_tokens=64,
    )  # fmt: skip
    text.encoder = lambda rollout: rollout.response_ids
    assert reading_model(text, 4096, 4096) is text


@pytest.mark.parametrize("hands_on", [True, False])
def test_a_model_whose_passes_disagree_with_its_whole_or_hand_no_layout_to_its_attention_is_scored_whole(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, hands_on: bool
) -> None:
    """The trial at the start finds what no config says."""
    base: Any = source.model.base_model
    original = base.forward

    def forward(*args: Any, **options: Any) -> Any:
        if "packed_layout" in options:
            options["position_ids"] = options["position_ids"] * (2 if hands_on else 1)
        return original(*args, **{name: v for name, v in options.items() if hands_on or name != "packed_layout"})

    forward.__signature__ = signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(base, "forward", forward)
    assert not (hands_on and ReadingModel(source, 64, 4096).try_out(exact=True))
    assert reading_model(source, 4096, 4096) is source


def test_the_outlook_says_in_a_sentence_what_will_be_scored_whole(tmp_path: Path, tiny_model_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig())
    good = save_reward_model(tmp_path / "good", VOCABULARY)
    window = mistral(tmp_path / "window", 4)

    def part(path: Path) -> dict[str, Any]:
        return {"kind": "model", "model": {"path": str(path), "inputs": "ids"}}

    bert().save_pretrained(tmp_path / "bert")
    possible, notes = reward_outlook(RewardConfig(), tokenizer)
    assert not possible and "reward has none (kind task)" in notes[0]
    one = RewardConfig(kind="model", model=RewardModelConfig(path=str(good), inputs="ids"))
    assert reward_outlook(one, tokenizer) == (True, [])
    parts = {"a": part(good), "b": part(window), "c": {"kind": "length"}}
    possible, notes = reward_outlook(RewardConfig(kind="sum", parts=parts), tokenizer)
    assert possible and len(notes) == 1
    assert "reward.parts.b.model.path" in notes[0] and "has a sliding window" in notes[0]
    parts = {"b": part(window), "c": part(tmp_path / "bert")}
    possible, notes = reward_outlook(RewardConfig(kind="sum", parts=parts), tokenizer)
    assert not possible and "is not a causal model with a linear head" in notes[1]


@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 100))
def test_batches_hold_all_in_order_within_the_budget(lengths: list[int], budget: int) -> None:
    readings = [Reading(1, np.zeros(n, np.int64)) for n in lengths]
    batches = [[len(reading.tokens) for reading in batch] for batch in token_batches(readings, budget)]
    assert [n for batch in batches for n in batch] == lengths
    for batch in batches:
        assert len(batch) == 1 or sum(batch) <= budget
