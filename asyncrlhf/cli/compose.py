"""From command-line overrides to a RunConfig, with Hydra's complaints said in one sentence."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.config import (
    RunConfig,
    conf_folder,
    from_hydra,
    omegaconf_sentence,
    register_schema,
    to_plain,
    unknown_key,
)

CONFIG_NAME = "config"


def split_config_dir(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """Take ``--config-dir FOLDER`` (or ``-cd``) out of the arguments: a folder of the user's own config groups."""
    rest: list[str] = []
    folder: str | None = None
    waiting = False
    for argument in arguments:
        if waiting:
            folder, waiting = argument, False
        elif argument in ("--config-dir", "-cd"):
            waiting = True
        elif argument.startswith("--config-dir="):
            folder = argument.split("=", 1)[1]
        else:
            rest.append(argument)
    if waiting:
        raise ConfigError("--config-dir needs a folder.")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--config-dir {folder} is not a folder; give one that holds config groups.")
    return rest, Path(folder).resolve() if folder is not None else None


def search_path_override(folder: Path | None) -> list[str]:
    return [] if folder is None else [f"hydra.searchpath=[file://{folder}]"]


def load_config(arguments: Sequence[str]) -> RunConfig:
    """Compose and check; raises ConfigError with one sentence. The user's folder is importable for their functions."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    overrides, folder = split_config_dir(arguments)
    for argument in overrides:
        if argument.startswith("-"):
            raise ConfigError(f"{argument} is no option of this command; settings are given as key=value.")
        if "=" not in argument and not argument.startswith("~"):
            raise ConfigError(f"{argument} is not a setting; settings are given as key=value.")
    register_schema()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_folder())):
            config = compose(CONFIG_NAME, overrides=[*search_path_override(folder), *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(hydra_sentence(error)) from error
    return from_hydra(config)


def hydra_sentence(error: Exception) -> str:
    """Hydra's message without its hints for Hydra's own developers, naming the key, the value and what is allowed."""
    chain = [error, error.__cause__, error.__context__]
    text = str(error).strip()
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match.group(1)
        inner = next((e for e in chain if isinstance(e, OmegaConfBaseException)), None)
        if inner is not None and "not in" in str(inner):
            return unknown_key(key, _siblings(key))
        if inner is not None:
            return omegaconf_sentence(inner)
    if match := re.search(r"Could not find '([^/']+)/([^']+)'", text):
        options = [line.strip() for line in text.splitlines()[1:] if line.startswith("\t")]
        known = ", ".join(options) or "see conf/"
        return f"{match.group(1)}={match.group(2)} is not known; allowed: {known}."
    if inner := next((e for e in chain if isinstance(e, OmegaConfBaseException)), None):
        return omegaconf_sentence(inner)
    return " ".join(text.split()).rstrip(".") + "."


def _siblings(key: str) -> list[str]:
    """The settings beside an unknown one."""
    node: object = to_plain(RunConfig())
    parts = key.split(".")
    for part in parts[:-1]:
        node = node.get(part, {}) if isinstance(node, dict) else {}
    prefix = ".".join(parts[:-1])
    return [f"{prefix}.{name}" if prefix else str(name) for name in node] if isinstance(node, dict) else []


def checked(config: DictConfig) -> RunConfig:
    """The same checks for a config that Hydra's own launcher composed."""
    return from_hydra(config)
