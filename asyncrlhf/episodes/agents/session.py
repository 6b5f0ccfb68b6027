"""One episode as its agent sees it: each call continues the episode's row, and is answered with a sampled turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrlhf.episodes.agents.answers import Answer
from asyncrlhf.episodes.agents.calls import Call, RefusalError, same_message
from asyncrlhf.episodes.conversation import Conversation
from asyncrlhf.episodes.environment import EpisodeError, Message, Step
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.observed_tokens import ObservedTextError
from asyncrlhf.episodes.replies import ToolCall
from asyncrlhf.episodes.row import Row, Sample
from asyncrlhf.errors import ConfigError
from asyncrlhf.types import FinishReason, GenerationRequest, IntArray, Rollout

NOT_CONTINUED = (
    "This call does not continue the episode: {why}. An episode is one row of tokens, so that each call repeats the "
    "messages and answers before, unchanged, and adds to them; a second conversation, such as that of a sub-agent, "
    "needs an episode of its own."
)
OVER = "The episode is over, and its key has no effect any more."


class Session:
    """The endpoint gives it the calls of one key; they are answered one after another."""

    def __init__(
        self, request: GenerationRequest, sample: Sample, talk: Conversation, config: EpisodeConfig, context: int
    ) -> None:
        self.request = request
        self.limited = False  # whether a call was refused because the episode had no room or turn left
        self.error: EpisodeError | None = None  # of a turn that could not be sampled
        self._sample = sample
        self._talk = talk
        self._config = config
        self._context = context
        self._row: Row | None = None
        self._last: tuple[Call, Answer] | None = None
        self._messages: list[Mapping[str, Any]] = []  # of the chat, with the answers
        self._text = ""  # of a completion's prompt and answer
        self._calls: dict[str, ToolCall] = {}  # of the last turn, by the id that the agent knows
        self._answered_at = 0.0
        self._sampling: asyncio.Future[Rollout] | None = None
        self._ended = False
        self._lock = asyncio.Lock()

    @property
    def row(self) -> Row | None:
        """None without a turn."""
        return self._row if self._row is not None and self._row.turns else None

    async def answer(self, call: Call, retried: bool) -> Answer:
        """The next turn. Raises RefusalError. A call that is repeated because its answer never arrived, or because the
        agent's client tries again (``retried``), gets that answer: nothing is sampled twice."""
        async with self._lock:
            if self._ended or self.error is not None:
                raise RefusalError(str(self.error or OVER), "episode_over", 410)
            if self._last is not None and call.repeats(self._last[0]) and (retried or not self._last[1].delivered):
                return self._last[1]
            self._check_turns()
            row = self._continued(call)
            answer = self._read(call, row.context, await self._turn(call, row))
            self._last = call, answer
            return answer

    def end(self) -> FinishReason:
        """From now on every call is refused; why the row ends."""
        self._ended = True
        if self._sampling is not None:
            self._sampling.cancel()
        self._note_turn()
        cut = self._last is not None and self._last[1].turn.finish_reason == "length"
        return "length" if cut or self.limited else "stop"

    def _limit(self, sentence: str, code: str) -> RefusalError:
        self.limited = True
        return RefusalError(sentence, code)

    def _check_turns(self) -> None:
        most = self._config.max_turns
        if self._row is not None and len(self._row.turns) >= most:
            raise self._limit(f"The episode has had its episode.max_turns={most} turns.", "max_turns")

    def _continued(self, call: Call) -> Row:
        """The row with what this call adds to it."""
        try:
            if self._row is None:
                self._row = self._opened(call)
                return self._row
            row, ids, messages = self._row, *self._added(call)
        except (ConfigError, ObservedTextError) as error:
            raise RefusalError(str(error)) from error
        if row.length + len(ids) >= self._most(row):
            raise self._no_room(row, len(ids))
        self._note_turn()
        if len(ids):
            row.observed(ids, messages)
        return row

    def _opened(self, call: Call) -> Row:
        if call.chat:
            if call.messages[-1]["role"] == "assistant":
                raise RefusalError("The last message is the assistant's; allowed: one of the roles user, tool, system.")
            ids = self._talk.opening(call.messages, call.tools)
        else:
            ids = self._talk.plain(call.prompt, begins=True) if isinstance(call.prompt, str) else _array(call.prompt)
        row = Row(replace(self.request.prompt, token_ids=ids))
        if self._most(row) < 1:
            raise self._no_room(row)
        return row

    def _most(self, row: Row) -> int:
        """The longest response, in tokens."""
        return min(self.request.sampling.max_completion_length, self._context - len(row.prompt.token_ids))

    def _no_room(self, row: Row, added: int = 0) -> RefusalError:
        return self._limit(
            f"The episode has no room for an answer after a prompt of {len(row.prompt.token_ids)} tokens and a "
            f"response of {row.length + added}: generator.max_completion_length="
            f"{self.request.sampling.max_completion_length}, and the model's context has {self._context} tokens.",
            "context_length_exceeded",
        )

    def _added(self, call: Call) -> tuple[IntArray, Sequence[Message]]:
        """Tokens and messages that this call adds to the row. Raises RefusalError if it does not continue it."""
        assert self._row is not None and self._last is not None
        before = self._last[0]
        if call.chat != before.chat or type(call.prompt) is not type(before.prompt):
            raise _not_continued("it is of another kind than the calls before")
        if call.chat:
            return self._added_messages(call)
        if isinstance(call.prompt, str):
            if not call.prompt.startswith(self._text):
                raise _not_continued("its prompt does not begin with the prompt and answer before")
            text = call.prompt[len(self._text) :]
            return self._talk.plain(text, begins=False), [{"role": "user", "content": text}]
        known, given = self._row.context, _array(call.prompt)
        if len(given) < len(known) or not np.array_equal(given[: len(known)], known):
            raise _not_continued("its tokens do not begin with those of the prompt and answer before")
        return given[len(known) :], []

    def _added_messages(self, call: Call) -> tuple[IntArray, Sequence[Message]]:
        assert self._last is not None
        known = len(self._messages)
        if call.tools != self._last[0].tools:
            raise _not_continued("its tools are others than those of the first call")
        pairs = enumerate(zip(self._messages, call.messages, strict=False), start=1)
        if edited := [place for place, (own, given) in pairs if not same_message(own, given)]:
            raise _not_continued(f"its message {edited[0]} is another one than before")
        added = [self._named(message) for message in call.messages[known:]]
        if not added:
            raise _not_continued(f"it has {len(call.messages)} messages, of which none is new")
        if other := [m["role"] for m in added if m["role"] not in ("user", "tool")]:
            raise _not_continued(f"a new message has the role {other[0]}, and only user and tool may follow an answer")
        return self._talk.suffix(self._last[1].turn.response_ids, added), added

    def _named(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A tool's result with the name and the id that the model gave the call."""
        if message["role"] != "tool":
            return message
        given = message["tool_call_id"]
        if given and given not in self._calls:
            raise RefusalError(f"A tool message has tool_call_id={given[:60]}, which no call of the last answer has.")
        called = self._calls.get(given)
        return message if called is None else {**message, "name": called.name, "tool_call_id": called.id}

    async def _turn(self, call: Call, row: Row) -> Rollout:
        """Sample the next turn into the row."""
        room = self._most(row) - row.length
        length = min(room, self._config.max_turn_tokens or room, call.most or room)
        self._sampling = asyncio.ensure_future(self._sample(row.request(self.request, length, call.stop)))
        await asyncio.wait([self._sampling])
        if self._sampling.cancelled() or self._ended:
            raise RefusalError(OVER, "episode_over", 410)
        try:
            return self._sampling.result()
        except EpisodeError as error:
            self.error = error
            raise RefusalError(str(error), "episode_over", 410) from error

    def _read(self, call: Call, context: IntArray, turn: Rollout) -> Answer:
        assert self._row is not None
        self._row.sampled(turn)
        self._answered_at = asyncio.get_running_loop().time()
        number = len(self._row.turns)
        reply = self._talk.parse(turn.response_ids, call.tools if call.reads_calls else ())
        self._row.read(reply)
        called = reply.tool_calls if call.parallel_calls else reply.tool_calls[:1]
        # A model's own ids, if it has any, often occur in several turns.
        self._calls = {f"call_{number}_{place}": own for place, own in enumerate(called)}
        shown = tuple(
            {"id": name, "type": "function", "function": {"name": own.name, "arguments": dict(own.arguments)}}
            for name, own in self._calls.items()
        )
        text = _before(reply.text, call.stop)
        name = f"{'chatcmpl' if call.chat else 'cmpl'}-{self.request.rollout_id}-{number}"
        answer = Answer(name, turn, context, text, reply.thought, shown)
        if call.chat:
            self._messages = [*call.messages, {"role": "assistant", "content": text, "tool_calls": list(shown)}]
        elif isinstance(call.prompt, str):
            self._text = call.prompt + text
        return answer

    def _note_turn(self) -> None:
        """What the agent did after the last turn, once."""
        if self.row is not None and self._answered_at:
            seconds = asyncio.get_running_loop().time() - self._answered_at
            self.row.answered(Step(tools=tuple(call.name for call in self._calls.values())), seconds)
            self._answered_at = 0.0


def _not_continued(why: str) -> RefusalError:
    return RefusalError(NOT_CONTINUED.format(why=why), "not_continued")


def _before(text: str, stop: Sequence[str]) -> str:
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else text


def _array(ids: Sequence[int]) -> IntArray:
    return np.asarray(ids, dtype=np.int64)
