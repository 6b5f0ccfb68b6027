"""One episode as its agent sees it: each call continues the episode's row, and is answered with a sampled turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    "This call does not continue the episode: {why}. With episode.history=keep each call repeats the messages and "
    "answers before, unchanged, and adds to them; a second conversation, such as that of a sub-agent, or a history "
    "that was edited or compacted, needs episode.history=fork."
)
OVER = "The episode is over, and its key has no effect any more."


@dataclass(frozen=True)
class Branch:
    """A conversation of the agent up to one answer, which later calls may continue, and where that is in the row."""

    call: Call
    answer: Answer
    messages: Sequence[Message]  # of the chat, with the answers
    text: str  # of a completion's prompt and answer
    calls: Mapping[str, ToolCall]  # of the last turn, by the id that the agent knows
    tip: int
    thread: Sequence[int]


class Session:
    """The endpoint gives it the calls of one key; they are answered one after another. With ``episode.history=fork`` a
    call that continues none of the agent's conversations begins another one, as a further branch of the row."""

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
        self._branches: list[Branch] = []  # one for each turn
        self._known: dict[str, ToolCall] = {}  # calls of all turns, by the id that the agent knows
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
            for branch in reversed(self._branches):
                if call.repeats(branch.call) and (retried or not branch.answer.delivered):
                    return branch.answer
            self._check_turns()
            row = self._continued(call)
            return self._read(call, row.context, await self._turn(call, row))

    def end(self) -> FinishReason:
        """From now on every call is refused; why the row ends."""
        self._ended = True
        if self._sampling is not None:
            self._sampling.cancel()
        self._note_turn()
        cut = bool(self._branches) and self._branches[-1].answer.turn.finish_reason == "length"
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
            row = self._row
            ids, messages = self._begun(call, row) if self._talk.forks else self._added(call, self._branches[-1])
        except (ConfigError, ObservedTextError) as error:
            raise RefusalError(str(error)) from error
        if self._room(row) <= len(ids):
            raise self._no_room(row, len(ids))
        self._note_turn()
        if len(ids):
            row.observed(ids, messages)
        return row

    def _opened(self, call: Call) -> Row:
        if call.chat:
            _check_last(call)
            ids = self._talk.opening(call.messages, call.tools)
        else:
            ids = self._talk.plain(call.prompt, begins=True) if isinstance(call.prompt, str) else _array(call.prompt)
        row = Row(replace(self.request.prompt, token_ids=ids))
        if self._room(row) < 1:
            raise self._no_room(row)
        return row

    def _room(self, row: Row) -> int:
        return row.room(self.request.sampling.max_completion_length, self._context)

    def _no_room(self, row: Row, added: int = 0) -> RefusalError:
        return self._limit(
            f"The episode has no room for an answer after a text of {len(row.context) + added} tokens and a response "
            f"of {row.length + added}: generator.max_completion_length="
            f"{self.request.sampling.max_completion_length}, and the model's context has {self._context} tokens.",
            "context_length_exceeded",
        )

    def _begun(self, call: Call, row: Row) -> tuple[IntArray, Sequence[Message]]:
        """Tokens and messages that this call adds to the row, in the branch that it continues, or in another one."""
        whole: IntArray | None
        for branch in sorted(self._branches, key=lambda b: (len(b.messages), len(b.text), b.tip), reverse=True):
            try:
                ids, messages = self._added(call, branch)
            except RefusalError as refused:
                if refused.code != "not_continued":
                    raise
                continue
            row.tip, row.thread = branch.tip, [*branch.thread]
            if not call.chat:
                return ids, messages
            given, opening = self._given(call)
            whole = self._talk.rewritten(np.concatenate([row.context, ids]), given, call.tools, opening)
            return (ids if whole is None else row.fork(whole)), messages
        row.thread = []
        if not call.chat:
            plain = self._talk.plain(call.prompt, begins=True) if isinstance(call.prompt, str) else _array(call.prompt)
            return row.fork(plain), [{"role": "user", "content": call.prompt}] * isinstance(call.prompt, str)
        _check_last(call)
        given, opening = self._given(call)
        if opening == len(given):
            whole = self._talk.opening(given, call.tools)
        else:
            whole = self._talk.whole(given, call.tools, opening)
        prompt = self._branches[0].call.messages
        return row.fork(whole), given[len(prompt) if prompt == call.messages[: len(prompt)] else 0 :]

    def _given(self, call: Call) -> tuple[list[Message], int]:
        """A call's messages, tools' calls with the names and ids that the model gave them; and how many of them come
        before the first that was sampled or observed."""
        given = [self._with_own_ids(message) for message in call.messages]
        later = (place for place, message in enumerate(given) if message["role"] in ("assistant", "tool"))
        return given, next(later, len(given))

    def _with_own_ids(self, message: Message) -> Message:
        if message["role"] == "tool" and (called := self._known.get(message["tool_call_id"])):
            return {**message, "name": called.name, "tool_call_id": called.id}
        if calls := message.get("tool_calls"):
            return {**message, "tool_calls": [{**one, "id": self._own_id(one["id"])} for one in calls]}
        return message

    def _own_id(self, given: str) -> str:
        return self._known[given].id if given in self._known else given

    def _added(self, call: Call, branch: Branch) -> tuple[IntArray, Sequence[Message]]:
        """Tokens and messages that this call adds to the branch. Raises RefusalError if it does not continue it."""
        assert self._row is not None
        before = branch.call
        if call.chat != before.chat or type(call.prompt) is not type(before.prompt):
            raise _not_continued("it is of another kind than the calls before")
        if call.chat:
            return self._added_messages(call, branch)
        if isinstance(call.prompt, str):
            if not call.prompt.startswith(branch.text):
                raise _not_continued("its prompt does not begin with the prompt and answer before")
            text = call.prompt[len(branch.text) :]
            return self._talk.plain(text, begins=False), [{"role": "user", "content": text}]
        known, given = self._row.context_of(branch.tip), _array(call.prompt)
        if len(given) < len(known) or not np.array_equal(given[: len(known)], known):
            raise _not_continued("its tokens do not begin with those of the prompt and answer before")
        return given[len(known) :], []

    def _added_messages(self, call: Call, branch: Branch) -> tuple[IntArray, Sequence[Message]]:
        known = len(branch.messages)
        if call.tools != branch.call.tools:
            raise _not_continued("its tools are others than those of the first call")
        pairs = enumerate(zip(branch.messages, call.messages, strict=False), start=1)
        if edited := [place for place, (own, given) in pairs if not same_message(own, given)]:
            raise _not_continued(f"its message {edited[0]} is another one than before")
        added = [self._named(message, branch) for message in call.messages[known:]]
        if not added:
            raise _not_continued(f"it has {len(call.messages)} messages, of which none is new")
        if other := [m["role"] for m in added if m["role"] not in ("user", "tool")]:
            raise _not_continued(f"a new message has the role {other[0]}, and only user and tool may follow an answer")
        return self._talk.suffix(branch.answer.turn.response_ids, added), added

    def _named(self, message: Message, branch: Branch) -> Message:
        """A tool's result with the name and the id that the model gave the call."""
        if message["role"] != "tool":
            return message
        given = message["tool_call_id"]
        if given and given not in branch.calls:
            raise RefusalError(f"A tool message has tool_call_id={given[:60]}, which no call of the last answer has.")
        called = branch.calls.get(given)
        return message if called is None else {**message, "name": called.name, "tool_call_id": called.id}

    async def _turn(self, call: Call, row: Row) -> Rollout:
        """Sample the next turn into the row."""
        room = self._room(row)
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
        row = self._row
        assert row is not None
        row.sampled(turn)
        self._answered_at = asyncio.get_running_loop().time()
        number = len(row.turns)
        reply = self._talk.parse(turn.response_ids, call.tools if call.reads_calls else ())
        row.read(reply)
        called = reply.tool_calls if call.parallel_calls else reply.tool_calls[:1]
        # A model's own ids, if it has any, often occur in several turns.
        calls = {f"call_{number}_{place}": own for place, own in enumerate(called)}
        self._known |= calls
        shown = tuple(
            {"id": name, "type": "function", "function": {"name": own.name, "arguments": dict(own.arguments)}}
            for name, own in calls.items()
        )
        text = _before(reply.text, call.stop)
        name = f"{'chatcmpl' if call.chat else 'cmpl'}-{self.request.rollout_id}-{number}"
        answer = Answer(name, turn, context, text, reply.thought, shown)
        messages = [*call.messages, {"role": "assistant", "content": text, "tool_calls": list(shown)}] * call.chat
        prompt = call.prompt + text if isinstance(call.prompt, str) else ""
        self._branches.append(Branch(call, answer, messages, prompt, calls, row.tip, row.ended))
        return answer

    def _note_turn(self) -> None:
        """What the agent did after the last turn, once."""
        if self.row is not None and self._answered_at:
            seconds = asyncio.get_running_loop().time() - self._answered_at
            calls = self._branches[-1].calls.values()
            self.row.answered(Step(tools=tuple(call.name for call in calls)), seconds)
            self._answered_at = 0.0


def _check_last(call: Call) -> None:
    if call.messages[-1]["role"] == "assistant":
        raise RefusalError("The last message is the assistant's; allowed: one of the roles user, tool, system.")


def _not_continued(why: str) -> RefusalError:
    return RefusalError(NOT_CONTINUED.format(why=why), "not_continued")


def _before(text: str, stop: Sequence[str]) -> str:
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else text


def _array(ids: Sequence[int]) -> IntArray:
    return np.asarray(ids, dtype=np.int64)
