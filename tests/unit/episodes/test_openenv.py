"""Environments of a real OpenEnv server, with a model of written turns."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from asyncrlhf.episodes.environment import EpisodeError
from asyncrlhf.types import Rollout
from tests.calling_model import call_text
from tests.environment_servers import needs, serving
from tests.scripted import play, said


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    needs("openenv")
    with serving("openenv_server.py", path="/words/schema") as (url, _):
        yield url


@pytest.fixture
def words(server: str) -> str:
    return f"{server}/words"


def talk(url: str, *turns: str, seed: int = 4, **settings: object) -> Rollout:
    return play(turns, {"seed": seed, "hint": " now"}, environment=f"openenv:{url}", **settings)


def test_a_reply_is_the_one_text_of_an_action(words: str) -> None:
    rollout = talk(words, "no", "5", "4")
    assert rollout.prompt.messages[-1]["content"] == "Begin. Say 4 now."  # type: ignore[index]
    assert said(rollout)[:3] == [("assistant", "no"), ("user", "heard no"), ("assistant", "5")]
    assert [turn.reward for turn in rollout.turns] == [-0.125, -0.125, 1.0]
    assert rollout.episode_reward == 0.75 and rollout.finish_reason == "stop"
    assert talk(words, "2", seed=2**31 + 2).episode_reward == 1.0


def test_what_the_server_refuses_or_holds_back_is_one_failed_episode(words: str) -> None:
    with pytest.raises(EpisodeError, match=r"The server refused: .*no such word"):
        talk(words, "crash")
    began = time.monotonic()
    with pytest.raises(EpisodeError, match=r"took longer than episode.timeout_seconds=1"):
        talk(words, "sleep", timeout_seconds=1.0)
    assert time.monotonic() - began < 15 and talk(words, "4").episode_reward == 1.0


@pytest.mark.in_turn
@pytest.mark.more
def test_a_server_that_ends_is_one_failed_episode() -> None:
    needs("openenv")
    with (
        serving("openenv_server.py", path="/words/schema") as (url, process),
        pytest.raises(EpisodeError, match="The environment failed: Connection"),
    ):
        talk(f"{url}/words", "die")
    assert process.returncode == 3


def test_an_action_of_several_fields_is_a_tool(server: str) -> None:
    moves = [call_text("act", json.dumps(given)) for given in ({"step": 7}, {"step": 3, "back": True})]
    rollout = talk(f"{server}/fields", *moves, seed=3)
    assert rollout.episode_reward == 1.0 and len(rollout.turns) == 2
    assert said(rollout)[1] == ("tool", "place: 7\ngoal: 4")
    with pytest.raises(EpisodeError, match="The server refused: "):
        talk(f"{server}/fields", call_text("act", '{"stop": 1}'))


def test_tools_of_an_environment_are_the_models(server: str) -> None:
    turns = [call_text("add", '{"a": 2, "b": 3}'), call_text("subtract", "{}"), "It is 5."]
    rollout = talk(f"{server}/tools", *turns)
    assert "5" in said(rollout)[1][1] and [turn.failures for turn in rollout.turns] == [0, 1, 0]
    assert rollout.turns[0].tools == ("add",) and len(rollout.turns) == 3
