"""The limit of an episode counts what its environment or agent takes, and not what its turns wait to be sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.episodes.own_time import OwnTime


async def slow(request: Any) -> Any:
    await asyncio.sleep(float(request))
    return request


async def spend(*work: float, sampled: float = 100.0) -> list[tuple[float, float]]:
    """Work so many seconds, with a turn in between that takes ``sampled`` to be sampled; the limit is 3 seconds."""
    seen: list[tuple[float, float]] = []
    began = asyncio.get_running_loop().time()
    limit = OwnTime(3.0, lambda start, end: seen.append((start - began, end - began)))
    sample: Any = limit.around(slow)  # type: ignore[arg-type]
    async with limit:
        for number, seconds in enumerate(work):
            if number:
                await sample(sampled)
            await asyncio.sleep(seconds)
    return seen


def test_sampling_does_not_count_and_work_does() -> None:
    assert run_virtual(spend(1.0, 1.0, 0.9)) == [(0.0, 1.0), (101.0, 102.0), (202.0, pytest.approx(202.9))]
    with pytest.raises(TimeoutError):
        run_virtual(spend(1.0, 1.0, 1.1))


def test_the_clock_stands_still_until_the_last_of_several_calls_is_answered() -> None:
    async def several() -> bool:
        limit = OwnTime(3.0)
        sample: Any = limit.around(slow)  # type: ignore[arg-type]
        async with limit:
            await asyncio.sleep(2.0)
            first, last = asyncio.ensure_future(sample(5.0)), asyncio.ensure_future(sample(50.0))
            await first
            await asyncio.sleep(2.0)  # in which the last one is still sampled
            await last
            await asyncio.sleep(0.9)
        return limit.expired()

    assert run_virtual(several()) is False


def test_a_call_that_outlives_the_episode_changes_nothing() -> None:
    async def left() -> Any:
        limit = OwnTime(3.0)
        sample: Any = limit.around(slow)  # type: ignore[arg-type]
        async with limit:
            pending = asyncio.ensure_future(sample(5.0))
            await asyncio.sleep(1.0)
        return await pending

    assert run_virtual(left()) == 5.0
