"""Cells of an experiment, each run once: a CSV file holds what is done, and a second call goes on with the rest."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from experiments.study import append


def run_missing(
    cells: Iterable[Any],
    run: Callable[[Any], list[dict[str, Any]]],
    path: Path,
    columns: Sequence[str],
    shown: Sequence[str] = (),
    workers: int = 0,
) -> None:
    """Run the cells that ``path`` has no row of, and append the rows of each, with its key, as it ends.

    Args:
        cells: instances of one dataclass, whose fields are the key.
        run: a function of a module, which returns the rows of a cell without the key.
        columns: of the file, after the key.
        shown: columns of a cell's last row that are printed.
        workers: processes with one thread each; 0 runs in this one, with its threads.
    """
    cells = list(cells)
    key = list(asdict(cells[0]))
    known = pd.read_csv(path)[key] if path.exists() else pd.DataFrame(columns=key)
    done = set(known.itertuples(index=False, name=None))
    left = [cell for cell in cells if astuple(cell) not in done]
    print(f"{len(cells)} runs, {len(cells) - len(left)} of them done before.", flush=True)
    if workers and left:
        # Spawned, since a fork of a process that has used torch may hang.
        with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
            _append_all(left, pool.imap(run, left), path, [*key, *columns], shown)
    else:
        _append_all(left, map(run, left), path, [*key, *columns], shown)


def command(doc: str | None, grid: Callable[[int], None], show: Callable[[], None]) -> None:
    """The command line of a study: `grid` makes the missing runs with so many workers, `show` prints its tables."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("grid", "show"))
    parser.add_argument("--workers", type=int, default=2, help="processes, each with one thread")
    options = parser.parse_args()
    if options.action == "grid":
        grid(options.workers)
    else:
        show()


def _append_all(
    left: Sequence[Any], found: Iterable[list[dict[str, Any]]], path: Path, columns: list[str], shown: Sequence[str]
) -> None:
    for number, (cell, rows) in enumerate(zip(left, found, strict=True), start=1):
        append(path, [asdict(cell) | row for row in rows], columns)
        figures = (f"{name}={rows[-1].get(name, float('nan')):.4g}" for name in shown)
        print(f"{number}/{len(left)}", *astuple(cell), *figures, flush=True)
