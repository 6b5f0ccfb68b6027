"""Plays episodes by agents of the user's own: starts one for each, and packs what it asked into a rollout."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from functools import partial
from typing import Any

from asyncrlhf.episodes.agents.endpoint import Endpoint
from asyncrlhf.episodes.agents.process import run_agent
from asyncrlhf.episodes.agents.session import Session
from asyncrlhf.episodes.conversation import Conversation
from asyncrlhf.episodes.environment import Caller, EpisodeError
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.own_time import OwnTime
from asyncrlhf.episodes.row import Sample, finite, row_of
from asyncrlhf.episodes.step_times import StepTimes
from asyncrlhf.plugins import load_function
from asyncrlhf.redaction import HIDDEN
from asyncrlhf.types import GenerationRequest, Prompt, Rollout
from asyncrlhf.validation import MONTH, check


class AgentDriver:
    """Plays episodes, any number of them at a time on one asyncio loop, on which its endpoint is opened too.

    ``context``: the longest text of the model, in tokens. Raises ConfigError for an agent that cannot be started.
    """

    def __init__(self, config: EpisodeConfig, talk: Conversation, context: int) -> None:
        self._config = config
        self._talk = talk
        self._context = context
        self._endpoint = Endpoint(config.endpoint_host, talk.pieces, config.agent_sampling == "refuse")
        self.steps = StepTimes()
        # The episode has a limit, and its agent none besides.
        self.calls = Caller(MONTH, inline=False)
        self._command = shlex.split(config.agent_command)
        if self._command:
            program = self._command[0]
            check(shutil.which(program), f"episode.agent_command: there is no program {program}.")
        else:
            self._agent = load_function("episode.agent", config.agent)

    async def open(self, address: str) -> None:
        await self._endpoint.open(address)

    def close(self) -> None:
        """Nothing is open but the endpoint."""

    async def shut(self) -> None:
        await self._endpoint.close()

    def check(self, prompt: Prompt) -> list[str]:
        """Sentences about the chat template for the user."""
        return [self._talk.note] if self._talk.note else []

    async def play(self, request: GenerationRequest, sample: Sample) -> Rollout:
        """The whole episode as a rollout. Raises EpisodeError with the reason if there is none."""
        prompt, seconds = request.prompt, self._config.episode_seconds
        row = {"seed": request.seed, **row_of(prompt)}
        limit = OwnTime(seconds, partial(self.steps.add, ("agent",)))
        session = Session(request, limit.around(sample), self._talk, self._config, self._context)
        key = self._endpoint.admit(session)
        reward: float | None = None
        try:
            async with limit:
                reward = _reward(await self._played(self._endpoint.base_url, key, row))
        # An agent is the user's code, and may raise anything.
        except Exception as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            if not (late or session.limited) or session.row is None or session.error is not None:
                said = f"The episode took longer than episode.episode_seconds={seconds:g}." if late else _said(error)
                raise session.error or EpisodeError(said.replace(key, HIDDEN)) from error
            session.limited = True  # it is whole as it is, but truncated
        finally:
            self._endpoint.dismiss(key)
            reason = session.end()
        if session.error is not None:
            raise session.error
        if session.row is None:
            raise EpisodeError("The agent ended without an answered call of the endpoint, so that there is no rollout.")
        return session.row.rollout(request, reason, reward)

    async def _played(self, base_url: str, key: str, row: Mapping[str, Any]) -> Any:
        """What the agent returns. A process has ended before an error is raised."""
        if self._command:
            return await run_agent(self._command, base_url, key, row)
        return await self.calls("agent", self._agent, base_url, key, row)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, EpisodeError) else f"The agent failed: {type(error).__name__}: {error}"


def _reward(given: Any) -> float | None:
    """A number, an object with one, or none."""
    value = given.get("reward") if isinstance(given, Mapping) else given
    return None if value is None else finite(value, "agent")
