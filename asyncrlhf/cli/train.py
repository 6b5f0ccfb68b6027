"""``asyncrlhf train``: one run, or Hydra's multirun."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from asyncrlhf.cli.one_run import run
from asyncrlhf.config.compose import check_words, compose_config, load_config, split_config_dir
from asyncrlhf.errors import ConfigError

# Flags that only Hydra's own command line handles; SHOW_FLAGS take an argument.
SWEEP_FLAGS = {"-m", "--multirun"}
SHOW_FLAGS = {"--cfg", "-c", "--package", "-p", "--info", "-i"}
CFG_WORDS = ("job", "hydra", "all")
OTHER_FLAGS = {"--hydra-help", "--version", "--resolve"}
HELP_FLAGS = {"-h", "--help"}


def main(arguments: Sequence[str]) -> int:
    if HELP_FLAGS & set(arguments):
        from asyncrlhf.cli.settings_help import settings_help

        print(settings_help([word for word in arguments if not word.startswith("-")]))
        return 0
    rest, folder = split_config_dir(arguments)
    flags, overrides = split_flags(rest)
    if not flags:
        return run(load_config(arguments))
    check_words(overrides)
    from asyncrlhf.cli.multirun import check_jobs, with_hydra

    if SWEEP_FLAGS & set(flags):
        return with_hydra(flags, overrides, folder, check_jobs(overrides, folder))
    compose_config(overrides, folder)
    return with_hydra(flags, overrides, folder)


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their arguments, and the overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    waiting = ""
    for argument in arguments:
        name = argument.split("=")[0]
        if name in SWEEP_FLAGS | SHOW_FLAGS | OTHER_FLAGS:
            flags.append(argument)
            waiting = argument if argument in SHOW_FLAGS else ""
        elif waiting and not argument.startswith("-") and "=" not in argument:
            flags.append(argument)
            waiting = ""
        else:
            overrides.append(argument)
    for flag, word in pairwise([*flags, ""]):
        if flag in ("--cfg", "-c") and word not in CFG_WORDS:
            raise ConfigError(f"{flag} {word} shows nothing; allowed: {', '.join(CFG_WORDS)}.")
    return flags, overrides
