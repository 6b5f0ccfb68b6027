"""A whole conversation as tokens: rendered anew, as a server does for each call, with its texts as plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2

from asyncrlhf.episodes.observed_tokens import ObservedTextError, ObservedTokens
from asyncrlhf.episodes.replies import call_id
from asyncrlhf.episodes.turn_frames import Message, TurnFrames


def whole_conversation(
    frames: TurnFrames, tokens: ObservedTokens, messages: Sequence[Message], tools: Sequence[Message], opening: int
) -> list[int]:
    """The tokens of a conversation up to the beginning of the model's next turn.

    Special tokens that the first ``opening`` messages spell out are meant, as in any prompt; those in later messages,
    which the episode observed or the model said, stay plain text. Raises ObservedTextError if that cannot be, or if the
    template refuses the messages; ConfigError if it has no calls of tools.
    """
    head, later = messages[:opening], [_plain(message) for message in messages[opening:]]
    if any(message.get("tool_calls") for message in later):
        result = {"role": "tool", "content": "result", "name": "name", "tool_call_id": call_id(0)}
        if frames.frame([result]).as_text:
            later = [_with_json(message) for message in later]
    later = _with_ids(later)
    observed, spoken = (list(_texts(later, by_model)) for by_model in (False, True))

    def render(given: Sequence[str]) -> str:
        parts = {False: iter(given[: len(observed)]), True: iter(given[len(observed) :])}
        filled = [_changed(m, lambda _, own=parts[m["role"] == "assistant"]: next(own)) for m in later]  # type: ignore[misc]
        return frames.render([*head, *filled], tools)

    try:
        return tokens.whole(render, observed, spoken)
    except (jinja2.TemplateError, TypeError) as error:
        raise ObservedTextError(f"The chat template refuses the conversation: {error}.") from error


def call_id_of(given: Any, place: int) -> str:
    """A model may have sampled any text as an id; only letters, digits, ``-`` and ``_`` go into the template again."""
    text = str(given or "")
    return text if text.replace("-", "").replace("_", "").isalnum() else call_id(place)


def encodable(text: str) -> str:
    """Without the halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _texts(messages: Sequence[Message], by_model: bool) -> Iterator[str]:
    """The texts of the assistant's messages, or of the others, in their order."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    for message in messages:
        if (message["role"] == "assistant") == by_model:
            _changed(message, note)
    yield from found


def _plain(message: Message) -> Message:
    made = _changed({**message, "content": str(message.get("content") or "")}, encodable)
    return {**made, "name": made.get("name") or "tool"} if made["role"] == "tool" else made


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """With ids of calls that every template takes: each result has that of its call."""
    made, place = list[Message](), 0
    for message in messages:
        place = place + 1 if message["role"] == "tool" else 0
        own = dict(message)
        if message["role"] == "tool":
            own["tool_call_id"] = call_id_of(message.get("tool_call_id"), place - 1)
        if calls := message.get("tool_calls"):
            own["tool_calls"] = [{**call, "id": call_id_of(call.get("id"), at)} for at, call in enumerate(calls)]
        made.append(own)
    return made


def _with_json(message: Message) -> Message:
    """With the arguments of calls as JSON texts."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _changed(message: Message, change: Callable[[str], str]) -> Message:
    """With each text in it changed, in a fixed order."""
    free = {name: _deep(message[name], change) for name in ("content", "name", "reasoning_content") if name in message}
    if calls := message.get("tool_calls"):
        free["tool_calls"] = [
            {**call, "function": {name: _deep(value, change) for name, value in call["function"].items()}}
            for call in calls
        ]
    return {**message, **free}


def _deep(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _deep(own, change) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_deep(own, change) for own in value]
    return value
