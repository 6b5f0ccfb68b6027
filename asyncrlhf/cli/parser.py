"""The options of `profile`, `plan` and `simulate`: one sentence for an error, in place of a usage text."""

from __future__ import annotations

import argparse
from typing import NoReturn

from asyncrlhf.errors import ConfigError

USAGE = {
    "profile": "asyncrlhf profile [--from RUN] [--seconds S] [--out FILE] [overrides]",
    "plan": "asyncrlhf plan (--from RUN | --profile FILE | --gpus N --device NAME) [--out FOLDER/NAME] [overrides]",
    "simulate": "asyncrlhf simulate (--from RUN | --profile FILE) [--out FOLDER] [overrides]",
}


class Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, usage=USAGE[prog.split()[-1]])

    def error(self, message: str) -> NoReturn:
        """Print one sentence about the error instead of a usage text."""
        raise ConfigError(f"{self.prog.split()[-1]}: {message}; write {USAGE[self.prog.split()[-1]]}.")
