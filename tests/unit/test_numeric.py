"""The comparison that numeric tests share, and what `--margins` makes of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.numeric import assert_close

pytest_plugins = ["pytester"]


def test_the_tolerance_is_the_sum_of_its_three_parts() -> None:
    expected = np.array([[1.0, -2.0], [0.0, 8.0]])
    allowed = 1e-3 + 1e-2 * np.abs(expected) + 1e-4 * 8.0
    for sign in (1, -1):
        assert_close(expected + sign * 0.3 * allowed, expected, rtol=1e-2, atol=1e-3, of_largest=1e-4)
        for entry in np.ndindex(2, 2):
            moved = expected.copy()
            moved[entry] += sign * 1.01 * allowed[entry]
            with pytest.raises(AssertionError, match=rf"at \[{entry[0]}, {entry[1]}\]"):
                assert_close(moved, expected, rtol=1e-2, atol=1e-3, of_largest=1e-4)


def test_a_mapping_has_one_largest_entry_and_its_keys_must_agree() -> None:
    expected = {"a": torch.tensor([1.0]), "b": torch.tensor([100.0, 0.0])}
    assert_close({"a": torch.tensor([1.03]), "b": expected["b"]}, expected, of_largest=1e-3)
    with pytest.raises(AssertionError, match=r"at \['a'\]\[0\]"):
        assert_close({"a": torch.tensor([1.11]), "b": expected["b"]}, expected, of_largest=1e-3)
    with pytest.raises(AssertionError, match="'b'"):
        assert_close({"a": expected["a"]}, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (math.nan, 1.0),
        (math.nan, math.nan),
        (math.inf, 1.0),
        (1.0, math.inf),
        (-math.inf, math.inf),
        ([1.0], 1.0),
        ([1.0, 2.0], [1.0]),
        (torch.ones(1), torch.ones(1, dtype=torch.float64)),
    ],
)
def test_what_no_tolerance_excuses(actual: object, expected: object) -> None:
    with pytest.raises(AssertionError):
        assert_close(actual, expected, rtol=1e3, atol=1e3, of_largest=1e3)


def test_equal_infinities_and_nothing_at_all_are_equal() -> None:
    assert_close([math.inf, -math.inf, 0.0], [math.inf, -math.inf, 0.0], rtol=0.0, atol=0.0)
    assert_close([], [])


TESTS = """
from tests.numeric import assert_close

def test_thin():
    assert_close(1.0, 1.0, atol=1e-3)
    assert_close(1.0005, 1.0, rtol=0.0, atol=1e-3)
    assert_close([1.0, 2.0], [1.0, 2.0])

def test_wide():
    assert_close(1.0002, 1.0, rtol=0.0, atol=1e-3)

def test_wrong():
    assert_close(1.002, 1.0, rtol=0.0, atol=1e-3)

def test_other():
    assert 1 + 1 == 2
"""
SCOPE = ("-o", "asyncio_default_fixture_loop_scope=function")  # pytest-asyncio warns without it


@pytest.mark.in_turn
@pytest.mark.parametrize("processes", [(), ("--numprocesses=1",)], ids=["one process", "xdist"])
@pytest.mark.more
def test_margins_fails_thin_ones_and_shows_the_worst(pytester: pytest.Pytester, processes: tuple[str, ...]) -> None:
    pytester.makepyfile(TESTS)
    options = ("-p", "tests.numeric", "-o", f"pythonpath={Path(__file__).parents[2]}", *SCOPE, *processes)
    plain = pytester.runpytest(*options)
    plain.assert_outcomes(passed=3, failed=1)
    assert "thinnest margins" not in plain.stdout.str()
    judged = pytester.runpytest(*options, "--margins")
    judged.assert_outcomes(passed=2, failed=2)
    judged.stdout.fnmatch_lines(
        [
            "*thin margin: error 0.0005 of 0.001 allowed (ratio 0.5)*",
            "*10 thinnest margins of 2 tests*",
            "0.500*test_thin",
            "0.200*test_wide",
        ]
    )
    judged.stdout.fnmatch_lines(["*error 0.002 of 0.001 allowed (ratio 2)*"])
