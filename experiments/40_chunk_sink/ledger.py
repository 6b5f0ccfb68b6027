"""The study's task: a ledger of running totals, written out line by line, and then all totals once more.

For the prompt ``58391274=`` the answer is ``00+5=05 05+8=13 ... `` and at its end `` 05 13 16 ...``: 88 tokens of the
packaged tokenizer. The second half of the reward depends on two tokens of each line, up to 70 tokens earlier.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

LINES = 8
LONGEST = 96  # tokens of an answer; a right one has 88 and its end
TRAIN, TEST = 4096, 256  # prompts


def answer(digits: str) -> str:
    totals = [0]
    for digit in digits:
        totals.append(totals[-1] + int(digit))
    lines = [f"{old:02}+{digit}={new:02}" for old, digit, new in zip(totals, digits, totals[1:], strict=False)]
    return " ".join(lines + [f"{total:02}" for total in totals[1:]])


def prompts(seed: int, count: int) -> list[str]:
    rows = np.random.default_rng(seed).integers(0, 10, (count, LINES)).tolist()
    return ["".join(map(str, row)) + "=" for row in rows]


def score(prompt: str, text: str) -> float:
    """The share of the 16 words, lines and repeated totals, that stand at their place."""
    return sum(halves(prompt, text)) / 2


def halves(prompt: str, text: str) -> tuple[float, float]:
    """The same for lines and for repeated totals apart."""
    right, said = answer(prompt[:LINES]).split(" "), text.split(" ")
    found = [i < len(said) and said[i] == word for i, word in enumerate(right)]
    return sum(found[:LINES]) / LINES, sum(found[LINES:]) / LINES


def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [score(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]


def write_rows(path: Path) -> None:
    """Training prompts, of another seed than the test's."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts(1, TRAIN)))
