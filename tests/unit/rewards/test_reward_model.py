"""Reward models: the right token, whatever the padding, the batch and the end token; and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
    OPTConfig,
    OPTForSequenceClassification,
)

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.rewards.model import ModelSource, chat_ids, padded_batches, policy_ids, score_batch, text_ids
from asyncrlhf.rewards.reward_config import RewardModelConfig
from asyncrlhf.types import Rollout
from tests.numeric import FLOAT32, assert_close
from tests.unit.rewards.worlds import rollout, save_reward_model

VOCABULARY, CONTEXT, END = 19, 64, 2
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)
ROLLOUTS = st.lists(st.tuples(TOKENS.filter(len), TOKENS), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> Path:
    """A reward model with the tokenizer of the tiny policy; its end token is its pad token."""
    made = save_reward_model(tmp_path_factory.mktemp("reward-model"), VOCABULARY, context=CONTEXT)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model_path / name, made / name)
    return made


def load(folder: Path, budget: int = 4096, **options: Any) -> ModelSource:
    config = RewardModelConfig(path=str(folder), **options)
    made = ModelSource(config, "reward", load_tokenizer(ModelConfig()), max_batch_tokens=budget)
    made.model.double()  # two ways to compute then agree to rounding; scores leave as float32
    return made


@pytest.fixture(scope="module")
def source(folder: Path) -> ModelSource:
    return load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """transformers' own forward on one sequence at a time; without a pad token it reads the very last one."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval().double()
    model.config.pad_token_id = None

    @torch.inference_mode()
    def score(ids: Sequence[int]) -> float:
        return float(model(torch.tensor([list(ids)])).logits[0, 0])

    return score


def rollouts_of(pairs: Sequence[tuple[list[int], list[int]]]) -> list[Rollout]:
    return [rollout(i, "", prompt_ids=p, ids=r) for i, (p, r) in enumerate(pairs)]


@settings(max_examples=60, deadline=None)
@given(pairs=ROLLOUTS, budget=st.integers(1, 200))
def test_scores_are_those_of_each_sequence_alone(
    source: ModelSource, reference: Any, pairs: list[tuple[list[int], list[int]]], budget: int
) -> None:
    """Empty responses, end tokens anywhere, every grouping into batches: equal to 1e-5."""
    source._max_batch_tokens = budget
    expected = [reference([*p, *r]) for p, r in pairs]
    assert_close(source.scores(rollouts_of(pairs)), expected, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    pairs=ROLLOUTS, side=st.sampled_from(["left", "right"]), pad=st.integers(0, VOCABULARY - 1), more=st.integers(0, 5)
)
def test_padding_of_either_side_with_any_token_changes_nothing(
    source: ModelSource, reference: Any, pairs: list[tuple[list[int], list[int]]], side: str, pad: int, more: int
) -> None:
    sequences = [[*p, *r] for p, r in pairs]
    width = max(map(len, sequences)) + more
    ids, mask = torch.full((len(sequences), width), pad), torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        span = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        ids[row, span], mask[row, span] = torch.tensor(sequence), 1
    scores = score_batch(source.model, ids, mask).tolist()
    assert_close(scores, [reference(s) for s in sequences], atol=1e-5)


def test_the_end_token_is_read_and_matters(source: ModelSource, reference: Any) -> None:
    """transformers' own pooling with the end token as padding reads the token before it, another number."""
    ended, cut = rollouts_of([([5, 6], [7, 8, END]), ([5, 6], [7, 8])])
    longer = rollouts_of([([5, 6, 7], [8, 9, 10, 11])])
    at_end, before_end, _ = source.scores([ended, cut, *longer])
    assert_close(at_end, reference([5, 6, 7, 8, END]), atol=1e-5)
    assert abs(float(at_end) - float(before_end)) > 1e-2  # type: ignore[arg-type]


def gpt_neox() -> Any:
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, num_labels=1, initializer_range=0.3, pad_token_id=END,
    )  # fmt: skip
    return GPTNeoXForSequenceClassification(config)


def opt() -> Any:
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, num_labels=1, init_std=0.3, pad_token_id=END,
    )  # fmt: skip
    return OPTForSequenceClassification(config)


def bert() -> Any:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, num_labels=1, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, num_labels=1, initializer_range=0.3,
        pad_token_id=END,
    )  # fmt: skip
    return GPT2ForSequenceClassification(config)


def bloom() -> Any:
    config = BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, num_labels=1, initializer_range=0.3,
        pad_token_id=END,
    )  # fmt: skip
    return BloomForSequenceClassification(config)


@pytest.mark.parametrize("make", [gpt_neox, opt, bert, gpt2, bloom])
def test_other_architectures_score_alike_alone_and_in_a_batch(make: Any, tmp_path: Path) -> None:
    """Decoders with rotary, learned and no positions, and an encoder, which pools in its own way."""
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(tmp_path)
    made = load(tmp_path, inputs="ids")
    made.model.float()  # padded on the left, transformers' Bloom gives NaN in float64
    sequences = [[5, 6, 7, 8, 9, END], [3, 4, 5], [10, 11, 12, 13, 14, 15, 16, 17], [9]]
    model.config.pad_token_id = None
    with torch.inference_mode():
        expected = [float(model(torch.tensor([s])).logits[0, 0]) for s in sequences]
    assert_close(made.scores(rollouts_of([(s[:1], s[1:]) for s in sequences])), expected, atol=FLOAT32)
    assert np.ptp(expected) > 1e-2
    if not made.is_causal:
        return
    left, mask = torch.full((4, 10), END), torch.zeros(4, 10, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        left[row, 10 - len(sequence) :], mask[row, 10 - len(sequence) :] = torch.tensor(sequence), 1
    assert_close(score_batch(made.model, left, mask).tolist(), expected, atol=FLOAT32)


@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 300))
def test_batches_hold_all_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = padded_batches(np.array(lengths, dtype=np.int64), budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    # Sorted by length, so that no batch mixes long and short ones that another order would have kept apart.
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(lengths, reverse=True)


def test_forward_passes_stay_within_the_token_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load(folder, budget=40)
    shapes: list[tuple[int, ...]] = []
    base: Any = made.model.base_model
    original = base.forward

    def forward(*args: Any, **options: Any) -> Any:
        shapes.append(tuple(options["input_ids"].shape))
        return original(*args, **options)

    monkeypatch.setattr(base, "forward", forward)
    made.scores(rollouts_of([([1], [3] * n) for n in (2, 19, 3, 19, 4, 2, 2, 2)]))
    assert shapes == [(2, 20), (6, 5)]


def test_what_does_not_fit_fails_alone(folder: Path) -> None:
    made = load(folder, max_length=8)
    pairs = [([1], [3] * 7), ([1], [3] * 8), ([], []), ([1], [VOCABULARY]), ([1], [4])]
    scores = made.scores(rollouts_of(pairs))
    assert [isinstance(s, RewardError) for s in scores] == [False, True, True, True, False]
    assert "has 9 tokens; allowed: 8 (reward.model.max_length" in str(scores[1])
    assert "no token" in str(scores[2]) and "vocabulary of 19" in str(scores[3])
    assert load(folder, max_length=1000).max_length == CONTEXT


def test_a_score_that_is_not_finite_is_a_failure(folder: Path) -> None:
    made = load(folder)
    with torch.no_grad():
        made.model.score.weight.fill_(float("nan"))  # type: ignore[union-attr, operator]
    (score,) = made.scores(rollouts_of([([1], [3])]))
    assert isinstance(score, RewardError) and "nan" in str(score)


def test_memory_that_runs_out_is_met_by_smaller_calls(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("asyncrlhf.rewards.model.score_batch", crowded)
    with pytest.raises(RewardError, match=r"out of memory with 2 sequences .* lower reward\.max_batch_tokens"):
        source._max_batch_tokens = 4096
        source.scores(rollouts_of([([1], [3]), ([1], [4])]))


def test_the_policys_ids_are_taken_where_the_tokenizers_agree(source: ModelSource, folder: Path) -> None:
    assert source.encoder is policy_ids
    assert load(folder, inputs="text").encoder.func is text_ids


def test_other_tokens_come_from_the_text(folder: Path, tmp_path: Path) -> None:
    """A tokenizer whose ids differ, with a chat template: the text's own ids, and those of the template's text."""
    tokenizer = load_tokenizer(ModelConfig())
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tokenizer.add_tokens(["13"])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}={% endif %}{% endfor %}"
    tokenizer.save_pretrained(other)
    config = RewardModelConfig(path=str(other))
    plain: Any = load(other).encoder
    assert plain.func is text_ids
    done = rollout(1, "25", prompt="12+13=", prompt_ids=[1, 2], ids=[3, END])
    begin = tokenizer("12+13=25").input_ids
    assert plain(done).tolist() == [*begin, END]
    assert plain(replace(done, finish_reason="length")).tolist() == begin
    assert tokenizer.convert_tokens_to_ids("13") in plain(done)
    chat: Any = load(other, chat_template=True).encoder
    assert chat.func is chat_ids
    asked = rollout(1, "25", prompt="12+13", ids=[3])
    assert chat(asked).tolist() == tokenizer("12+13=25", add_special_tokens=False).input_ids
    with pytest.raises(ConfigError, match="chat_template=true, but the tokenizer"):
        load(folder, chat_template=True)
    assert config.inputs == "auto"


@pytest.mark.parametrize("case", ["causal", "labels", "headless", "nowhere", "no tokenizer", "no config"])
def test_what_is_no_reward_model_is_refused_in_a_sentence(
    case: str, folder: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    path, sentence = tmp_path, ""
    if case == "causal":
        path, sentence = tiny_model_path, "LlamaForCausalLM, whose score would come from an untrained head"
    elif case == "labels":
        save_reward_model(tmp_path, VOCABULARY, labels=3)
        sentence = "has 3 labels; allowed: a reward model"
    elif case == "headless":
        from safetensors.torch import load_file, save_file

        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        weights = load_file(tmp_path / "model.safetensors")
        del weights["score.weight"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        sentence = r"lacks 1 of its model's weights, such as score\.weight"
    elif case == "nowhere":
        path, sentence = tmp_path / "nowhere", "is not a folder"
    elif case == "no tokenizer":
        save_reward_model(tmp_path, VOCABULARY)
        sentence = r"Where its tokens are the policy's, reward\.model\.inputs=ids needs no tokenizer"
    else:
        sentence = "could not be loaded"
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(path)
    assert "reward.model.path=" in str(caught.value) and "\n" not in str(caught.value)
