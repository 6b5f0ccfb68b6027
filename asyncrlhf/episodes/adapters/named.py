"""Finds the environment of another package that a setting names by a prefix, such as ``textarena:GAME``."""

from __future__ import annotations

from collections.abc import Callable

from asyncrlhf.episodes.environment import Environment

Factory = Callable[[], Environment]


def is_adapted(target: str) -> bool:
    """Whether an adapter has the prefix of ``episode.environment=target``."""
    return target.partition(":")[0] in ADAPTERS


def adapted(target: str, seconds: float) -> Factory:
    """The factory of ``episode.environment=target``. ``seconds``: the longest wait for one answer from outside. Raises
    ConfigError for an environment that cannot be used."""
    kind, _, name = target.partition(":")
    return ADAPTERS[kind](name, seconds)


def _game(name: str, _: float) -> Factory:
    from asyncrlhf.episodes.adapters.games import game

    return game(name)


def _openenv(url: str, seconds: float) -> Factory:
    from asyncrlhf.episodes.adapters.openenv import environment_at

    return environment_at(url, seconds)


ADAPTERS: dict[str, Callable[[str, float], Factory]] = {"textarena": _game, "openenv": _openenv}
