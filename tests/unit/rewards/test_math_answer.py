"""The reward of a mathematical answer: what counts as equal, and what cannot be compared."""

from __future__ import annotations

import sys

import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.plugins import load_function
from asyncrlhf.rewards.math_answer import correct

GSM8K = "She has 4*4 = <<4*4=16>>16 clips left.\n#### 1,016"


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        ("There are 1016 in all.\n#### 1016", GSM8K, 1.0),
        ("First 16, and so the answer is 1,016.", GSM8K, 1.0),
        ("The result is \\boxed{1016}.", GSM8K, 1.0),
        ("#### 1016.00", GSM8K, 1.0),
        ("There are 1016.\n#### 16", GSM8K, 0.0),
        ("It is 1016 or so, but rather \\boxed{17}", GSM8K, 0.0),
        ("I do not know.", GSM8K, 0.0),
        ("", GSM8K, 0.0),
        ("The answer is $\\frac{2}{4}$.", "\\frac{1}{2}", 1.0),
        ("The answer is 0.5", "1/2", 1.0),
        ("\\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1.0),
        ("\\boxed{x^2 + 2x}", "$(x+1)^2$", 0.0),
    ],
)
def test_equal_is_equal_in_value(completion: str, reference: str, reward: float) -> None:
    assert correct([completion], [reference], prompts=["?"]) == [reward]


def test_each_completion_meets_its_own_reference() -> None:
    assert correct(["#### 1", "#### 2", "#### 1"], ["#### 1", "#### 1", "#### 2"]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("reference", [None, "#### "])
def test_a_reference_that_cannot_be_compared_with_is_an_error(reference: str | None) -> None:
    with pytest.raises(ValueError, match=r"no answer|neither a number"):
        correct(["#### 1"], [reference])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "asyncrlhf.rewards.math_answer")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"^reward\.target=.* the package math-verify, .*'asyncrlhf\[math\]'\.$"):
        load_function("reward.target", "asyncrlhf.rewards.math_answer:correct")
