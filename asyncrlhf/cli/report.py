"""``asyncrlhf report RUN...``: the HTML report and PNG curves of one run or several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.errors import ConfigError


def main(arguments: Sequence[str]) -> int:
    from asyncrlhf.report.html import build_report

    parser = argparse.ArgumentParser(prog="asyncrlhf report", exit_on_error=False)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--out", type=Path, default=None, help="folder of the report (several runs: ./report)")
    try:
        options = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"report: {error}.") from None
    print(f"Report: {build_report(options.runs, options.out)}")
    return 0
