"""The packed row of an episode: its prompt, then sampled turns and what was observed between them."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncrlhf.episodes.environment import EpisodeError, Message, Step
from asyncrlhf.episodes.replies import ParsedReply
from asyncrlhf.turns import Fork, Turn, followed, lineage
from asyncrlhf.types import OBSERVED, FinishReason, GenerationRequest, IntArray, Prompt, Rollout

# Samples one turn after a context [n] of token ids: the request of the turn in, its tokens, log-probs and versions out.
# All that an episode knows of generation.
Sample = Callable[[GenerationRequest], Awaitable[Rollout]]


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn's random draws; that of the first is the rollout's own."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/turn/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The prompt's columns, as they are in its dataset, for the environment."""
    return {"answer": prompt.answer, **prompt.metadata, "prompt": prompt.messages or prompt.text}


def as_message(reply: ParsedReply) -> Message:
    """A turn in the form in which TRL's reward functions get it."""
    message = {"role": "assistant", "content": reply.text}
    calls = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in reply.tool_calls
    ]
    thought = {"reasoning_content": reply.thought} if reply.thought else {}
    return message | thought | ({"tool_calls": calls} if calls else {})


@dataclass
class Row:
    """The packed row of an episode so far. Sampled tokens enter it as the engine made them, and are never decoded and
    tokenised again.

    What comes next follows the token at ``tip``, a position counted from the prompt's first token (-1: nothing). That
    is the row's last token, unless another branch goes on. ``thread``: the stretches of the conversation that goes on.
    """

    prompt: Prompt
    ids: list[IntArray] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    versions: list[IntArray] = field(default_factory=list)
    kept_ids: list[Any] = field(default_factory=list)
    kept_counts: list[Any] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    messages: list[Sequence[Message]] = field(default_factory=list)  # of each stretch
    turns: list[Turn] = field(default_factory=list)
    length: int = 0  # of the response
    forks: list[Fork] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # the thread of the last turn

    def __post_init__(self) -> None:
        self.tip = len(self.prompt.token_ids) - 1

    @property
    def context(self) -> IntArray:
        """[n] the tokens that the next turn follows."""
        return self.context_of(self.tip)

    def context_of(self, tip: int) -> IntArray:
        """[n] the token at a position of the row, and those that it follows."""
        return self._whole[lineage(self._follows, tip) if self.forks else slice(tip + 1)]

    @property
    def _whole(self) -> IntArray:
        return np.concatenate([self.prompt.token_ids, *self.ids])

    @property
    def _follows(self) -> IntArray:
        prompt = len(self.prompt.token_ids)
        return followed(self.forks, prompt, prompt + self.length)

    @property
    def said(self) -> list[Message]:
        """The messages of the conversation that goes on, after the prompt."""
        return [message for stretch in self.thread for message in self.messages[stretch]]

    def room(self, longest: int, context: int) -> int:
        """Tokens for which there is room: in a response of at most ``longest``, and in the model's ``context``."""
        return min(longest - self.length, context - len(self.context))

    def shared(self, ids: IntArray) -> tuple[int, int]:
        """The longest beginning of a text ``ids`` [n] that one of the branches has: its number of tokens, and the
        position of its last one, -1 for none."""
        best, whole, follows = (0, -1), self._whole, self._follows
        for turn in self.turns:
            places = lineage(follows, len(self.prompt.token_ids) + turn.end - 1)[: len(ids)]
            differs = np.flatnonzero(whole[places] != ids[: len(places)])
            count = int(differs[0]) if len(differs) else len(places)
            if count > best[0]:
                best = count, int(places[count - 1])
        return best

    def fork(self, ids: IntArray) -> IntArray:
        """Go on after the longest beginning of a text ``ids`` [n] that the row has; the rest of it is returned."""
        count, self.tip = self.shared(ids)
        return ids[count:]

    def sampled(self, turn: Rollout) -> None:
        start = self.length
        if turn.kept_counts is not None:
            self.kept_ids.append(turn.kept_ids)
            self.kept_counts.append(turn.kept_counts)
        self._append(turn.response_ids, turn.behavior_logprobs, turn.policy_versions)
        self.ended = [*self.thread]
        self.texts.append(turn.response_text)
        self.turns.append(Turn(start, self.length, turn.generator_id))
        self.messages.append([{"role": "assistant", "content": turn.response_text}])

    def _append(self, ids: IntArray, logprobs: Any, versions: IntArray) -> None:
        end = len(self.prompt.token_ids) + self.length
        if len(ids) and self.tip != end - 1:
            self.forks.append(Fork(self.length, self.tip))
        self.thread.append(len(self.ids))
        self.ids.append(ids)
        self.logprobs.append(logprobs)
        self.versions.append(versions)
        self.length += len(ids)
        self.tip = end + len(ids) - 1 if len(ids) else self.tip

    def read(self, reply: ParsedReply) -> None:
        """What the last turn says."""
        self.messages[-1] = [as_message(reply)]

    def observed(self, ids: IntArray, messages: Sequence[Message]) -> None:
        count = len(ids)
        self._append(ids, np.zeros(count, np.float32), np.full(count, OBSERVED, np.int64))
        self.texts.append("".join(str(message["content"]) for message in messages))
        self.messages.append(messages)
        if self.kept_counts:
            self.kept_counts.append(np.zeros(count, np.int32))

    def answered(self, step: Step, seconds: float) -> None:
        """What the environment did after the last turn. Raises EpisodeError if its reward is no finite number."""
        earned = None if step.reward is None else finite(step.reward, "environment")
        told = replace(self.turns[-1], tools=step.tools, seconds=seconds, failures=step.failures, reward=earned)
        self.turns[-1] = told

    @property
    def turn_rewards(self) -> list[float]:
        return [turn.reward for turn in self.turns if turn.reward is not None]

    def request(self, episode: GenerationRequest, length: int, stop: Sequence[str] = ()) -> GenerationRequest:
        """The request of the next turn, of at most ``length`` tokens, which also ends after a text of ``stop``. Its
        prompt is only token ids: no engine reads more of it."""
        own, number = episode.sampling, len(self.turns)
        return replace(
            episode,
            prompt=Prompt(episode.prompt.prompt_id, "", self.context),
            seed=turn_seed(episode.seed, number),
            sampling=replace(own, max_completion_length=length, stop=(*own.stop, *stop)),
            tag=episode.tag + number,
        )

    def rollout(
        self,
        request: GenerationRequest,
        reason: FinishReason,
        reward: float | None,
        environment: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """The whole episode, of at least one turn; it ends with the last one. ``environment``: what it tells of itself
        to reward functions."""
        while self.length > self.turns[-1].end:  # late, it ended while the next turn was being sampled
            self.length -= len(self.ids.pop())
            for stretches in (self.logprobs, self.versions, self.texts, self.messages, self.kept_counts):
                del stretches[-1:]
        forks = tuple(fork for fork in self.forks if fork.start < self.length)
        told: Mapping[str, Any] = {}
        if self.kept_counts:
            told = {"kept_ids": np.concatenate(self.kept_ids), "kept_counts": np.concatenate(self.kept_counts)}
        return Rollout(
            rollout_id=request.rollout_id,
            group_id=request.group_id,
            prompt=self.prompt,
            response_ids=_joined(self.ids),
            behavior_logprobs=_joined(self.logprobs),
            policy_versions=_joined(self.versions),
            finish_reason=reason,
            response_text="".join(self.texts[stretch] for stretch in self.ended),
            generator_id=self.turns[-1].generator_id,
            epoch=request.epoch,
            turns=tuple(self.turns),
            episode_reward=reward,
            messages=tuple(message for stretch in self.ended for message in self.messages[stretch]),
            environment=environment,
            forks=forks,
            **told,
        )


def finite(reward: Any, whose: str) -> float:
    """A reward as a number. Raises EpisodeError unless it is finite."""
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = float("nan")
    if not np.isfinite(value):
        raise EpisodeError(f"The {whose}'s reward is {str(reward)[:80]}; allowed: a finite number, or None.")
    return value


def _joined(arrays: Sequence[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
