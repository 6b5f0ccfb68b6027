"""The recorded rollouts of all Parquet parts as arrays, one entry per row, from their columns and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from asyncrlhf.records.read.replay import DROPPED, FAILED, TRAINED, Findings
from asyncrlhf.records.write.recorder import ROLLOUTS_FOLDER

_ENDS = {"trained": TRAINED, "dropped": DROPPED, "failed": FAILED}
_COLUMNS = (
    *("rollout_id", "group_id", "reward", "policy_versions", "consumed_at_version"),
    *("staleness", "state", "generator_id"),
)
IntArray = np.ndarray


@dataclass
class Recorded:
    """Rows [R] of all parts, and their uses [U], each with the index of its row."""

    files: list[str]
    part: IntArray  # [R] which of the files
    ids: IntArray  # [R]
    groups: IntArray  # [R]
    rewards: np.ndarray  # [R] NaN where there is none
    lengths: IntArray  # [R] response tokens
    oldest: IntArray  # [R] smallest version among the tokens; -1 without tokens
    newest: IntArray  # [R]
    falls: np.ndarray  # [R] whether a token is older than the one before it
    staleness: IntArray  # [R] as the column says; -1 where it is null
    ends: IntArray  # [R] TRAINED, DROPPED or FAILED; -1 for another word
    generators: list[str]
    generator: IntArray  # [R] which of the generators; -1 where it is null
    used_row: IntArray  # [U]
    used_at: IntArray  # [U] the version at which the row was trained

    def file(self, row: int) -> str:
        return self.files[self.part[row]]


def read_rollouts(run_dir: Path, found: Findings) -> Recorded:
    """Read all parts; a part that cannot be read becomes a finding."""
    parts = sorted((run_dir / ROLLOUTS_FOLDER).glob("part-*.parquet"))
    _check_numbers(parts, found)
    pieces: dict[str, list[np.ndarray]] = {}
    files, names, rows = list[str](), dict[str, int](), 0
    for path in parts:
        name = f"{ROLLOUTS_FOLDER}/{path.name}"
        try:
            table = pq.read_table(path, columns=list(_COLUMNS))
        except (OSError, pa.ArrowException, ValueError) as error:
            found.add(f"{name} cannot be read: {' '.join(str(error).split())[:200]}")
            continue
        for key, values in _columns(table, names, rows):
            pieces.setdefault(key, []).append(values)
        pieces.setdefault("part", []).append(np.full(table.num_rows, len(files)))
        files.append(name)
        rows += table.num_rows
    empty = _columns(pa.table({name: pa.array([], _EMPTY[name]) for name in _COLUMNS}), names, 0)
    arrays = {key: np.concatenate(pieces.get(key, [values])) for key, values in [*empty, ("part", np.array([], int))]}
    return Recorded(files=files, generators=list(names), **arrays)


_LIST = pa.list_(pa.int64())
_EMPTY = {
    **dict.fromkeys(("rollout_id", "group_id", "staleness"), pa.int64()),
    **dict.fromkeys(("policy_versions", "consumed_at_version"), _LIST),
    **dict.fromkeys(("state", "generator_id"), pa.string()),
    "reward": pa.float64(),
}


def _check_numbers(parts: list[Path], found: Findings) -> None:
    numbers = [int(path.stem.rpartition("-")[2]) for path in parts]
    if missing := sorted(set(range(max(numbers, default=-1))) - set(numbers)):
        found.add(f"{ROLLOUTS_FOLDER}/: parts {{ids}} are missing.", *missing)


def _columns(table: pa.Table, names: dict[str, int], first_row: int) -> Iterator[tuple[str, np.ndarray]]:
    """One part's columns; ``names`` numbers the generators, and new ones are added."""
    yield "ids", _integers(table["rollout_id"])
    yield "groups", _integers(table["group_id"])
    yield "rewards", pc.fill_null(table["reward"], np.nan).to_numpy()
    yield "staleness", _integers(table["staleness"])
    yield "ends", np.array([_ENDS.get(word, -1) for word in table["state"].to_pylist()], dtype=np.int64)
    generators = table["generator_id"].to_pylist()
    yield "generator", np.array([-1 if n is None else names.setdefault(n, len(names)) for n in generators], np.int64)
    lengths, versions = _lists(table["policy_versions"])
    yield "lengths", lengths
    rows = np.repeat(np.arange(len(lengths)), lengths)
    starts = (np.cumsum(lengths) - lengths)[lengths > 0]
    for key, ufunc in (("oldest", np.minimum), ("newest", np.maximum)):
        values = np.full(len(lengths), -1)
        if len(starts):
            values[lengths > 0] = ufunc.reduceat(versions, starts)
        yield key, values
    falls = np.zeros(len(lengths), dtype=bool)
    falls[rows[1:][(np.diff(versions) < 0) & (np.diff(rows) == 0)]] = True
    yield "falls", falls
    uses, used_at = _lists(table["consumed_at_version"])
    yield "used_row", first_row + np.repeat(np.arange(len(uses)), uses)
    yield "used_at", used_at


def _integers(column: pa.ChunkedArray) -> IntArray:
    return np.asarray(pc.fill_null(column, -1).to_numpy(), dtype=np.int64)


def _lists(column: pa.ChunkedArray) -> tuple[IntArray, IntArray]:
    """The lengths [R] of the column's lists, and all their values, concatenated."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    return lengths.astype(np.int64), np.asarray(pc.list_flatten(column).to_numpy(), dtype=np.int64)
