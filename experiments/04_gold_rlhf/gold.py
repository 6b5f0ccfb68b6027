"""The gold rewards of the study: what the labels come from and what the reward models never see."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

REACH = 10  # an answer that is off by so much is worth nothing


def closeness(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the right sum, less by a tenth for every unit that it is off, 0 for what is not a number."""
    return [_closeness(text.strip(), int(right)) for text, right in zip(completions, answer, strict=True)]


def _closeness(text: str, right: int) -> float:
    if not (text.isascii() and text.isdigit()):
        return 0.0
    return max(0.0, 1.0 - abs(int(text) - right) / REACH)


def kindness(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """VADER's compound sentiment in [-1, 1] (Hutto and Gilbert 2014), times the share of words that are no repetition.

    The second factor is what a reward model cannot learn from answers that hardly ever repeat a word.
    """
    return [_analyser().polarity_scores(text)["compound"] * _variety(text) for text in completions]


@cache
def _analyser() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # the tiny scale does without it

    return SentimentIntensityAnalyzer()


def _variety(text: str) -> float:
    words = re.findall(r"\w+", text.lower())
    return len(set(words)) / len(words) if words else 0.0
