"""The packaged tool ``python``: what programs print goes to the model, and failed ones are failed calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrlhf.episodes import tools
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.world import World
from asyncrlhf.errors import ConfigError
from asyncrlhf.rewards.program import Ran
from tests.calling_model import call_text
from tests.scripted import play, said

try:
    REFUSED = ""
    World(EpisodeConfig(tools=["python"]))
except ConfigError as error:
    REFUSED = str(error)
runs_programs = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)


def calls(code: str) -> str:
    return call_text("python", json.dumps({"code": code}))


@runs_programs
@pytest.mark.parametrize("inline", [False, True], ids=["thread", "inline"])
def test_programs_answer_and_fail_in_words(inline: bool) -> None:
    turns = [calls("print(2**40)"), calls("x = 2"), calls("print(x)"), "done"]
    rollout = play(turns, inline=inline, tools=["python"])
    told = [text for role, text in said(rollout) if role == "tool"]
    assert told == ["1099511627776\n", "the program printed nothing", "error: NameError: name 'x' is not defined"]
    assert [turn.failures for turn in rollout.turns] == [0, 0, 1, 0]
    assert {turn.tools for turn in rollout.turns[:-1]} == {("python",)}
    late = play([calls("while True: pass"), "done"], inline=inline, tools=["python"], timeout_seconds=0.5)
    ((_, words),) = [told for told in said(late) if told[0] == "tool"]
    assert words.startswith("error: ") and "took longer than" in words and late.turns[0].failures == 1


@runs_programs
def test_long_output_is_cut() -> None:
    rollout = play([calls("print('a' * 10**6)"), "done"], tools=["python"], max_observation_length=50)
    assert said(rollout)[1] == ("tool", "a" * 50 + " [cut off]")


def test_a_machine_that_runs_no_programs_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Ran:
        return Ran("the kernel of this machine gives no namespaces here (Operation not permitted)", True)

    monkeypatch.setattr(tools, "run_program", refuse)
    with pytest.raises(
        ConfigError, match=r"^episode\.tools=\[python\] cannot run programs on this machine: the kernel"
    ):
        World(EpisodeConfig(tools=["python"]))
