"""What an agent is answered: a sampled turn as the JSON of OpenAI's protocol, whole or as a stream's events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrlhf.episodes.agents.calls import Call, RefusalError
from asyncrlhf.types import IntArray, Rollout

Pieces = Callable[[Sequence[int]], list[str]]


@dataclass
class Answer:
    """A sampled turn as its agent reads it. ``text`` ends before the stop text of the call, which is in the row.
    ``delivered``: whether it was sent while the agent was still there."""

    name: str
    turn: Rollout
    context: IntArray  # [P] what it followed
    text: str
    thought: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    delivered: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """The arguments of calls are a JSON text, as OpenAI has them."""
        made: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.tool_calls else "")}
        if self.thought:
            made["reasoning_content"] = self.thought
        if self.tool_calls:
            made["tool_calls"] = [_written(call) for call in self.tool_calls]
        return made

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.tool_calls else self.turn.finish_reason

    @property
    def usage(self) -> dict[str, int]:
        prompt, made = len(self.context), len(self.turn.response_ids)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def whole(call: Call, answer: Answer, pieces: Pieces) -> bytes:
    """``pieces``: the text of each token."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
    if call.chat:
        choice |= {"message": answer.message, "logprobs": _chat_logprobs(call, answer, pieces)}
    else:
        choice |= {"text": answer.text, "logprobs": _logprobs(call, answer, pieces)}
    kind = "chat.completion" if call.chat else "text_completion"
    made = {**_head(call, answer, kind), "choices": [choice], "usage": answer.usage}
    if call.token_ids:
        choice["token_ids"] = answer.turn.response_ids.tolist()
        (made if call.chat else choice)["prompt_token_ids"] = answer.context.tolist()
    return json.dumps(made).encode()


def streamed(call: Call, answer: Answer, pieces: Pieces) -> bytes:
    """All events of a stream; the turn is sampled whole, and so its text is one event."""
    kind = "chat.completion.chunk" if call.chat else "text_completion"
    head = _head(call, answer, kind)
    last: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
    if call.chat:
        delta = answer.message
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **one} for place, one in enumerate(delta["tool_calls"])]
        first = {"index": 0, "delta": delta, "logprobs": _chat_logprobs(call, answer, pieces), "finish_reason": None}
        last["delta"] = {}
    else:
        first = {"index": 0, "text": answer.text, "logprobs": _logprobs(call, answer, pieces), "finish_reason": None}
        last["text"] = ""
    opening = {**head, "choices": [first]}
    if call.token_ids:
        first["token_ids"] = answer.turn.response_ids.tolist()
        (opening if call.chat else first)["prompt_token_ids"] = answer.context.tolist()
    events = [opening, {**head, "choices": [last]}]
    if call.streams_usage:
        events.append({**head, "choices": [], "usage": answer.usage})
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def refused(error: RefusalError) -> bytes:
    kind = "invalid_request_error" if error.status == 400 else error.code
    told = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return json.dumps({"error": told}).encode()


def models() -> bytes:
    one = {"id": "policy", "object": "model", "created": 0, "owned_by": "asyncrlhf"}
    return json.dumps({"object": "list", "data": [one]}).encode()


def _head(call: Call, answer: Answer, kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {"id": answer.name, "object": kind, "created": int(time.time()), "model": call.model}
    if call.ignored:
        made["ignored_settings"] = list(call.ignored)
    return made


def _written(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
    return {**call, "function": function}


def _chat_logprobs(call: Call, answer: Answer, pieces: Pieces) -> dict[str, Any] | None:
    if not call.logprobs:
        return None
    texts, values = pieces(answer.turn.response_ids.tolist()), answer.turn.behavior_logprobs.tolist()
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, values, strict=True)
    ]
    return {"content": content, "refusal": None}


def _logprobs(call: Call, answer: Answer, pieces: Pieces) -> dict[str, Any] | None:
    if not call.logprobs:
        return None
    texts, offsets, place = pieces(answer.turn.response_ids.tolist()), [], 0
    for text in texts:
        offsets.append(place)
        place += len(text)
    values = answer.turn.behavior_logprobs.tolist()
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
