"""From the settings to the environment of each row: ours, TRL's, or tools alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncrlhf.episodes.adapters.mcp_tools import PREFIX, McpServer
from asyncrlhf.episodes.adapters.named import adapted, is_adapted
from asyncrlhf.episodes.environment import Caller, Environment, EpisodeError
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.tools import TOOLS, ToolEnvironment, check_tool, methods_of
from asyncrlhf.errors import ConfigError
from asyncrlhf.plugins import guarded, load_function, load_object

COLUMN = "environment"  # of the row, which chooses one of several


def gives_reward(found: Any) -> bool:
    """Whether an environment of ``found``, a class, function or dictionary of them, or its name, scores its episodes.
    Raises ConfigError for a name that cannot be loaded."""
    if isinstance(found, str):
        if is_adapted(found):
            return True
        found = load_object("episode.environment", found)
    for factory in found.values() if isinstance(found, Mapping) else [found]:
        kind = factory
        if not isinstance(factory, type):
            kind = type(guarded("episode.environment cannot be created without arguments", factory))
        if issubclass(kind, Environment) or callable(getattr(kind, "get_reward", None)):
            return True
    return False


def _found(target: str, seconds: float) -> Any:
    return adapted(target, seconds) if is_adapted(target) else load_object("episode.environment", target)


class World:
    """Makes environments. Raises ConfigError when it is built, for what is no environment or tool.

    ``inline``: functions run in place, on a virtual clock.
    """

    def __init__(self, config: EpisodeConfig, inline: bool = False) -> None:
        self.call = Caller(config.timeout_seconds, inline)
        self._servers: list[McpServer] = []
        self._functions: list[Callable[..., Any]] = []
        for name in config.tools:
            if name.startswith(PREFIX):
                self._servers.append(McpServer(name, config.timeout_seconds))
                self._functions += self._servers[-1].tools
            else:
                packaged = TOOLS.get(name)
                made = packaged(config.timeout_seconds) if packaged else load_function("episode.tools", name)
                self._functions.append(made)
        for function in self._functions:
            check_tool("episode.tools", function)
        self._key = f"episode.environment={config.environment}"
        self._factories: dict[str | None, Any] = {}
        self._named = False
        if config.environment:
            found = _found(config.environment, config.timeout_seconds)
            self._named = isinstance(found, Mapping)
            self._factories = dict(found) if self._named else {None: found}
            for factory in self._factories.values():
                self._check(factory)

    def _check(self, factory: Any) -> None:
        """Make one environment and look at it."""
        if not callable(factory):
            raise ConfigError(f"{self._key} is no class or function, but {type(factory).__name__}.")
        made = guarded(f"{self._key} cannot be created without arguments", factory)
        if isinstance(made, Environment):
            if self._functions:
                raise ConfigError(
                    f"{self._key} answers every turn itself, so that episode.tools has no effect; keep one."
                )
            return
        if not callable(getattr(made, "reset", None)):
            raise ConfigError(
                f"{self._key} has no method reset; allowed: a subclass of asyncrlhf's Environment, or a class with "
                "reset whose other public methods are tools, as TRL's environment_factory takes it."
            )
        for function in methods_of(made):
            check_tool(self._key, function)

    def environment(self, row: Mapping[str, Any]) -> Environment:
        """A fresh environment for an episode of this row."""
        if not self._factories:
            return ToolEnvironment(self.call, self._functions)
        name = row.get(COLUMN) if self._named else None
        if name not in self._factories:
            known = ", ".join(map(str, self._factories))
            raise EpisodeError(f"The row's column {COLUMN} says {name!r}; {self._key} has {known}.")
        made = self._factories[name]()
        return made if isinstance(made, Environment) else ToolEnvironment(self.call, self._functions, made)

    def row(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that ``reset`` gets: without the one that chose the environment."""
        return {key: value for key, value in columns.items() if not (self._named and key == COLUMN)}

    def close(self) -> None:
        """End the servers that were started."""
        for server in self._servers:
            server.close()
