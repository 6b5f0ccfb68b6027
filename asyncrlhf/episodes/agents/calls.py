"""What an agent asks of the endpoint: the JSON body of one request, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.types import SamplingParams

Body = Mapping[str, Any]
# Fields that would change what is sampled or how often, and the values with which they do not.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
ROLES = ("system", "user", "assistant", "tool")


class RefusalError(AsyncRLHFError):
    """A call that is not answered with a turn; ``status`` is that of HTTP, ``code`` a word for programs."""

    def __init__(self, sentence: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(sentence)
        self.code, self.status = code, status


@dataclass(frozen=True)
class Call:
    """One request for a turn. A chat has ``messages``, with texts as content and the arguments of tool calls as
    objects; a completion has ``prompt``, a text or token ids."""

    messages: tuple[Body, ...] = ()
    tools: tuple[Body, ...] = ()
    prompt: str | tuple[int, ...] = ""
    most: int | None = None  # tokens; None: as many as the episode has left
    stop: tuple[str, ...] = ()
    reads_calls: bool = True
    parallel_calls: bool = True
    model: str = "policy"
    stream: bool = False
    streams_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    ignored: tuple[str, ...] = ()  # settings that differ from the run's own

    @property
    def chat(self) -> bool:
        return bool(self.messages)

    def repeats(self, earlier: Call) -> bool:
        return (self.messages, self.tools, self.prompt) == (earlier.messages, earlier.tools, earlier.prompt)


def read_call(body: Any, chat: bool, own: SamplingParams, refuse: bool) -> Call:
    """The call of a request's ``body``. Raises RefusalError, with status 400, for what the endpoint does not do.

    ``own``: how the run samples; ``refuse``: whether other settings are refused, and not only without effect.
    """
    if not isinstance(body, dict):
        raise RefusalError("The body is no JSON object.")
    for name, allowed in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            shown = " or ".join(json.dumps(one) for one in allowed) or "leave it out"
            raise RefusalError(f"{name}={_short(value)} is not supported; allowed: {shown}.")
    logprobs = body.get("logprobs")
    if isinstance(logprobs, int) and logprobs > 1:
        raise RefusalError(f"logprobs={logprobs} is not supported, for only those of sampled tokens are known.")
    tools = _objects(body, "tools") if chat else ()
    return Call(
        messages=tuple(_message(given) for given in _objects(body, "messages")) if chat else (),
        tools=tools,
        prompt="" if chat else _prompt(body.get("prompt")),
        most=_most(body),
        stop=_stop(body.get("stop")),
        reads_calls=bool(tools) and body.get("tool_choice") != "none",
        parallel_calls=body.get("parallel_tool_calls") is not False,
        model=str(body.get("model") or "policy"),
        stream=bool(body.get("stream")),
        streams_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        logprobs=logprobs is not None and logprobs is not False,
        token_ids=bool(body.get("return_token_ids")),
        ignored=_differing(body, own, refuse),
    )


def _differing(body: Body, own: SamplingParams, refuse: bool) -> tuple[str, ...]:
    """The sampling settings of a call that are not the run's: training needs the run's own distribution."""
    runs: Mapping[str, Any] = {
        "temperature": own.temperature,
        "top_p": own.top_p,
        "top_k": own.top_k,
        "min_p": own.min_p,
        "repetition_penalty": own.repetition_penalty,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "seed": None,
    }
    found = []
    for name, value in runs.items():
        given = body.get(name)
        if given is None or given == value or (name == "top_k" and given in (0, -1) and value == 0):
            continue
        if refuse:
            raise RefusalError(
                f"{name}={_short(given)} differs from the run's {value}; leave it out, or have it ignored by "
                "episode.agent_sampling=ignore."
            )
        found.append(name)
    return tuple(found)


def _most(body: Body) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RefusalError(f"{name}={_short(value)} is no number of tokens; allowed: 1 or more.")
        return value
    return None


def _stop(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusalError("stop is no text or list of texts; allowed: texts of at least one character.")
    return tuple(texts)


def _objects(body: Body, name: str) -> tuple[Body, ...]:
    given = body.get(name) or []
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise RefusalError(f"{name} is no list of objects.")
    if not given and name == "messages":
        raise RefusalError("messages is empty; allowed: at least one message.")
    return tuple(given)


def _prompt(given: Any) -> str | tuple[int, ...]:
    """A text or token ids; a list of one prompt is that prompt."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str) and given:
        return _encodable(given)
    if isinstance(given, list) and given and all(type(token) is int and token >= 0 for token in given):
        return tuple(given)
    raise RefusalError("prompt is no text and no list of token ids; allowed: one prompt, which is not empty.")


def _message(given: Body) -> Body:
    role = "system" if given.get("role") == "developer" else given.get("role")
    if role not in ROLES:
        raise RefusalError(f"A message has the role {_short(role)}; allowed: {', '.join(ROLES)}, developer.")
    made: dict[str, Any] = {"role": role, "content": _text(given.get("content"))}
    if isinstance(given.get("name"), str):
        made["name"] = given["name"]
    if role == "tool":
        made["tool_call_id"] = str(given.get("tool_call_id") or "")
    if role == "assistant" and given.get("tool_calls"):
        made["tool_calls"] = [_tool_call(one) for one in _objects(given, "tool_calls")]
    if role == "assistant" and isinstance(given.get("reasoning_content"), str):
        made["reasoning_content"] = given["reasoning_content"]
    return made


def _text(content: Any) -> str:
    """The text of a content, which may come in parts."""
    if content is None or isinstance(content, str):
        return _encodable(content or "")
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise RefusalError("The content of a message is no text; allowed: a text, or parts of type text.")
    return _encodable("".join(part["text"] for part in parts))


def _tool_call(given: Body) -> Body:
    function = given.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusalError("A tool call of a message has no function with a name.")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise RefusalError(f"The arguments of a call of {function['name']} are no JSON.") from None
    return {
        "id": str(given.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def same_message(one: Body, other: Body) -> bool:
    """Whether two messages say the same. White space around an assistant's text does not count, because many agents
    strip it."""
    return _said(one) == _said(other)


def _said(message: Body) -> Sequence[Any]:
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    return message["role"], content, message.get("tool_call_id"), message.get("tool_calls") or []


def _encodable(text: str) -> str:
    """Without the halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
