"""The tools of an MCP server, as functions that the model may call."""

from __future__ import annotations

import asyncio
import shlex
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from typing import Any

from asyncrlhf.episodes.environment import EpisodeError, LateCallError, Message
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_package

PREFIX = "mcp:"
START_SECONDS = 60.0
CLOSE_SECONDS = 10.0


class McpError(EpisodeError):
    """A call that the server answered with an error."""


class McpServer:
    """One server for all episodes of a worker: ``mcp:COMMAND`` is started with the worker and ends with it, ``mcp:URL``
    is connected to. One that has ended is started again at the next call.

    Its session has a thread with an event loop of its own, so that a call only blocks its caller. Raises ConfigError if
    the server cannot be started. ``seconds``: the longest wait for one answer.
    """

    def __init__(self, target: str, seconds: float) -> None:
        self._key, self._seconds = f"episode.tools={target}", seconds
        check_package(self._key, "mcp", "mcp")
        self._target = target.removeprefix(PREFIX).strip()
        check(self._target, f"{self._key} names no server; allowed: mcp:COMMAND ARGUMENTS, or mcp:URL.")
        self._starting = threading.Lock()
        self._session: _Session | None = None
        try:
            listed = self._running().listed
        except (EpisodeError, ValueError) as error:
            raise ConfigError(f"{self._key} cannot be started: {error}.") from error
        self.tools = [McpTool(self, schema) for schema in listed]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The texts of the tool's result. Raises McpError for one that failed, LateCallError for none in time."""
        return self._running().call(name, arguments, self._seconds)

    def _running(self) -> _Session:
        with self._starting:
            if self._session is None or not self._session.alive:
                self._session = _Session(self._target)
            return self._session

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


class McpTool:
    """A tool of a server. ``tool_schema``: what the model is told of it."""

    def __init__(self, server: McpServer, schema: Message) -> None:
        self._server = server
        self.tool_schema = schema
        self.__name__ = str(schema["function"]["name"])

    def __call__(self, **arguments: Any) -> str:
        return self._server.call(self.__name__, arguments)


class _Session:
    def __init__(self, target: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(target,), daemon=True, name="mcp")
        self._thread.start()
        try:
            self._client, self.listed = self._ready.result(START_SECONDS)
        except LateError:
            self.close()
            raise LateCallError(f"it did not answer within {START_SECONDS:g} s") from None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stop.is_set()

    def _run(self, target: str) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(target))
        # The server is another program, and its client raises groups of errors; the caller gets the first.
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if not self._ready.done():
                self._ready.set_exception(EpisodeError(f"{type(error).__name__}: {error}"))
        finally:
            self._loop.close()

    async def _serve(self, target: str) -> None:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        where: Any = target
        if not target.startswith(("http://", "https://")):
            command, *arguments = shlex.split(target)
            where = stdio_client(StdioServerParameters(command=command, args=arguments))
        async with Client(where) as client:
            listed: list[Message] = []
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                listed += [_schema(tool) for tool in page.tools]
                cursor = page.next_cursor
                if not cursor:
                    break
            self._ready.set_result((client, listed))
            await self._stop.wait()

    def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        waiting = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, dict(arguments)), self._loop)
        try:
            result = waiting.result(seconds)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self.close()
            raise McpError(f"{name}: {error}") from error
        except LateError:
            waiting.cancel()
            raise LateCallError(f"{name} took longer than episode.timeout_seconds={seconds:g}.") from None
        text = "\n".join(str(part.text) for part in result.content if getattr(part, "text", None) is not None)
        if result.is_error:
            raise McpError(text or f"{name} failed.")
        return text

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_SECONDS)


def _schema(tool: Any) -> Message:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}
