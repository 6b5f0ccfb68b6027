"""How an answer is found in a completion."""

from __future__ import annotations

import pytest

from asyncrlhf.tasks.answers import extract_answer


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("42", "42", "42"),
        ("17 + 25 = 42.", "42", "42"),
        ("The sum of 17 and 25 is 1,042.", "1042", "1042"),
        ("Answer: 42 because 40 + 2\nand 7 more", "7", "2"),
        ("<answer> 41 </answer> or <answer>42</answer> in 9 steps", "42", "42"),
        ("It is -3.5", "2", "-3.5"),
        ("5-3", "2", "3"),
        ("no number here", "42", ""),
        ("", "42", ""),
        ("", "Paris", ""),
        ("\n\n**Paris.**\nIt lies on the Seine.", "Paris", "Paris"),
        ("Let me think.\nThe answer is: `Paris`", "Paris", "Paris"),
        ("<answer></answer> Paris", "Paris", "<answer></answer> Paris"),
        ("answer: A\nAnswer: B", "B", "B"),
    ],
)
def test_extract_answer(completion: str, reference: str, expected: str) -> None:
    assert extract_answer(completion, reference) == expected
