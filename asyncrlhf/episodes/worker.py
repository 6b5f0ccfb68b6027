"""Many episodes on one asyncio loop: what they ask to be sampled, and what has become of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from asyncrlhf.episodes.environment import EpisodeError
from asyncrlhf.episodes.row import Sample
from asyncrlhf.episodes.step_times import StepTimes
from asyncrlhf.types import GenerationFailure, GenerationRequest, Rollout


class Player(Protocol):
    """Plays one episode."""

    steps: StepTimes

    async def play(self, request: GenerationRequest, sample: Sample) -> Rollout:
        """The whole episode as a rollout. Raises EpisodeError with the reason if there is none."""
        ...

    def close(self) -> None:
        """Free what episodes share."""


class EpisodeWorker:
    """Its owner calls every method on the loop on which the worker was built; ``changed`` is set when :meth:`take` has
    something. An episode is known by its rollout id, a turn also by its tag: an answer for which no episode waits any
    more has no effect."""

    def __init__(self, name: str, driver: Player) -> None:
        self.name = name
        self.changed = asyncio.Event()
        self.steps = driver.steps
        self._driver = driver
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turns: dict[tuple[int, int], asyncio.Future[Rollout]] = {}
        self._wanted: list[GenerationRequest] = []
        self._finished: list[Rollout] = []
        self._failed: list[GenerationFailure] = []

    @property
    def playing(self) -> int:
        """Episodes whose environment is at work: that neither wait for a turn nor have ended."""
        return len(self._tasks) - len(self._turns)

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Play these episodes from the start. One that is under way already is given up."""
        self.cancel([request.rollout_id for request in requests])
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._play(request))
            self._tasks[request.rollout_id] = task

    def sampled(self, turns: Sequence[Rollout | GenerationFailure]) -> None:
        """Give turns that were sampled to their episodes; one that could not be sampled ends its episode."""
        for turn in turns:
            waiting = self._turns.pop((turn.rollout_id, turn.tag), None)
            if waiting is None or waiting.done():
                continue
            if isinstance(turn, Rollout):
                waiting.set_result(turn)
            else:
                waiting.set_exception(EpisodeError(turn.error))

    def cancel(self, rollout_ids: Sequence[int]) -> None:
        """Give up episodes; nothing of them is taken any more."""
        gone = set(rollout_ids)
        for rollout_id in gone & self._tasks.keys():
            self._tasks.pop(rollout_id).cancel()
        self._wanted = [request for request in self._wanted if request.rollout_id not in gone]
        self._finished = [rollout for rollout in self._finished if rollout.rollout_id not in gone]
        self._failed = [failure for failure in self._failed if failure.rollout_id not in gone]

    def take(self) -> tuple[list[GenerationRequest], list[Rollout], list[GenerationFailure]]:
        """Turns to be sampled, whole episodes and failed ones, since the last call."""
        self.changed.clear()
        taken = self._wanted, self._finished, self._failed
        self._wanted, self._finished, self._failed = [], [], []
        return taken

    def close(self) -> None:
        self.cancel(list(self._tasks))
        self._driver.close()

    async def _play(self, request: GenerationRequest) -> None:
        rollout_id, task = request.rollout_id, asyncio.current_task()
        try:
            played = await self._driver.play(request, self._sample)
            result: Rollout | GenerationFailure = replace(played, generator_id=self.name)
        except EpisodeError as error:
            result = GenerationFailure(rollout_id, str(error), request.epoch)
        if self._tasks.get(rollout_id) is not task:
            return  # given up, perhaps begun again
        del self._tasks[rollout_id]
        if isinstance(result, Rollout):
            self._finished.append(result)
        else:
            self._failed.append(result)
        self.changed.set()

    async def _sample(self, request: GenerationRequest) -> Rollout:
        """Wait until the turn has been sampled."""
        key = request.rollout_id, request.tag
        answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._turns[key] = answer
        self._wanted.append(request)
        self.changed.set()
        try:
            return await answer
        finally:
            if self._turns.get(key) is answer:
                del self._turns[key]
