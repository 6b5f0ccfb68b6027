"""``asyncrlhf train``: one run, or Hydra's multirun."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from asyncrlhf.cli.first_look import first_look, say
from asyncrlhf.config.compose import check_words, compose_config, load_config, split_config_dir
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import AsyncRLHFError, ConfigError, full_disk
from asyncrlhf.redaction import redact

# Flags that only Hydra's own command line handles; SHOW_FLAGS take an argument.
SWEEP_FLAGS = {"-m", "--multirun"}
SHOW_FLAGS = {"--cfg", "-c", "--package", "-p", "--info", "-i"}
CFG_WORDS = ("job", "hydra", "all")
OTHER_FLAGS = {"--hydra-help", "--version", "--resolve"}
HELP_FLAGS = {"-h", "--help"}
# Errors of drawing unforeseen figures or of full disks; the run itself is done and safe by then.
REPORT_TROUBLE = (AsyncRLHFError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError)


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


def run(config: RunConfig) -> int:
    first_look(config)
    if config.run_dir and config.checkpoint.resume == "no":
        from asyncrlhf.records.record_marker import refuse_used_folder

        refuse_used_folder(Path(config.run_dir))
    say(config, "Loading PyTorch, transformers and Ray, then checking model, data and rewards.")
    from asyncrlhf.orchestrator.run import train
    from asyncrlhf.records.summary import plain_words

    summary = train(config)
    print(plain_words(summary))
    if config.logging.report and summary["exit_reason"] == "done":
        print(draw([Path(summary["run_dir"])]))
    return 130 if summary["exit_reason"] == "interrupted" else 0


def draw(folders: Sequence[Path], out: Path | None = None) -> str:
    """Draw the report of runs that ended well; returns a sentence with its place, or with the reason of a failure."""
    from asyncrlhf.report.html import build_report

    try:
        return f"Report: {build_report(folders, out)}"
    except REPORT_TROUBLE as error:
        shown = " ".join(map(str, folders))
        cause = full_disk(error) or f"{type(error).__name__}: {error}"
        return f"The report could not be drawn ({redact(cause)}); try: asyncrlhf report {shown}"
