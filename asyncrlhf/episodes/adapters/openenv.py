"""Environments of OpenEnv servers, by their WebSocket protocol; the server has its packages, and this process none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import requests

from asyncrlhf.episodes.adapters.blocking import BlockingEnvironment
from asyncrlhf.episodes.environment import EpisodeError, LateCallError, Message, Step
from asyncrlhf.episodes.replies import ParsedReply
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_package

LARGEST_MESSAGE = 100 << 20  # bytes; as OpenEnv's own client
ACT = "act"  # the tool of an action with several fields
# Columns of a row that are no arguments of a reset.
NOT_SENT = ("prompt", "answer")


def environment_at(url: str, seconds: float) -> Callable[[], OpenEnv]:
    """The factory of ``openenv:URL``: a session of the server for each episode. ``seconds``: the longest wait for one
    answer. Raises ConfigError if no OpenEnv server answers there."""
    key = f"episode.environment=openenv:{url}"
    check_package(key, "websockets", "openenv")
    check(url.startswith(("http://", "https://")), f"{key} is no URL; allowed: openenv:http://HOST:PORT.")
    base = url.rstrip("/")
    try:
        answer = requests.get(f"{base}/schema", timeout=min(seconds, 30.0))
        answer.raise_for_status()
        schema = answer.json()["action"]
        fields = {name: kind for name, kind in schema["properties"].items() if name != "metadata"}
    except (requests.RequestException, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{key}: no OpenEnv server answers there: {type(error).__name__}: {error}.") from error
    needed = [name for name in schema.get("required", fields) if name in fields]
    return lambda: OpenEnv(base, fields, needed, seconds)


class OpenEnv(BlockingEnvironment):
    """One episode of a session of its own. The rewards of its steps are those of the turns.

    An action with one field for a text is the model's reply. Of an environment with tools, as MCP servers have them,
    the tools are the model's. An action with several fields is the tool ``act``. With tools, a reply without a call
    ends the episode.
    """

    def __init__(self, base: str, fields: Mapping[str, Any], needed: Sequence[str], seconds: float) -> None:
        self._base, self._fields, self._needed, self._seconds = base, fields, needed, seconds
        self._open = ExitStack()
        self._socket: Any = None
        self._tools: list[Message] = []
        self._has_tools = "tool_name" in fields
        one = needed if len(needed) == 1 else list(fields)
        text = len(one) == 1 and fields[one[0]].get("type") == "string"
        self._text_field = one[0] if text and not self._has_tools else ""
        if not self._has_tools and not self._text_field:
            parameters = {"type": "object", "properties": dict(fields), "required": list(needed)}
            self._tools = [_schema(ACT, "Act in the environment.", parameters)]

    @property
    def tools(self) -> Sequence[Message]:
        return self._tools

    def reset(self, row: Mapping[str, Any]) -> str | None:  # type: ignore[override]
        from websockets.sync.client import connect

        local = self._base.partition("://")[2].startswith(("localhost", "127.", "[::1]"))
        opened = connect(
            f"ws{self._base.removeprefix('http')}/ws",
            open_timeout=self._seconds,
            max_size=LARGEST_MESSAGE,
            proxy=None if local else True,
        )
        self._socket = self._open.enter_context(opened)
        given = {name: value for name, value in row.items() if name not in NOT_SENT}
        begun = self._ask("reset", {**given, "seed": int(given["seed"]) % 2**31})
        if begun.get("done"):
            raise EpisodeError("The environment's episode ended with its reset.")
        if self._has_tools:
            listed = self._ask("step", {"type": "list_tools"})["observation"].get("tools") or []
            self._tools = [_schema(t["name"], t.get("description") or "", t["input_schema"]) for t in listed]
        return as_text(begun.get("observation"))

    def step(self, reply: ParsedReply) -> Step:  # type: ignore[override]
        if self._text_field:
            return self._answered(self._ask("step", {self._text_field: reply.text}))
        if reply.malformed:
            said = f"The tool call could not be read: {reply.malformed}"
            return Step([{"role": "user", "content": said}], tools=("",), failures=1)
        if not reply.tool_calls:
            return Step(done=True)
        messages: list[Message] = []
        reward, done, failures = 0.0, False, 0
        for call in reply.tool_calls:
            arguments = dict(call.arguments)
            named = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
            told = self._ask("step", named if self._has_tools else arguments)
            observation = told.get("observation") or {}
            failures += bool(observation.get("error"))
            reward += float(told.get("reward") or 0.0)
            done = bool(told.get("done"))
            text = as_text(observation.get("error") or observation.get("result")) if self._has_tools else None
            content = as_text(observation) if text is None else text
            message = {"role": "tool", "name": call.name, "content": content or ""}
            messages.append(message | ({"tool_call_id": call.id} if call.id else {}))
            if done:
                break
        return Step(messages, done, reward, tuple(call.name for call in reply.tool_calls), failures)

    def close(self) -> None:  # type: ignore[override]
        if self._socket is not None:
            with suppress(OSError):
                self._socket.send(json.dumps({"type": "close"}))
        self._open.close()

    def _answered(self, told: Mapping[str, Any]) -> Step:
        reward = told.get("reward")
        return Step(
            as_text(told.get("observation")) or "", bool(told.get("done")), None if reward is None else float(reward)
        )

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The server's answer. Raises EpisodeError if it refuses, is late or has ended."""
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=self._seconds))
        except TimeoutError:
            raise LateCallError(f"The server took longer than episode.timeout_seconds={self._seconds:g}.") from None
        if answer.get("type") == "error":
            raise EpisodeError(f"The server refused: {answer.get('data', {}).get('message', answer)}")
        return answer.get("data") or {}


def as_text(value: Any) -> str | None:
    """An observation for the model: a text as it is, and a line for each of several fields, but for empty ones."""
    if not isinstance(value, Mapping):
        return None if value is None else value if isinstance(value, str) else json.dumps(value)
    fields = {name: item for name, item in value.items() if name != "metadata" and item not in (None, "", [], {})}
    if len(fields) == 1:
        return as_text(next(iter(fields.values())))
    return "\n".join(f"{name}: {as_text(item)}" for name, item in fields.items())


def _schema(name: str, description: str, parameters: Mapping[str, Any]) -> Message:
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}
