"""The user's own objects, named ``package.module:name`` in the config: reward functions, losses, optimizers, data,
sinks; and functions of a notebook, which are stored in a file."""

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
    """The object named ``target``; the working directory is searched too. ``pickle:FILE`` is a function that the
    Python API was given.

    Raises ConfigError, in one sentence that begins with ``key=target``, if it cannot be imported, does not exist or
    cannot be called.
    """
    function = load_object(key, target)
    if not callable(function):
        raise ConfigError(f"{key}={target} is not a function but {type(function).__name__}.")
    return function  # type: ignore[no-any-return]


def load_object(key: str, target: str) -> Any:
    """As :func:`load_function`, for any object of a module."""
    where = f"{key}={target}"
    if target.startswith(PICKLED):
        file = Path(target.removeprefix(PICKLED))
        return guarded(f"{where} cannot be read back", lambda: pickle.loads(file.read_bytes()))
    module_name, _, name = target.partition(":")
    if not module_name or not name or " " in target:
        raise ConfigError(f"{where} is not of the form package.module:function.")
    if "/" in module_name or module_name.endswith(".py"):
        file = Path(module_name)
        raise ConfigError(
            f"{where} names a file; allowed: its module, {file.stem}:{name}, with {file.parent}/ as the working "
            "directory or in PYTHONPATH."
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    module = guarded(f"{where} cannot be imported", lambda: importlib.import_module(module_name))
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{where}: the module {module_name} has no {name!r}.")
    return found


def guarded(what: str, call: Callable[[], Any]) -> Any:
    """The result of ``call``, which runs the user's own code; its errors become a ConfigError that begins with
    ``what``."""
    try:
        return call()
    except ConfigError:  # one of our modules reports a missing package in its own sentence
        raise
    # The user's own code may raise anything, and may try to end the process.
    except (Exception, SystemExit) as error:
        said = f"{error}".rstrip(".")
        raise ConfigError(f"{what}: {type(error).__name__}{f': {said}' if said else ''}.") from error
