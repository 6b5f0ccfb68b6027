"""Reads rows that fork, token by token, without the package's own functions for it."""

from __future__ import annotations

from asyncrlhf.types import Rollout


def text_of(rollout: Rollout, place: int) -> list[int]:
    """The ids up to the row's token ``place``, found by going back from token to token."""
    row = [*rollout.prompt.token_ids, *rollout.response_ids]
    before = {len(rollout.prompt.token_ids) + fork.start: fork.follows for fork in rollout.forks}
    found = []
    while place >= 0:
        found.append(int(row[place]))
        place = before.get(place, place - 1)
    return found[::-1]
