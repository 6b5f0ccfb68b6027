"""The study of episodes under staleness: what its environment rewards, and which versions its areas compare."""

from __future__ import annotations

import asyncio
import re
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrlhf.config.compose import load_config

worlds = import_module("experiments.34_episode_staleness.worlds")
(A, B), (C, D) = np.random.default_rng(7).integers(0, 100, (2, 2)).tolist()  # the products of a row's seed


def reply(text: str = "", **arguments: str) -> Any:
    calls = [SimpleNamespace(name="calculator", arguments=arguments)] if arguments else []
    return SimpleNamespace(text=text, tool_calls=calls)


def play(*replies: Any) -> tuple[list[Any], float]:
    """The steps after these replies, and the episode's reward."""

    async def steps() -> tuple[list[Any], float]:
        world = worlds.Two()
        assert await world.reset({"seed": 7}) == f"{A}*{B}="
        return [await world.step(said) for said in replies], await world.reward()

    return asyncio.run(steps())


def test_a_turn_is_right_by_its_call_or_by_its_answer() -> None:
    (called, answered), reward = play(reply(expression=f"{A}*{B}"), reply(str(C * D)))
    assert [(m["role"], m["content"]) for m in called.observation] == [("tool", str(A * B)), ("user", f"{C}*{D}=")]
    assert (called.done, answered.done, reward) == (False, True, 1.0)


WRONG = {
    "answer": reply(str(A * B + 1)),
    "expression": reply(expression=f"{C}*{D}"),
    "cut": reply(expression=f"{A}*"),
    "division": reply(expression="1/0"),
    "argument": reply(other=f"{A}*{B}"),
}


@pytest.mark.parametrize("said", WRONG.values(), ids=WRONG)
def test_another_answer_earns_nothing_and_a_missing_one_neither(said: Any) -> None:
    assert play(said, reply(str(C * D)))[1] == play(reply(str(A * B)))[1] == 0.5


@pytest.mark.parametrize("lag", [0, 4, 8])
def test_areas_of_all_lags_are_of_the_same_versions(lag: int) -> None:
    lab = import_module("experiments.34_episode_staleness.lag")
    rewards = [float(max(0, step - lag)) for step in range(lab.STEPS)]  # each version's reward is its number
    assert lab.area(rewards, lag) == np.mean(range(lab.STEPS - lab.LAST))


def test_the_game_in_words_rewards_what_guesses_rule_out() -> None:
    words = import_module("experiments.34_episode_staleness.smollm2")

    async def games(guess: Any) -> list[tuple[float, list[str]]]:
        found = []
        for seed in range(20):  # each number once
            game, low, high, reward, told = words.Twenty(), 1, 20, 0.0, []
            await game.reset({"seed": seed})
            for turn in range(game.GUESSES):
                step = await game.step(reply(guess(low, high)))
                reward += step.reward or 0.0
                if step.observation:
                    told.append(step.observation)
                    low, high = (int(x) for x in re.findall(r"\d+", step.observation))
                if step.done:
                    assert turn == game.GUESSES - 1 or not step.observation
                    break
            found.append((reward, told))
        return found

    middle = asyncio.run(games(lambda low, high: f"I say {(low + high) // 2}."))
    assert sum(reward == 1.0 for reward, _ in middle) == 7 and min(reward for reward, _ in middle) > 0.8
    assert all(("higher" in told[0]) != ("lower" in told[0]) for _, told in middle if told)
    silent = asyncio.run(games(lambda low, high: "none"))
    assert {reward for reward, _ in silent} == {0.0} and {len(told) for _, told in silent} == {3}


def test_each_run_of_the_game_is_allowed() -> None:
    words = import_module("experiments.34_episode_staleness.smollm2")
    cells = [*words.pilot(), *words.grid()]
    assert len(cells) == len(set(cells)) == 1 + 3 * 4
    for cell in cells[:5]:
        config = load_config(words.overrides(cell))
        assert config.async_.fixed_lag == cell.lag and config.model.path == "smollm2"
