"""What a chat template writes around a model's turn, and what it changes in earlier turns: found by rendering."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from asyncrlhf.episodes.observed_tokens import ObservedTokens
from asyncrlhf.episodes.replies import call_id
from asyncrlhf.errors import ConfigError

if TYPE_CHECKING:
    import transformers

Message = Mapping[str, Any]
_TURN = "turnend7"  # the last own text of the turns that are rendered to see what surrounds them
_THOUGHT = "thought7"
_USER = {"role": "user", "content": "first7"}
_RESULT = {"role": "tool", "content": "result7", "name": "name7", "tool_call_id": call_id(0)}
_TOOL = {
    "type": "function",
    "function": {"name": "name7", "description": "about7", "parameters": {"type": "object", "properties": {}}},
}
_REFUSALS = (jinja2.TemplateError, TypeError)  # what templates raise for messages that they were not written for


@dataclass(frozen=True)
class Frame:
    """An assistant's turn before certain messages. After what the model itself writes, such as the closing of a call,
    the template writes ``end``, the end of the turn; then come the messages. ``control``: the control tokens from the
    end of the turn to the beginning of the next one, if the messages' texts have none."""

    calls: int  # of the turn; 0: it is text
    as_text: bool  # whether the template wants the arguments of a call as a JSON text
    end: str
    control: tuple[int, ...]


class TurnFrames:
    """The chat template of a tokenizer, with ``kwargs``, seen from one sampled turn.

    ``generation_prompt``: the text that the template writes before a turn. ``end``: the text that it writes after one.
    ``last_end``: the control token with which it ends a last turn, if it ends earlier ones with another one.
    ``changes``: what it changes in earlier turns, each as the end of a sentence that begins with "it".
    """

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, tokens: ObservedTokens, kwargs: Mapping[str, Any]
    ) -> None:
        self._tokenizer, self._tokens, self._kwargs = tokenizer, tokens, kwargs
        self._frames: dict[tuple[tuple[str, bool], ...], Frame] = {}
        text = {"role": "assistant", "content": _TURN}
        try:
            bare, prompted = self.render([_USER], prompt=False), self.render([_USER])
            self.generation_prompt = prompted[tokens.whole_names(prompted, _shared(bare, prompted)) :]
            self.end, last = self._closing(text), self._after([_USER, text], prompt=False)
        except _REFUSALS as error:
            raise ConfigError(
                f"The chat template of model.path does not render a user's message and an answer ({error}); allowed: a "
                "template of messages whose content is text."
            ) from error
        ends = [tokens.control_names(end)[:1] for end in (self.end, last)]
        self.last_end = ends[1][0] if all(ends) and ends[0] != ends[1] else ""
        self.changes = tuple(self._changes())

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool = True, begun: bool = False
    ) -> str:
        """The text of a conversation. ``prompt``: with the beginning of the next turn; ``begun``: the last message is
        a turn to be continued."""
        with_tools = tools or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        rendered: Any = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self._tokenizer.get_chat_template(None, [{}] if with_tools else None),
            add_generation_prompt=prompt and not begun,
            continue_final_message=begun,
            tokenize=False,
            **self._kwargs,
        )
        return str(rendered)

    def frame(self, observed: Sequence[Message]) -> Frame:
        """The frame of a turn that these messages follow. Raises ConfigError if the template does not render them."""
        shape = tuple((str(m["role"]), not str(m["content"]).strip()) for m in observed)
        if shape not in self._frames:
            self._frames[shape] = self._find_frame(
                [
                    _harmless(role, "" if blank else f"harmless{place}", place)
                    for place, (role, blank) in enumerate(shape)
                ]
            )
        return self._frames[shape]

    def after_turn(self, frame: Frame, observed: Sequence[Message]) -> str:
        """The text from the end of the turn on, with the messages and the beginning of the next turn. Raises a
        template's refusal, and ConfigError if the turn's end depends on the texts."""
        turn = self._turn(frame.calls, frame.as_text, observed)
        closing, text = self._closing(turn), self._after([_USER, turn, *observed])
        if not text.startswith(closing) or not closing.endswith(frame.end):
            raise ConfigError(_UNSTABLE.format(role=observed[0]["role"]))
        return text[len(closing) - len(frame.end) :]

    def call_marks(self) -> tuple[str, ...]:
        """The control tokens of a turn with a call that a turn of text lacks."""
        turn = self._turn_with_call()
        call = self.render([_USER, turn], prompt=False) if turn else ""
        text = self.render([_USER, {"role": "assistant", "content": _TURN}], prompt=False)
        texts = self._tokens.control_names(text)
        return tuple(dict.fromkeys(name for name in self._tokens.control_names(call) if name not in texts))

    def _turn_with_call(self) -> Message | None:
        """None if the template has no tools."""
        try:
            frame = self.frame([_RESULT])
        except ConfigError:
            return None
        return self._turn(frame.calls, frame.as_text, [_RESULT])

    def _find_frame(self, observed: Sequence[Message]) -> Frame:
        tools = sum(message["role"] == "tool" for message in observed)
        why = ""
        # Templates differ in how many calls a turn may have, and whether arguments are a mapping or JSON.
        for calls, as_text in dict.fromkeys((c, a) for c in (tools, min(tools, 1)) for a in (False, bool(tools))):
            turn = self._turn(calls, as_text, observed)
            try:
                closing = self._closing(turn)
                after = self._after([_USER, turn, *observed])
            except _REFUSALS as error:
                why = why or f" ({error})"
                continue
            if not all(str(message["content"]).strip() in after for message in observed):
                continue
            if not after.startswith(closing):
                raise ConfigError(_UNSTABLE.format(role=observed[0]["role"]))
            end = self._end_of_call(closing) if calls else closing
            control = self._tokens.control(self._tokens.tokens(after[len(closing) - len(end) :]))
            return Frame(calls, as_text, end, tuple(control))
        roles = " and ".join(dict.fromkeys(str(message["role"]) for message in observed))
        raise ConfigError(
            f"The chat template of model.path does not render messages of role {roles} after an assistant's turn{why}; "
            "allowed: a model whose template does, or tokens of a plain text (a tokenizer without a chat template)."
        )

    def _turn(self, calls: int, as_text: bool, observed: Sequence[Message]) -> Message:
        if not calls:
            return {"role": "assistant", "content": _TURN}
        made = []
        for place, message in enumerate([m for m in observed if m["role"] == "tool"][:calls]):
            arguments: Any = {"key7": _TURN if place == calls - 1 else ""}
            function = {"name": message["name"], "arguments": json.dumps(arguments) if as_text else arguments}
            made.append({"type": "function", "id": message["tool_call_id"], "function": function})
        return {"role": "assistant", "content": "", "tool_calls": made}

    def _closing(self, turn: Message) -> str:
        """What the template writes after the turn's own text, before whatever follows."""
        after = self._after([_USER, turn])
        if not after.endswith(self.generation_prompt):
            return self._after([_USER, turn], prompt=False)
        return after.removesuffix(self.generation_prompt)

    def _end_of_call(self, closing: str) -> str:
        if closing.endswith(self.end):
            return self.end
        last = self._tokens.control_names(closing)[-1:]  # such as <|call|>
        return last[0] if last and closing.endswith(last[0]) else ""

    def _after(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        _, found, after = self.render(messages, prompt=prompt).partition(_TURN)
        if not found:
            raise jinja2.TemplateError("it leaves out the assistant's turn")
        return after

    def _changes(self) -> Iterator[str]:
        """Each turn is rendered as an earlier one, before a user's message, and compared with what was sampled."""
        text, later = {"role": "assistant", "content": _TURN}, {"role": "user", "content": "second7"}
        heads: list[list[Message]] = [[{"role": "system", "content": "system7"}, _USER], [_USER]]
        head = next((h for h in heads if self._rendered([*h, text, later])), heads[1])
        tools = [_TOOL] if self._turn_with_call() else []
        opening, whole = self._rendered(head, tools), self._rendered([*head, text, later], tools)
        if not whole:
            return  # a template of one turn; a second one is refused when it comes
        shared = _shared(opening, whole)
        if shared < len(opening) - len(self.generation_prompt):
            yield "changes the messages before a turn once others follow"
        elif shared < len(opening):
            yield f"leaves out {opening[self._tokens.whole_names(opening, shared) :]!r}, with which a generation begins"
        if self._rendered([*head, text], tools, prompt=False).partition(_TURN)[0] != whole.partition(_TURN)[0]:
            yield "begins a last turn with text that an earlier turn lacks"
        spaced = f" \n {_TURN} \n "
        if spaced not in self._rendered([*head, {**text, "content": spaced}, later]):
            yield "strips white space around a turn"
        yield from self._changes_of_thoughts(head, text, later)
        yield from self._changes_of_results()
        if self.last_end:
            yield f"ends a last turn with {self.last_end} and an earlier one with {self.end}"

    def _changes_of_thoughts(self, head: list[Message], text: Message, later: Message) -> Iterator[str]:
        inline = f"<think>\n{_THOUGHT}\n</think>\n\n{_TURN}"
        written: tuple[Message, ...] = (
            {**text, "reasoning_content": _THOUGHT, "thinking": _THOUGHT},
            {**text, "content": inline},
        )
        lost = [
            _THOUGHT in self._rendered([*head, turn], prompt=False)
            and _THOUGHT not in self._rendered([*head, turn, later])
            for turn in written
        ]
        if any(lost) or _THOUGHT not in self._rendered([*head, written[1], later]):
            yield "drops the thoughts of earlier turns when a user's message follows"
        elif inline not in self._rendered([*head, written[1], later]):
            yield "changes the white space of thoughts"

    def _changes_of_results(self) -> Iterator[str]:
        """Of episodes whose turns call tools."""
        turn = self._turn_with_call()
        if turn is None:
            return
        once = self._rendered([_USER, turn, _RESULT])
        twice = self._rendered([_USER, turn, _RESULT, turn, _RESULT])
        if once.rpartition(_TURN)[2] != twice.rpartition(_TURN)[2] or not twice.startswith(once.rpartition(_TURN)[0]):
            yield "writes later calls and results of tools differently from the first ones"
        thought = {**turn, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        if _THOUGHT in self._rendered([_USER, thought], prompt=False) and _THOUGHT not in self._rendered(
            [_USER, thought, _RESULT]
        ):
            yield "drops the thoughts of earlier turns when the result of a tool follows"

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool = True) -> str:
        try:
            return self.render(messages, tools, prompt=prompt)
        except _REFUSALS:
            return ""


_UNSTABLE = (
    "The chat template of model.path ends an assistant's turn differently when a message of role {role} follows, so "
    "that no sampled turn can be continued; allowed: a template whose end of a turn does not depend on what follows."
)


def _harmless(role: str, text: str, place: int) -> Message:
    """A message to render instead of an observed one; blank if that is, because templates may ask for it."""
    message = {"role": role, "content": text}
    return {**message, "name": "name7", "tool_call_id": call_id(place)} if role == "tool" else message


def _shared(one: str, other: str) -> int:
    """The number of characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
