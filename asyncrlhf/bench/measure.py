"""Shared by all benchmarks: medians with their spread, tables, files, and a load whose groups have spread."""

from __future__ import annotations

import json
import statistics
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

QUIET = ["logging=quiet", "eval_every=0", "task.heldout_size=8", "weights.audit_every=0"]
# Enough work per step that the ratio is that of the two sides, not of the messages between them, and rewards with
# spread, because the learner skips groups without.
LOAD = [
    "generator.max_completion_length=32",
    "generator.ignore_eos=true",
    "reward.kind=python",
    "reward.target=asyncrlhf.bench.measure:coin",
]


def tell(number: int, of: int, what: str = "") -> None:
    """Print one line of progress before round ``number`` of ``of``; round 0 warms up. The tables come at the end."""
    name = f"round {number} of {of}" if number else "warm-up"
    print(f"{time.strftime('%H:%M:%S')} {name}{': ' * bool(what)}{what}", flush=True)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, smallest, largest and number of repeats."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
        "values": list(values),
    }


def show(title: str, rows: dict[str, dict[str, Any]], unit: str) -> None:
    figures = (*(f"{name} {unit}".strip() for name in ("median", "smallest", "largest")), "repeats")
    table = Table("what", *(Column(name, justify="right") for name in figures), title=title, title_justify="left")
    for name, row in rows.items():
        table.add_row(name, f"{row['median']:.3g}", f"{row['min']:.3g}", f"{row['max']:.3g}", str(row["repeats"]))
    Console(width=110).print(table)


def write(result: dict[str, Any], out: Path | None) -> dict[str, Any]:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
        print(f"Figures: {out}")
    return result


def coin(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """0 or 1 by the text's checksum: a reward whose groups nearly all have spread, so that every step is full work."""
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]
