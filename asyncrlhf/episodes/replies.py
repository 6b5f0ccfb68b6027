"""Reads a sampled turn: its text, its thoughts and its calls of tools, by transformers' response templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from asyncrlhf.errors import ConfigError

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True)
class ToolCall:
    """A call that a turn makes. ``id``: the model's own, or one made of the call's place in its turn."""

    name: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(frozen=True)
class ParsedReply:
    """A sampled turn as read. ``malformed``: why its calls cannot be read, as a sentence; empty if they can. A
    malformed reply has no calls, and ``text`` is all of it."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    thought: str = ""


def call_id(place: int) -> str:
    """The id of a turn's call, for models that name none: nine letters and digits, which is what templates allow."""
    return f"call{place:05d}"


def known_response_template(tokenizer: transformers.PreTrainedTokenizerBase) -> Mapping[str, Any]:
    """How to read the replies of the tokenizer's model: its own response template, or TRL's for its chat template.
    Raises ConfigError if there is neither."""
    if own := getattr(tokenizer, "response_template", None):
        return dict(own)
    from trl.chat_template_utils import add_response_schema  # slow, and only episodes with tools need it

    holder: Any = SimpleNamespace(chat_template=tokenizer.chat_template)  # in place of the tokenizer, which others use
    try:
        add_response_schema(holder)
    except ValueError as error:
        raise ConfigError(
            "No response template is known for the chat template of model.path, so that the calls in its replies "
            "cannot be read; allowed: a tokenizer_config.json with a response_template, a chat template that "
            "trl.chat_template_utils.add_response_schema knows, or an environment without tools."
        ) from error
    return dict(holder.response_template)


class ReplyReader:
    """Reads replies by ``response_template``. ``prefix``: the text with which each of them was begun. ``marks``: the
    control tokens that open or close a call: a reply whose text has one although no call was read is malformed."""

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        response_template: Mapping[str, Any],
        prefix: str,
        marks: Sequence[str],
    ) -> None:
        self._tokenizer, self._template = tokenizer, dict(response_template)
        self._prefix, self._marks = prefix, marks
        self._special = tuple(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)

    def read(self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
        """The reply of these tokens; ``tools``, the schemas, give the arguments their types."""
        ids = [int(token) for token in token_ids]
        plain = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        try:
            read: Any = self._tokenizer.parse_response(
                ids, self._template, prefix=self._prefix, tools=[dict(tool) for tool in tools]
            )
            calls = tuple(_call(given, place) for place, given in enumerate(read.get("tool_calls") or ()))
        # JSON of a model may be anything: RecursionError comes of many open brackets.
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = " ".join(str(error).split())
            return ParsedReply(plain, malformed=f"A tool call cannot be read: {reason[:300]}")
        text = self._without_end(str(read.get("content") or ""))
        thought = str(read.get("reasoning_content") or read.get("thinking") or "")
        if lost := [mark for mark in self._marks if mark in text]:
            return ParsedReply(plain, malformed=f"A tool call cannot be read: its {lost[0]} belongs to no whole call.")
        return ParsedReply(text if text or calls or thought else plain, calls, "", thought)

    def _without_end(self, text: str) -> str:
        """Some response templates leave an end-of-turn token in the text, such as GLM's ``<|observation|>``."""
        while end := next((name for name in self._special if text.endswith(name)), ""):
            text = text.removesuffix(end).rstrip()
        return text


def _call(given: Any, place: int) -> ToolCall:
    """Raises ValueError for a call without a name, or whose arguments are no mapping."""
    given = given if isinstance(given, dict) else {}
    function = given.get("function", given)
    function = function if isinstance(function, dict) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name.strip():
        raise ValueError("it has no name")
    arguments = json.loads(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are {type(arguments).__name__}, and not an object")
    return ToolCall(name.strip(), arguments, str(given.get("id") or call_id(place)))
