"""``evaluations/*.parquet``: the answers of each held-out evaluation of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

EVALUATIONS_FOLDER = "evaluations"
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("set", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("answer", pa.string()),
        ("reward", pa.float64()),
        ("tokens", pa.int64()),
    ]
)


def write_answers(run_dir: Path, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
    """Write one row per answer to ``evaluations/step-N.parquet``. An evaluation that a resumed run repeats replaces its
    file. ``set`` is empty for the task's own held-out prompts."""
    folder = run_dir / EVALUATIONS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([{"step": step, **answer} for answer in answers], schema=SCHEMA)
    unfinished = folder / f".step-{step:08d}.tmp"
    pq.write_table(table, unfinished)
    os.replace(unfinished, folder / f"step-{step:08d}.parquet")
