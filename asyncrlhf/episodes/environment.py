"""What an episode's world is to its driver: the base class of environments, and how one is called within limits."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrlhf.errors import AsyncRLHFError

if TYPE_CHECKING:
    from asyncrlhf.episodes.replies import ParsedReply

Message = Mapping[str, Any]  # of a conversation: role, content, and what the chat template knows besides


class EpisodeError(AsyncRLHFError):
    """An episode that cannot go on; its rollout has failed with this sentence."""


class LateCallError(EpisodeError):
    """A call of a tool or environment over ``episode.timeout_seconds``."""


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn.

    ``observation``: a text, which the model reads as the user's message, or messages of the roles user and tool.
    ``tools``: names of the tools that were called; ``failures``: of them, those that failed.
    """

    observation: str | Sequence[Message] = ""
    done: bool = False
    reward: float | None = None  # of this turn
    tools: tuple[str, ...] = ()
    failures: int = 0


class Environment:
    """The world of one episode; a subclass is created without arguments for each, and lives on one asyncio loop with
    others. Calls that wait must be awaited: a blocking one belongs into ``asyncio.to_thread``."""

    bounded: ClassVar[bool] = False  # whether each call within a step has a time limit of its own

    @property
    def tools(self) -> Sequence[Message]:
        """JSON schemas of functions, ``{"type": "function", "function": ...}``, that the chat template shows to the
        model; its calls of them arrive as ``reply.tool_calls``."""
        return ()

    @property
    def told(self) -> Mapping[str, Any] | None:
        """Plain data that reward functions get of the environment at the episode's end, as ``environments``."""
        return None

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin. ``row``: the prompt's columns, with ``prompt``, ``answer`` and ``seed``, which is the rollout's own
        unless the row has such a column. A text that is returned is
        added to the prompt, to its last user message if it is a conversation."""
        return None

    async def step(self, reply: ParsedReply) -> Step:
        """The answer to a turn of the model."""
        raise NotImplementedError

    async def reward(self) -> float | None:
        """The reward of the whole episode, after its end; None: the sum of its turns' rewards, if there are any."""
        return None

    async def close(self) -> None:
        """Free what the episode holds. Called once, also after a failure."""


_NOTHING = frozenset((Environment.reset, Environment.reward, Environment.close))  # what they do, and they return None


class Caller:
    """Calls code of the user within a time limit.

    A function that is no coroutine runs in a thread of its own, so that the other episodes go on; one that is late is
    abandoned there, because Python cannot end it. With ``inline`` it runs in place: on a virtual clock it takes no
    time.
    """

    def __init__(self, seconds: float, inline: bool) -> None:
        self._seconds = seconds
        self._inline = inline
        self.abandoned = 0  # threads whose call was given up and has not ended

    async def __call__(self, what: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The result of ``function``; raises LateCallError, or what the function raised."""
        if getattr(function, "__func__", None) in _NOTHING:
            return None
        started = asyncio.get_running_loop().time()
        if inspect.iscoroutinefunction(function) or self._inline:
            answer = function(*arguments, **keywords)
        else:
            answer = self._in_thread(function, arguments, keywords)
        if not inspect.isawaitable(answer):
            return answer
        left = self._seconds - (asyncio.get_running_loop().time() - started)
        task = asyncio.ensure_future(answer)
        if not await _finished(task, left):
            raise LateCallError(f"{what} took longer than episode.timeout_seconds={self._seconds:g}.")
        result = task.result()
        return await self(what, _given, result) if inspect.isawaitable(result) else result

    async def _in_thread(self, function: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        """A daemon thread for each call: a pool would be full of calls that never end, and keep the process alive."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if outcome.done():
                self.abandoned -= 1  # it has ended after all
            elif error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        def run() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = function(*arguments, **keywords)
            except StopIteration as stop:  # which no future can hold
                error = EpisodeError(f"StopIteration: {stop}")
            except BaseException as raised:
                error = raised if isinstance(raised, Exception) else EpisodeError(f"{type(raised).__name__}: {raised}")
            with suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=run, daemon=True, name="tool").start()
        try:
            return await outcome
        except asyncio.CancelledError:
            if not outcome.done() or outcome.cancelled():
                outcome.cancel()
                self.abandoned += 1
            raise


async def _given(answer: Awaitable[Any]) -> Any:
    return await answer


async def _finished(task: asyncio.Future[Any], seconds: float) -> bool:
    """Whether the task ended within ``seconds``; one that did not is cancelled."""
    try:
        await asyncio.sleep(0)
        if task.done():  # as most calls are that wait for nothing: no timer for them
            return True
        done, _ = await asyncio.wait([task], timeout=max(0.0, seconds))
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
    return bool(done)
