"""The packed row of an episode: what its environment may say of a turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrlhf.episodes.environment import EpisodeError, Step
from asyncrlhf.episodes.row import Row
from asyncrlhf.turns import Turn
from asyncrlhf.types import Prompt


@pytest.mark.parametrize(("given", "kept"), [(None, None), (1, 1.0), (np.float32(0.5), 0.5)])
def test_a_turns_reward_is_a_number_or_none(given: Any, kept: float | None) -> None:
    row = Row(Prompt("0", "", np.arange(2)), turns=[Turn(0, 3)])
    row.answered(Step(reward=given), 0.0)
    assert row.turns[0].reward == kept and row.turn_rewards == [kept] * (kept is not None)


@pytest.mark.parametrize("given", [float("nan"), float("inf"), "good"])
def test_a_turns_reward_that_is_no_finite_number_fails_the_episode(given: Any) -> None:
    """It would otherwise reach an advantage, even where the episode's own reward is finite."""
    row = Row(Prompt("0", "", np.arange(2)), turns=[Turn(0, 3)])
    with pytest.raises(EpisodeError, match=r"The environment's reward is .*; allowed: a finite number, or None"):
        row.answered(Step(reward=given), 0.0)
