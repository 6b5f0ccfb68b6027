"""Environments of tools: functions that the model calls, and classes written for TRL's ``environment_factory``."""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from asyncrlhf.episodes.environment import Caller, Environment, EpisodeError, Message, Step
from asyncrlhf.errors import ConfigError
from asyncrlhf.rewards.program import run_program
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from asyncrlhf.episodes.replies import ParsedReply, ToolCall

Function = Callable[..., Any]


class ToolEnvironment(Environment):
    """The model calls functions by name until it answers without a call.

    ``instance``: of a class for TRL's ``environment_factory``: its public methods are tools, too, ``reset`` may add to
    the prompt, and ``get_reward`` scores the episode.
    """

    bounded = True

    def __init__(self, call: Caller, functions: Sequence[Function], instance: Any = None) -> None:
        self._call = call
        self._instance = instance
        own = [] if instance is None else methods_of(instance)
        self._functions = {function.__name__: function for function in [*functions, *own]}

    @property
    def tools(self) -> Sequence[Message]:
        return [schema_of(function) for function in self._functions.values()]

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        if self._instance is None:
            return None
        observation = await self._call("reset", self._instance.reset, **_accepted(self._instance.reset, row))
        return None if observation is None else str(observation)

    async def step(self, reply: ParsedReply) -> Step:
        if reply.malformed:
            said = f"The tool call could not be read: {reply.malformed}"
            return Step([{"role": "user", "content": said}], tools=("",), failures=1)
        if not reply.tool_calls:
            return Step(done=True)
        messages: list[Message] = []
        failures = 0
        for called in reply.tool_calls:
            content, failed = await self._answer(called)
            failures += failed
            message = {"role": "tool", "name": called.name, "content": content}
            messages.append(message | ({"tool_call_id": called.id} if called.id else {}))
        return Step(messages, tools=tuple(called.name for called in reply.tool_calls), failures=failures)

    async def _answer(self, called: ToolCall) -> tuple[str, bool]:
        """The result of a call as text, or why there is none; and whether it failed."""
        function = self._functions.get(called.name)
        if function is None:
            return f"error: there is no tool {called.name!r}; the tools are {', '.join(self._functions)}", True
        try:
            inspect.signature(function).bind(**called.arguments)
            return str(await self._call(called.name, function, **called.arguments)), False
        except EpisodeError as error:  # a sentence of ours
            return f"error: {error}", True
        # A tool is the user's code, and may raise anything.
        except Exception as error:
            return f"error: {type(error).__name__}: {error}", True

    @property
    def told(self) -> Mapping[str, Any] | None:
        return None if self._instance is None else plain_attributes(self._instance)

    async def reward(self) -> float | None:
        scored = getattr(self._instance, "get_reward", None)
        if scored is None:
            return None
        given = await self._call("get_reward", scored)
        return None if given is None else float(given)

    async def close(self) -> None:
        close = getattr(self._instance, "close", None)
        if callable(close) and "close" not in self._functions:
            await self._call("close", close)


# What a row may have beside the columns of the dataset, which are all that TRL passes.
OWN_COLUMNS = ("prompt", "answer", "seed")


def _accepted(reset: Function, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without our own columns that ``reset`` has no argument for."""
    try:
        parameters = inspect.signature(reset).parameters
    except ValueError:  # a built-in without a signature
        return dict(row)
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in row.items() if takes_all or name in parameters or name not in OWN_COLUMNS}


def plain_attributes(instance: Any) -> dict[str, Any]:
    """The public attributes that are numbers, texts, None, and lists, tuples and dictionaries of them, as copies: what
    may travel to another process."""
    found = {}
    for name, value in getattr(instance, "__dict__", {}).items():
        with suppress(TypeError, RecursionError):
            if not name.startswith("_"):
                found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, value)] if isinstance(value, list) else tuple(map(_plain, value))
    if getattr(value, "shape", None) == ():  # a number of NumPy or torch
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain")


# Methods of an environment for TRL that are no tools.
NO_TOOLS = ("reset", "get_reward", "close")


def methods_of(instance: Any) -> list[Function]:
    """The methods of an environment for TRL that are tools: its public ones, but for ``reset`` and ``get_reward``."""
    named = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [getattr(instance, name) for name, _ in named if not name.startswith("_") and name not in NO_TOOLS]


def schema_of(function: Function) -> Message:
    """The function's JSON schema, from its type hints and docstring, which methods of all instances share; or its own,
    ``tool_schema``."""
    if own := getattr(function, "tool_schema", None):
        return own  # type: ignore[no-any-return]
    return _schema(getattr(function, "__func__", function))


@lru_cache(maxsize=1024)
def _schema(function: Function) -> Message:
    from transformers.utils import get_json_schema

    return get_json_schema(function)  # type: ignore[no-any-return]


def check_tool(key: str, function: Function) -> None:
    """Raise ConfigError for a function that has no schema: its docstring and type hints describe it to the model."""
    try:
        schema_of(function)
    # transformers raises errors of several kinds for what it cannot describe.
    except Exception as error:
        said = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{key}: {getattr(function, '__name__', function)} cannot be described to the model: {said}; a tool needs "
            "type hints, and a docstring with a line for each argument."
        ) from error


OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LONGEST = 200  # characters of an expression: no power, so that no result is much longer


def calculator(expression: str) -> str:
    """
    Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % and parentheses, such as 12*(3+4).

    Returns:
        The value as text.
    """
    check(len(expression) <= LONGEST, f"the expression is longer than {LONGEST} characters")
    value = _value(ast.parse(expression, mode="eval").body)
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return str(int(value) if whole else value)


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers, + - * / // % and parentheses are allowed")


def python_tool(seconds: float) -> Function:
    """The tool ``python``, whose programs end after ``seconds``. Raises ConfigError where none can be run."""

    def python(code: str) -> str:
        """
        Run a Python program. It has no network, and files that it writes are gone when it has ended.

        Args:
            code: The program; its result is what it prints.

        Returns:
            What the program printed.
        """
        ran = run_program(code, seconds)
        if ran.failed:
            raise EpisodeError(ran.text)
        return ran.text or "the program printed nothing"

    tried = run_program("print('runs', end='')", TRIAL_SECONDS)
    check(tried == ("runs", False), f"episode.tools=[python] cannot run programs on this machine: {tried.text}.")
    return python


TRIAL_SECONDS = 60.0  # for the start of two Pythons on a busy machine
# The packaged tools by name: how each is made, given the seconds for one call.
TOOLS: dict[str, Callable[[float], Function]] = {"calculator": lambda _: calculator, "python": python_tool}
