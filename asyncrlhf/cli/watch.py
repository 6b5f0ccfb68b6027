"""``asyncrlhf watch``: a live terminal dashboard of a run or a sweep, from its files alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_package

HELP = """asyncrlhf watch [RUN]: a live dashboard of a run or a sweep, running, finished or still to come

  asyncrlhf watch runs/arithmetic/2026-01-31_12-00-00    one run
  asyncrlhf watch runs/arithmetic                        the newest run below a folder, and the next that starts there
  asyncrlhf watch runs/sweeps/staleness_quick-1a2b3c4d   a sweep's jobs; Enter shows one of them, Escape goes back
  asyncrlhf watch                                        the newest below runs/

It only reads files. Keys: q quits, arrows and Tab move, r reads again at once."""
SECONDS = 1.0  # between two updates


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    check(len(arguments) <= 1, f"watch takes one run or folder, not {len(arguments)}: {' '.join(arguments)}.")
    check(not arguments or not arguments[0].startswith("-"), f"{arguments and arguments[0]} is not an option of watch.")
    path = Path(arguments[0] if arguments else "runs").expanduser()
    if path.is_file():
        raise ConfigError(f"{path} is a file; give the folder of a run or of a sweep.")
    check_package("asyncrlhf watch", "textual", "watch")
    check(sys.stdout.isatty(), "watch draws on a terminal; for a page or a file: asyncrlhf report RUN.")
    from asyncrlhf.cli.dashboard import Dashboard

    Dashboard(path, SECONDS, time.time).run()
    return 0
