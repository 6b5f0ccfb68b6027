"""What both sides of the comparison share: prompts, tokenizer and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.tasks.arithmetic import ArithmeticTask


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local checkpoint, padded on the left as batched generation wants it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.padding_side = "left"
    return tokenizer


def prompt_rows(model: str, count: int, seed: int, digits: int) -> list[dict[str, Any]]:
    """The first ``count`` training prompts of ``task=arithmetic`` under ``seed``: rows of ``prompt`` and ``answer``."""
    source = ArithmeticTask(TaskConfig(digits=digits), load_tokenizer(model)).train_source(seed)
    prompts = [source.next() for _ in range(count)]
    return [{"prompt": prompt.text, "answer": prompt.answer} for prompt in prompts]


def exact_match(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 where the completion, stripped, is the answer, else 0: the rule of ``ArithmeticTask.reward``."""
    return [float(text.strip() == answer) for text, answer in zip(completions, answers, strict=True)]


def begins_right(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 where the completion begins with the answer: for responses of a fixed length, which cannot end there."""
    return [float(text.strip().startswith(answer)) for text, answer in zip(completions, answers, strict=True)]


def digit_share(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """The share of a completion's characters that are digits: has a spread for a model that cannot add."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


SCORES = {"exact": exact_match, "prefix": begins_right, "digits": digit_share}


def prefix_match(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """``begins_right`` with the signature of a reward function."""
    return begins_right(completions, answer)


def digits(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """``digit_share`` with the signature of a reward function."""
    return digit_share(completions, answer)
