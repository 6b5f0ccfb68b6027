"""The options of `profile`, `plan`, `simulate`, `report` and `doctor --gpu`: an error is one sentence, no usage."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn

from asyncrlhf.errors import ConfigError

if TYPE_CHECKING:
    from asyncrlhf.planner.shapes import Workload

USAGE = {
    "profile": "asyncrlhf profile [--from RUN] [--seconds S] [--out FILE] [overrides]",
    "plan": "asyncrlhf plan (--from RUN | --profile FILE | --gpus N --device NAME) [--out FOLDER/NAME] [overrides]",
    "simulate": "asyncrlhf simulate (--from RUN | --profile FILE) [--out FOLDER] [overrides]",
    "report": "asyncrlhf report RUN [RUN ...] [--out FOLDER]",
    "doctor": "asyncrlhf doctor --gpu [--quick] [--out FILE]",
}


class Parser(argparse.ArgumentParser):
    """Of one of the commands in ``USAGE``; words that are no options are overrides."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"asyncrlhf {command}", description=description, usage=USAGE[command])
        self._command = command

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self._command}: {message}; write {USAGE[self._command]}.")

    def check_least(self, options: argparse.Namespace, **least: float) -> None:
        """Raise ConfigError for an option below its least value; None is an option that was not given."""
        for name, limit in least.items():
            value = getattr(options, name)
            if value is not None and not value >= limit:
                self.error(f"--{name.replace('_', '-')} {value:g} is too small; at least {limit:g}")

    def add_lengths(self) -> None:
        self.add_argument("--mean-length", type=float, help="mean tokens per response, log-normal")
        self.add_argument("--cv", type=float, default=0.5, help="coefficient of variation of the response lengths")


def law_of(options: argparse.Namespace, prompt: float = 0.0) -> Workload | None:
    """The response lengths that the options describe, without an upper limit; None if they describe none."""
    from asyncrlhf.planner.shapes import Workload  # scipy, which `asyncrlhf report --help` need not import

    return None if options.mean_length is None else Workload(prompt, options.mean_length, options.cv, sys.maxsize)
