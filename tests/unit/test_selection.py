"""Which tests `make test`, CI and `make test-more` run: sessions of pytest of their own, over a few marked tests."""

from __future__ import annotations

import pytest

from tests.selection import QUICK, REST, TURNS, turn_of

pytest_plugins = ["pytester"]
CI = "not thorough"
TESTS = """
import pytest

CASES = pytest.mark.parametrize("case", ["a", "b", "b-c"])

@CASES
@pytest.mark.more_but("a")
@pytest.mark.in_turn
def test_costly(case): ...

@CASES
@pytest.mark.more_but("a")
@pytest.mark.thorough_but("b-c")
def test_cheap(case): ...

@pytest.mark.more
@pytest.mark.in_turn
def test_costly_alone(): ...
"""
QUICK_ONES = {"costly[a]", "cheap[a]"}
CHEAP = QUICK_ONES | {"cheap[b-c]"}
COSTLY = {"costly[b]", "costly[b-c]", "costly_alone"}


@pytest.fixture
def chosen(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    pytester.makepyfile(test_it=TESTS)

    def ask(expression: str, turn: str | int | None = None) -> set[str]:
        monkeypatch.delenv("TEST_TURN", raising=False)
        if turn is not None:
            monkeypatch.setenv("TEST_TURN", str(turn))
        run = pytester.runpytest("-p", "no:asyncio", "-p", "tests.selection", "-m", expression, "--collect-only", "-q")
        return {line.partition("::test_")[2] for line in run.outlines if "::" in line}

    return ask


def test_each_command_has_its_tests(chosen):
    assert chosen(QUICK) == QUICK_ONES
    assert chosen(REST) == COSTLY | {"cheap[b-c]"}
    assert chosen(CI) == chosen(CI, "all") == CHEAP | COSTLY
    assert chosen("thorough") == {"cheap[b]"}


def test_costly_cases_run_at_the_turn_of_their_file_and_no_other_is_left_out(chosen):
    at = turn_of("test_it.py")
    assert chosen(CI, at) == CHEAP | COSTLY
    assert chosen(CI, (at + 1) % TURNS) == CHEAP
    assert chosen(QUICK, (at + 1) % TURNS) == QUICK_ONES


@pytest.mark.parametrize("turn", ["8", "-1", "one"])
def test_a_turn_that_there_is_not_is_refused(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, turn: str):
    monkeypatch.setenv("TEST_TURN", turn)
    run = pytester.runpytest("-p", "no:asyncio", "-p", "tests.selection")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines([f"*TEST_TURN={turn}: it must be all, or a number from 0 to 7*"])
