"""The reward of a mathematical answer: 1 if it equals the reference, by the library math-verify.

``reward.kind=python reward.target=asyncrlhf.rewards.math_answer:correct``
"""

from __future__ import annotations

from functools import cache
from typing import Any

from asyncrlhf.validation import check_package

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError:
    check_package("reward.target=asyncrlhf.rewards.math_answer:correct", "math-verify", "math")
    raise

# GSM8K (2110.14168) marks the result so, in its references and in answers of models trained on them.
FINAL = "####"
TARGETS = (LatexExtractionConfig(), ExprExtractionConfig())


def correct(completions: list[str], answer: list[str | None], **columns: list[Any]) -> list[float]:
    """1.0 for each completion that gives the reference ``answer``, 0.0 otherwise. Only the text after a last ``####``
    counts, in both. Raises ValueError for a reference that is missing or has nothing to compare with."""
    return [float(_equal(reference, text)) for text, reference in zip(completions, answer, strict=True)]


def _equal(reference: str | None, completion: str) -> bool:
    if reference is None:
        raise ValueError("the prompt has no answer to compare with")
    gold = _gold(str(reference))  # a dataset's column may hold numbers
    if not gold:
        raise ValueError(f"the reference {str(reference)[-40:]!r} is neither a number nor a LaTeX expression")
    return verify(list(gold), parse(_final(completion), TARGETS))


@cache
def _gold(reference: str) -> tuple[Any, ...]:
    final = _final(reference)
    # A bare expression, such as \frac{1}{2}, is LaTeX to the library only between dollars.
    return tuple(parse(final, TARGETS) or parse(f"${final}$", TARGETS))


def _final(text: str) -> str:
    return text.rpartition(FINAL)[2].strip()
