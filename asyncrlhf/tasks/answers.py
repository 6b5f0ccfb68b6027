"""Finds the answer inside a completion."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_LABELLED = re.compile(r"\banswer(?:\s+is)?\s*:\s*(\S.*)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?")
_WRAPPING = "*`\"' \t\n"


def extract_answer(completion: str, reference: str) -> str:
    """The answer that a completion gives to a question whose right answer is ``reference``; "" if it gives none.

    The text used is the first of these that exists: the last ``<answer>...</answer>``; the line after the last
    ``Answer:`` or ``the answer is:``; the whole completion. If the reference is a number, the answer is the last number
    in that text (as in GSM8K's evaluations), without thousands separators. If not, it is the text's first line that is
    not blank, as :func:`unwrap` leaves it.
    """
    text = completion
    for pattern in (_TAGGED, _LABELLED):
        found = [match for match in pattern.findall(completion) if match.strip()]
        if found:
            text = found[-1]
            break
    if _NUMBER.fullmatch(reference.strip()):
        numbers = _NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return unwrap(lines[0]) if lines else ""


def unwrap(text: str) -> str:
    """``text`` without white space, quotes, emphasis and one full stop around an answer."""
    return text.strip(_WRAPPING).removesuffix(".").strip(_WRAPPING)
