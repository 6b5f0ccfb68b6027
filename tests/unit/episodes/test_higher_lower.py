"""The packaged game: always the middle wins in four guesses, and what is no guess earns nothing."""

from __future__ import annotations

import asyncio

import pytest

from asyncrlhf.episodes.higher_lower import HigherLower
from asyncrlhf.episodes.replies import ParsedReply


async def play_middle(seed: int) -> tuple[int, float]:
    game = HigherLower()
    shown, guesses, earned = await game.reset({"seed": seed}), 0, 0.0
    while True:
        low, high = map(int, shown.rstrip("=").split("-"))
        step = await game.step(ParsedReply(str((low + high + 1) // 2)))
        guesses, earned, shown = guesses + 1, earned + (step.reward or 0.0), str(step.observation)
        if step.done:
            return guesses, earned


def test_the_middle_always_wins() -> None:
    games = [asyncio.run(play_middle(seed)) for seed in range(10)]
    assert [earned for _, earned in games] == [pytest.approx(1.0)] * 10
    assert sorted(guesses for guesses, _ in games) == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("said", ["", "x", "12", "-1", "²"])
def test_what_is_no_digit_earns_and_tells_nothing(said: str) -> None:
    async def play() -> list[object]:
        game = HigherLower()
        steps = [await game.reset({"seed": 0})]
        answers = [await game.step(ParsedReply(said)) for _ in range(HigherLower.GUESSES)]
        return [*steps, *((a.observation, a.done, a.reward) for a in answers)]

    told = asyncio.run(play())
    assert told == ["0-9=", *[("0-9=", False, 0.0)] * 3, ("0-9=", True, 0.0)]
