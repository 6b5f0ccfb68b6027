"""Functions of the user's own, named ``package.module:function`` in the config: reward functions, losses, sinks."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrlhf.errors import ConfigError

PICKLED = "pickle:"


def load_function(key: str, target: str) -> Callable[..., Any]:
    """What ``target`` names; the working directory is looked in too. ``pickle:FILE`` is a function that the Python API
    was given.

    Raises ConfigError, in one sentence that opens with ``key=target``, when it cannot be imported, does not exist or
    cannot be called.
    """
    where = f"{key}={target}"
    if target.startswith(PICKLED):
        return _unpickled(target.removeprefix(PICKLED), where)
    module_name, _, name = target.partition(":")
    if not module_name or not name or " " in target:
        raise ConfigError(f"{where} is not of the form package.module:function.")
    function = getattr(_import(module_name, where), name, None)
    if function is None:
        raise ConfigError(f"{where}: the module {module_name} has no {name!r}.")
    if not callable(function):
        raise ConfigError(f"{where} is not a function but {type(function).__name__}.")
    return function  # type: ignore[no-any-return]


def _unpickled(path: str, where: str) -> Callable[..., Any]:
    try:
        with open(path, "rb") as file:
            function = pickle.load(file)
    # Unpickling imports and runs what the user's own code refers to, which may raise anything.
    except Exception as error:
        raise ConfigError(f"{where} cannot be read back: {type(error).__name__}: {error}.") from error
    return function  # type: ignore[no-any-return]


def _import(module_name: str, where: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except ConfigError:  # a module of ours that lacks a package says so in a sentence of its own
        raise
    # Importing runs the user's own code, which may raise anything.
    except Exception as error:
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}.") from error
