"""Environments and tools of other packages, each with the real package and a model of written turns."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrlhf.episodes.adapters.games import game
from asyncrlhf.episodes.adapters.mcp_tools import McpServer
from asyncrlhf.episodes.environment import EpisodeError
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.world import World, gives_reward
from asyncrlhf.errors import ConfigError
from tests.calling_model import call_text
from tests.environment_servers import serving
from tests.scripted import play, said

ROOT = Path(__file__).resolve().parents[3]
MCP = f"mcp:{sys.executable} {ROOT}/tests/mcp_server.py"


def guess(seed: int, turns: list[str]) -> Any:
    return play(turns, {"seed": seed}, environment="textarena:GuessTheNumber-v0", max_turns=30)


def test_a_game_for_one_player() -> None:
    """Halving finds the number; the game's words and its reward are the episode's."""
    low, high, turns = 1, 20, []
    while low < high:  # as the game of this seed answers
        middle = (low + high) // 2
        turns.append(f"[{middle}]")
        told = said(guess(5, [*turns, "[99]"]))
        answers = [text for role, text in told if role == "user"]
        if len(answers) < len(turns):
            break
        low, high = (middle + 1, high) if "higher" in answers[len(turns) - 1] else (low, middle - 1)
    else:
        turns.append(f"[{low}]")
    rollout = guess(5, turns)
    assert rollout.episode_reward == 1.0 and rollout.finish_reason == "stop" and len(rollout.turns) == len(turns)
    assert "guess the number between 1 and 20" in rollout.prompt.messages[-1]["content"]  # type: ignore[index]
    assert all(re.search("target number is (higher|lower)", text) for role, text in said(rollout) if role == "user")


def test_draws_of_a_game_depend_on_its_seed_alone() -> None:
    def first_words(seed: int) -> list[tuple[str, str]]:
        return said(guess(seed, ["[10]", "[3]", "no move"]))

    before = random.getstate()
    words = [first_words(seed) for seed in (1, 2, 3, 1)]
    assert words[0] == words[3] and len({str(w) for w in words}) > 1
    assert random.getstate() == before
    one, other = game("GuessTheNumber-v0")(), game("GuessTheNumber-v0")()
    for environment in (one, other):
        environment.reset({"seed": 11})
    assert one._game.game_number == other._game.game_number


def test_a_game_against_a_random_player() -> None:
    rewards = set()
    for seed in range(12):
        rollout = play([f"[{cell}]" for cell in range(9)], {"seed": seed}, environment="textarena:TicTacToe-v0")
        rewards.add(rollout.episode_reward)
        others = [text for role, text in said(rollout) if role == "user"]
        assert all("Player 1 placed" in text or "invalid move" in text for text in others)
    assert {1.0} < rewards <= {1.0, 0.0, -1.0}


def test_a_game_that_is_not_played_to_its_end_scores_nothing() -> None:
    rollout = play(["[1]", "[2]"], {"seed": 1}, environment="textarena:GuessTheNumber-v0", max_turns=2)
    assert rollout.finish_reason == "length" and rollout.episode_reward == 0.0


def test_tools_of_an_mcp_server() -> None:
    calls = [call_text("add", json.dumps({"a": 2, "b": 40})), call_text("fail", "{}"), call_text("none", "{}"), "done"]
    rollout = play(calls, tools=[MCP, "calculator"])
    told = said(rollout)
    assert told[1] == ("tool", "42") and "Error executing tool fail" in told[3][1] and "no tool 'none'" in told[5][1]
    assert [turn.failures for turn in rollout.turns] == [0, 1, 1, 0]
    opening = rollout.prompt.token_ids
    assert len(opening) > 100 and told[-1] == ("assistant", "done")


def test_an_mcp_server_ends_with_its_worker_and_comes_back_when_it_died() -> None:
    server = McpServer(MCP, 20.0)
    first = int(server.call("process", {}))
    assert psutil.pid_exists(first) and server.call("add", {"a": 1, "b": 2}) == "3"
    with pytest.raises(EpisodeError, match="Connection closed"):
        server.call("die", {})
    second = int(server.call("process", {}))
    assert second != first
    server.close()
    assert not psutil.pid_exists(second)


@pytest.mark.more
def test_tools_of_an_mcp_server_by_http() -> None:
    with serving("mcp_server.py", path="/mcp", with_folder=False) as (url, _):
        rollout = play([call_text("add", json.dumps({"a": 2, "b": 40})), "done"], tools=[f"mcp:{url}/mcp"])
    assert said(rollout)[1] == ("tool", "42")


@pytest.mark.in_turn
@pytest.mark.more
def test_a_late_tool_is_one_failed_call() -> None:
    rollout = play([call_text("sleep", '{"seconds": 30}'), "done"], tools=[MCP], timeout_seconds=3.0)
    assert "took longer than episode.timeout_seconds=3" in said(rollout)[1][1] and rollout.turns[0].failures == 1


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"tools": ["mcp:no-such-command --now"]}, r"episode.tools=mcp:no-such-command --now cannot be started: "),
        ({"tools": ["mcp: "]}, "names no server; allowed: mcp:COMMAND ARGUMENTS, or mcp:URL."),
        ({"environment": "textarena:Gess-v0"}, "TextArena has no game 'Gess-v0'"),
        ({"environment": "textarena:ThreePlayerTicTacToe-v0"}, "needs more than two players"),
        ({"environment": "openenv:here"}, "is no URL; allowed: openenv:http://HOST:PORT."),
        ({"environment": "openenv:http://127.0.0.1:9"}, "no OpenEnv server answers there: ConnectionError"),
    ],
)
def test_what_cannot_be_used_is_answered_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        World(EpisodeConfig(**settings))


@pytest.mark.parametrize(
    "package, extra, settings",
    [
        ("textarena", "textarena", {"environment": "textarena:GuessTheNumber-v0"}),
        ("websockets", "openenv", {"environment": "openenv:http://here"}),
        ("mcp", "mcp", {"tools": ["mcp:a"]}),
    ],
)
def test_a_missing_package_is_named(
    package: str, extra: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Callable[..., Any] = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == package else found(name, *a))
    with pytest.raises(ConfigError, match=rf"needs the package {package}, which is not installed: .*\[{extra}\]"):
        World(EpisodeConfig(**settings))


def test_adapted_environments_give_rewards() -> None:
    assert gives_reward("textarena:GuessTheNumber-v0") and gives_reward("openenv:http://here")
