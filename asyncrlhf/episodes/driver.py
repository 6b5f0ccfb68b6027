"""One episode from its environment's reset to its end: turns are sampled, answered, and packed into one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrlhf.episodes.conversation import Conversation
from asyncrlhf.episodes.environment import Caller, Environment, EpisodeError, Message, Step
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.observed_tokens import ObservedTextError
from asyncrlhf.episodes.own_time import OwnTime
from asyncrlhf.episodes.row import Row, Sample, finite, row_of
from asyncrlhf.episodes.step_times import StepTimes
from asyncrlhf.episodes.world import World
from asyncrlhf.errors import ConfigError
from asyncrlhf.tasks.task import PromptEncoder
from asyncrlhf.types import FinishReason, GenerationRequest, IntArray, Prompt, Rollout

CUT = " [cut off]"  # after an observation over episode.max_observation_length


class Driver:
    """Plays episodes, any number of them at a time on one asyncio loop.

    ``context``: the longest text of the model, in tokens; ``chat``: whether prompts are formatted with the chat
    template.
    """

    def __init__(
        self,
        config: EpisodeConfig,
        world: World,
        talk: Conversation,
        encoder: PromptEncoder,
        context: int,
        chat: bool = False,
    ) -> None:
        self._config = config
        self._world = world
        self._talk = talk
        self._encode = encoder
        self._context = context
        self._chat = chat
        self.steps = StepTimes()

    @property
    def calls(self) -> Caller:
        return self._world.call

    def close(self) -> None:
        self._world.close()

    async def play(self, request: GenerationRequest, sample: Sample) -> Rollout:
        """The whole episode as a rollout. Raises EpisodeError with the reason if there is none."""
        environment: Environment | None = None
        packed: Row | None = None
        prompt, limit = request.prompt, OwnTime(self._config.episode_seconds)
        row = row_of(prompt)
        try:
            environment = self._world.environment(row)
            try:
                async with limit:
                    begun = {"seed": request.seed, **self._world.row(row)}
                    observation = await self._call("reset", environment.reset, begun)
                    opened, asked = self._opening(prompt, environment, observation)
                    packed = Row(opened)
                    reason = await self._turns(request, environment, packed, limit.around(sample), asked)
            except TimeoutError:
                if not limit.expired() or packed is None or not packed.turns:
                    raise
                reason = "length"
            reward = await self._reward(environment, packed)
            told = environment.told
        except EpisodeError:
            raise
        # An environment is the user's code, and may raise anything.
        except Exception as error:
            if limit.expired():
                most = self._config.episode_seconds
                raise EpisodeError(f"The episode took longer than episode.episode_seconds={most:g}.") from error
            raise EpisodeError(f"The environment failed: {type(error).__name__}: {error}") from error
        finally:
            if environment is not None:
                await self._close(environment)
        return packed.rollout(request, reason, reward, told)

    async def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._world.call(what, function, *arguments)

    async def _close(self, environment: Environment) -> None:
        """The episode is whole without it: an error of it changes nothing."""
        with suppress(Exception):  # an environment is the user's code, and may raise anything
            await self._call("close", environment.close)

    def check(self, prompt: Prompt) -> list[str]:
        """Open an episode of this prompt, without its reset. Raises ConfigError if that cannot be; returns sentences
        about the chat template for the user."""
        try:
            environment = self._world.environment(row_of(prompt))
        except EpisodeError as error:
            raise ConfigError(str(error)) from error
        try:
            self._opening(prompt, environment, None)
        finally:
            asyncio.run(self._close(environment))
        return [self._talk.note] if self._talk.note else []

    def _opening(
        self, prompt: Prompt, environment: Environment, observation: str | None
    ) -> tuple[Prompt, list[Message]]:
        """The prompt with the tools' schemas and what ``reset`` told, without both as it is; and its messages, none if
        the chat template did not make it."""
        tools = list(environment.tools)
        told = self._cut(str(observation)) if observation else ""
        if prompt.messages is None and not self._chat:
            if tools:
                self._talk.opening(prompt.text, tools)  # refuses tools without a chat template
                raise ConfigError("episode.tools need task.chat_template=true, or prompts that are conversations.")
            if told:
                prompt = self._encode(prompt.prompt_id, prompt.text + told, prompt.answer, prompt.metadata)
            return prompt, []
        asked: list[Any] = [dict(message) for message in self._encode.messages(prompt.messages or prompt.text)]
        if not tools and not told:
            return prompt, asked
        asked[-1]["content"] = str(asked[-1]["content"]) + told
        # As in TRL, reward functions get the dataset's own messages, without the system prompt.
        given = None if prompt.messages is None else asked[-len(prompt.messages) :]
        ids = self._talk.opening(asked, tools)
        return replace(prompt, token_ids=ids, text=prompt.text + told, messages=given), asked

    async def _turns(
        self,
        request: GenerationRequest,
        environment: Environment,
        row: Row,
        sample: Sample,
        asked: Sequence[Message],
    ) -> FinishReason:
        """Turn after turn until the environment, a limit or an answer without a call ends the episode."""
        config, clock = self._config, asyncio.get_running_loop().time
        longest = request.sampling.max_completion_length
        while True:
            room = row.room(longest, self._context)
            if room < 1:
                if not row.turns:
                    raise EpisodeError("The prompt leaves no room for an answer in the model's context.")
                return "length"
            turn = await sample(row.request(request, min(room, config.max_turn_tokens or room)))
            row.sampled(turn)
            full = row.room(longest, self._context) < 1
            if turn.finish_reason == "length" and (full or not config.max_turn_tokens):
                return "length"
            began = clock()
            reply = self._talk.parse(turn.response_ids, environment.tools)
            row.read(reply)
            if environment.bounded:
                step = await environment.step(reply)
            else:
                step = await self._call("step", environment.step, reply)
            ended = clock()
            row.answered(step, ended - began)
            self.steps.add(step.tools, began, ended)
            if step.done or (step.failures and config.on_tool_error == "end"):
                return "stop"
            if len(row.turns) >= config.max_turns:
                return "length"
            self._observe(row, turn, step, asked, environment.tools)

    def _observe(self, row: Row, turn: Rollout, step: Step, asked: Sequence[Message], tools: Sequence[Message]) -> None:
        """Append what the model reads before its next turn."""
        given = step.observation
        told = [{"role": "user", "content": given}] if isinstance(given, str) else given
        messages = [{**message, "content": self._cut(str(message.get("content", "")))} for message in told]
        try:
            ids = self._following(row, turn, messages, asked, tools)
        except ObservedTextError as error:
            row.answered(replace(step, failures=step.failures + 1), row.turns[-1].seconds)
            messages = [{**message, "content": f"error: {error}"} for message in messages]
            ids = self._following(row, turn, messages, asked, tools)
        row.observed(ids, messages)

    def _following(
        self, row: Row, turn: Rollout, messages: Sequence[Message], asked: Sequence[Message], tools: Sequence[Message]
    ) -> IntArray:
        """The tokens of what follows a turn, in the branch of the row that reads it."""
        ids = self._talk.suffix(turn.response_ids, messages)
        if not asked:
            return ids
        context = np.concatenate([row.context, ids])
        whole = self._talk.rewritten(context, [*asked, *row.said, *messages], tools, len(asked))
        return ids if whole is None else row.fork(whole)

    def _cut(self, text: str) -> str:
        most = self._config.max_observation_length
        return text if len(text) <= most else text[:most] + CUT

    async def _reward(self, environment: Environment, row: Row) -> float | None:
        given = await self._call("reward", environment.reward)
        if given is None:
            return float(sum(row.turn_rewards)) if row.turn_rewards else None
        return finite(given, "environment")
