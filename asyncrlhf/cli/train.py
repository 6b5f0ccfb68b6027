"""``asyncrlhf train``: one run, or Hydra's multirun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from asyncrlhf.cli.first_look import first_look, say
from asyncrlhf.config.compose import (
    CONFIG_NAME,
    check_words,
    compose_config,
    load_config,
    search_path_override,
    split_config_dir,
    sweep_jobs,
)
from asyncrlhf.config.conversion import conf_folder, from_hydra, register_schema
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import AsyncRLHFError, ConfigError, ContradictionError, full_disk
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
    if SWEEP_FLAGS & set(flags):
        _check_jobs(overrides, folder)
    else:
        compose_config(overrides, folder)
    return _with_hydra(flags, overrides, folder)


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


def _check_jobs(overrides: Sequence[str], folder: Path | None) -> None:
    """Check every job's config before the first one starts, unless another sweeper than Hydra's makes the jobs. Jobs
    with contradicting settings are left out at their turn, if others remain."""
    if any(override.lstrip("+").startswith("hydra/sweeper") for override in overrides):
        return
    jobs = sweep_jobs(overrides)
    contradictions = []
    for job in jobs:
        try:
            from_hydra(compose_config(job, folder))
        except ContradictionError as error:
            contradictions.append(error)
    if len(contradictions) == len(jobs):
        raise contradictions[0]


def _with_hydra(flags: Sequence[str], overrides: Sequence[str], folder: Path | None) -> int:
    """Let Hydra compose, launch and name the jobs' folders; the sweep's exit code is that of the worst job.

    A failed job does not affect the others; an interruption ends them all.
    """
    register_schema()
    codes: list[int] = []
    written: set[Path] = set()  # by Hydra itself
    done: list[Path] = []  # of jobs that ran in this process, as all do unless the user sets a launcher

    @hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=CONFIG_NAME)
    def job(config: DictConfig) -> int:
        output = Path(HydraConfig.get().runtime.output_dir)
        written.add(Path(HydraConfig.get().sweep.dir) / "multirun.yaml")
        with open_dict(config):
            config.run_dir = config.run_dir or str(output)
        try:
            built = from_hydra(config)
            codes.append(run(built))
            done.extend([Path(config.run_dir)] if built.logging.report else [])
        except ContradictionError as error:
            print(f"Left out: {HydraConfig.get().job.override_dirname}: {error}")
            codes.append(0)
            with suppress(OSError):
                output.rmdir()
        except AsyncRLHFError as error:
            sentence = f"{HydraConfig.get().job.override_dirname}: {' '.join(str(error).split())}"
            print(f"asyncrlhf: {redact(sentence)}", file=sys.stderr)
            codes.append(error.exit_code)
            with suppress(OSError):
                output.rmdir()  # Hydra's folder, empty if no job was started
        if codes[-1] == 130:
            raise KeyboardInterrupt
        return codes[-1]

    before = sys.argv
    sys.argv = ["asyncrlhf train", *flags, *search_path_override(folder), *overrides]
    try:
        job()
    finally:
        sys.argv = before
        for file in written:
            if file.is_file():
                file.write_text(redact(file.read_text(encoding="utf-8")), encoding="utf-8")
        if len(done) > 1:
            print(draw(done, done[0].parent / "report"))
    return max(codes, default=0)
