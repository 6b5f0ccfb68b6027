"""``asyncrlhf report RUN...``: the HTML report of one run or several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from asyncrlhf.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence instead of a usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"report: {message}; write asyncrlhf report RUN [RUN ...] [--out FOLDER].")


def main(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="asyncrlhf report")
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--out", type=Path, default=None, help="folder of the report (several runs: ./report)")
    options = parser.parse_args(list(arguments))

    from asyncrlhf.report.html import build_report  # plotly: a second that a wrong word need not cost

    print(f"Report: {build_report(options.runs, options.out)}")
    return 0
