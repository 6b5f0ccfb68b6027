"""From command-line overrides to a RunConfig; Hydra's errors become one sentence each."""

from __future__ import annotations

import copy
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from asyncrlhf.config.conversion import conf_folder, from_hydra, register_schema, to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.sentences import omegaconf_sentence, unknown_key
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_versions, did_you_mean

CONFIG_NAME = "config"


def split_config_dir(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """Take ``--config-dir FOLDER`` (or ``-cd``) out of the arguments: a folder of the user's own config groups."""
    rest: list[str] = []
    folder: Path | None = None
    words = iter(arguments)
    for word in words:
        if word in ("--config-dir", "-cd") or word.startswith("--config-dir="):
            given = word.partition("=")[2] or next(words, "")
            check(given, "--config-dir needs a folder.")
            check(Path(given).is_dir(), f"--config-dir {given} is not a folder; give one that holds config groups.")
            folder = Path(given).resolve()
        else:
            rest.append(word)
    return rest, folder


def search_path_override(folder: Path | None) -> list[str]:
    return [] if folder is None else [f"hydra.searchpath=['file://{folder}']"]


def load_config(arguments: Sequence[str]) -> RunConfig:
    """Compose and check; raises ConfigError with one sentence. The user's folder is importable for their functions."""
    check_versions("torch", "transformers", "ray")
    overrides, folder = split_config_dir(arguments)
    check_words(overrides)
    for override in overrides:
        if re.match(r"[+~]*hydra[./]", override) and not override.startswith("hydra.searchpath="):
            raise ConfigError(f"{override} has no effect on a single run; Hydra's settings are for sweeps (-m).")
    return from_hydra(compose_config(overrides, folder))


def compose_config(overrides: Sequence[str], folder: Path | None) -> DictConfig:
    """Hydra's result for the overrides, before range checks; ``folder`` adds the user's groups."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    register_schema()
    if folder is None and (config := _with_values(overrides)) is not None:
        return config
    return _composed(overrides, folder)


def _composed(overrides: Sequence[str], folder: Path | None) -> DictConfig:
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_folder())):
            return compose(CONFIG_NAME, overrides=[*search_path_override(folder), *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(hydra_sentence(error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"A config file is not YAML: {error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"A config file is not UTF-8: {error.reason} at byte {error.start + 1}.") from error
    except ValueError as error:  # Hydra's answer to a group that is given a number
        raise ConfigError(_not_an_option(overrides) or f"{error}.") from error


@lru_cache(maxsize=64)
def _with_choices(choices: tuple[str, ...]) -> DictConfig:
    return _composed(choices, None)


def _with_values(overrides: Sequence[str]) -> DictConfig | None:
    """The same in an eighth of the time where the groups' choices were composed before, as for the jobs of a sweep.
    None where Hydra itself must compose (additions, deletions, packages) or refuse."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        if any(o.type is not OverrideType.CHANGE or o.is_sweep_override() for o in parsed):
            return None
        if any(not re.fullmatch(r"(?!hydra\b)[\w.]+", o.get_key_element()) for o in parsed):
            return None
        groups = _groups()
        chosen = [o for o in parsed if o.key_or_group in groups and not isinstance(o.value(), dict)]
        config = copy.deepcopy(_with_choices(tuple(str(o.input_line) for o in chosen)))
        for override in parsed:
            if override not in chosen:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    except (HydraException, OmegaConfBaseException, ConfigError, ValueError):
        return None
    return config


def quoted(text: str) -> str:
    """``text`` as the value of an override, with any characters."""
    # Within quotes a backslash is literal, except right before a quote.
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text) + "'"


def check_words(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an argument that is neither ``key=value`` nor ``~key``."""
    for argument in overrides:
        if argument.startswith("-"):
            raise ConfigError(f"{argument} is not an option of this command; settings are given as key=value.")
        if "=" not in argument and not argument.startswith("~"):
            raise ConfigError(f"{argument} is not a setting; settings are given as key=value.")


def changed(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """``config``, as read from a file, with plain settings in Hydra's grammar in place of its own; ConfigError for
    overrides that cannot be read."""
    try:
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            check(not override.is_sweep_override(), f"{override.input_line} gives several values; allowed: one.")
            OmegaConf.update(config, override.key_or_group, override.value(), merge=False, force_add=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(hydra_sentence(error)) from error
    return config


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of every job that Hydra's own sweeper makes of ``key=a,b``, in its order."""
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_folder())):
            groups = GlobalHydra.instance().config_loader()  # glob() reads its options from it
            parsed = OverridesParser.create(groups).parse_overrides(list(overrides))
        choices: list[list[str]] = [
            [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
            if o.is_sweep_override() and o.is_discrete_sweep()
            else [str(o.input_line)]
            for o in parsed
        ]
    except HydraException as error:
        raise ConfigError(hydra_sentence(error)) from error
    for override, found in zip(overrides, choices, strict=True):
        check(found, f"{override} matches no option of its group, so that there is nothing to sweep over.")
    return [list(job) for job in itertools.product(*choices)]


def hydra_sentence(error: Exception) -> str:
    """Hydra's message without its hints for developers of Hydra apps, naming the key, the value and what is allowed."""
    text = str(error).strip()
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override} cannot be read as key=value; a value with special characters needs quotes of its own, "
            "as in \"key='a, b'\"."
        )
    if match := re.search(r"Could not find '(.+)/([^/']*)'", text):
        available = text.partition("Available options in")[2].partition("Config search path")[0]
        return _unknown_option(match.group(1), match.group(2), [line.strip() for line in available.splitlines()[1:]])
    if match := re.search(r"An item is already at '([^']+)'", text):
        return f"{match.group(1)} is already a setting; write {match.group(1)}=VALUE without a plus sign."
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        key = match.group(1).partition("=")[0]
        return f"{match.group(1)} gives several values; add -m to sweep over them, or write a list as {key}=[a,b]."
    if match := re.search(r"Could not override '([^']+)'\.\s+No match in the defaults list", text):
        return f"{match.group(1)} is not a group of settings; allowed: {', '.join(_groups())}."
    inner = next((e for e in _chain(error) if isinstance(e, OmegaConfBaseException)), None)
    if isinstance(inner, ConfigKeyError | ConfigAttributeError):
        match = re.search(r"Could not override '([^']+)'", text)
        return unknown_key(match.group(1) if match else str(inner.full_key or inner.key), to_plain(RunConfig()))
    if inner is not None:
        return omegaconf_sentence(inner, to_plain(RunConfig()))
    return " ".join(text.partition("Config search path")[0].split()).rstrip(".") + "."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unknown_option(group: str, option: str, options: Sequence[str]) -> str:
    known = [name for name in options if name]
    allowed = ", ".join(known) or "none yet; --config-dir FOLDER adds a folder of your own"
    return f"{group}={option} is not known{did_you_mean(option, known)}; allowed: {allowed}."


def _not_an_option(overrides: Sequence[str]) -> str | None:
    for override in overrides:
        group, _, option = override.partition("=")
        if group in _groups() and not (conf_folder() / group / f"{option}.yaml").is_file():
            return _unknown_option(group, option, sorted(p.stem for p in (conf_folder() / group).glob("*.yaml")))
    return None


@cache
def _groups() -> list[str]:
    return sorted(path.name for path in conf_folder().iterdir() if path.is_dir())
