"""The recorded rollouts of all Parquet parts as arrays, one entry per row, from their columns and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from asyncrlhf.records.read.episodes import Turns, read_turns
from asyncrlhf.records.read.replay import DROPPED, FAILED, TRAINED, Findings
from asyncrlhf.records.write.recorder import ROLLOUTS_FOLDER
from asyncrlhf.records.write.rollout_rows import ROLLOUT_SCHEMA, read_columns
from asyncrlhf.types import OBSERVED

_ENDS = {"trained": TRAINED, "dropped": DROPPED, "failed": FAILED}
_COLUMNS = (
    *("rollout_id", "group_id", "reward", "policy_versions", "consumed_at_version"),
    *("staleness", "state", "generator_id", "turns", "prompt_length", "forks"),
)
_SCHEMA = pa.schema([ROLLOUT_SCHEMA.field(name) for name in _COLUMNS])
IntArray = np.ndarray


@dataclass
class Recorded:
    """Rows [R] of all parts, and their uses [U], each with the index of its row."""

    files: list[str]
    part: IntArray  # [R] which of the files
    ids: IntArray  # [R]
    groups: IntArray  # [R]
    rewards: np.ndarray  # [R] NaN where there is none
    lengths: IntArray  # [R] sampled tokens of the response
    oldest: IntArray  # [R] smallest version among them; -1 without any
    newest: IntArray  # [R]
    turns: Turns
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
    files, tables = list[str](), [_SCHEMA.empty_table()]
    for path in parts:
        name = f"{ROLLOUTS_FOLDER}/{path.name}"
        try:
            tables.append(read_columns(path, _SCHEMA.names).cast(_SCHEMA))
            files.append(name)
            _check_observed(path, name, tables[-1], found)
        except (OSError, pa.ArrowException, ValueError) as error:
            found.add(f"{name} cannot be read: {' '.join(str(error).split())[:200]}")
    counts = [one.num_rows for one in tables[1:]]
    table = pa.concat_tables(tables).combine_chunks()
    tables.clear()  # a second copy of all
    generators, states = (table[name].combine_chunks().dictionary_encode() for name in ("generator_id", "state"))
    lengths, versions = _lists(table["policy_versions"])
    turns = read_turns(table["turns"], lengths, versions)
    turns.add_forks(table["forks"], _integers(table["prompt_length"]))
    if turns.observed.any():
        lengths, versions = lengths - turns.observed, versions[versions != OBSERVED]
    uses, used_at = _lists(table["consumed_at_version"])
    return Recorded(
        files=files,
        part=np.repeat(np.arange(len(files)), counts),
        ids=_integers(table["rollout_id"]),
        groups=_integers(table["group_id"]),
        rewards=pc.fill_null(table["reward"], np.nan).to_numpy(),
        lengths=lengths,
        oldest=_of_each(np.minimum, lengths, versions),
        newest=_of_each(np.maximum, lengths, versions),
        turns=turns,
        staleness=_integers(table["staleness"]),
        ends=np.array([*(_ENDS.get(word, -1) for word in states.dictionary.to_pylist()), -1])[
            _integers(states.indices)
        ],
        generators=generators.dictionary.to_pylist(),
        generator=_integers(generators.indices),
        used_row=np.repeat(np.arange(len(uses)), uses),
        used_at=used_at,
    )


def _check_observed(path: Path, name: str, part: pa.Table, found: Findings) -> None:
    """Check that the observed tokens of a part have log-prob 0; a part without episodes is not read again."""
    lengths, versions = _lists(part["policy_versions"])
    observed = versions == OBSERVED
    if not observed.any():
        return
    given = read_columns(path, ["behavior_logprobs"])["behavior_logprobs"]
    if given.null_count == part.num_rows:  # the part was thinned
        return
    others, logprobs = pc.fill_null(pc.list_value_length(given), 0).to_numpy(), pc.list_flatten(given).to_numpy()
    ids = _integers(part["rollout_id"])
    if (other := lengths != others).any():
        found.add(f"{name}: rollouts {{ids}} have another number of log-probs than of tokens.", *ids[other].tolist())
    elif len(loud := np.unique(np.repeat(ids, lengths)[observed & (logprobs != 0)])):
        found.add(f"{name}: rollouts {{ids}} have an observed token with a log-prob.", *loud.tolist())


def _check_numbers(parts: list[Path], found: Findings) -> None:
    numbers = [int(path.stem.rpartition("-")[2]) for path in parts]
    if missing := sorted(set(range(max(numbers, default=-1))) - set(numbers)):
        found.add(f"{ROLLOUTS_FOLDER}/: parts {{ids}} are missing.", *missing)


def _of_each(ufunc: np.ufunc, lengths: IntArray, values: IntArray) -> IntArray:
    """[R] the smallest or largest of each row's values, which follow each other; -1 for a row without any."""
    found, filled = np.full(len(lengths), -1), lengths > 0
    if filled.any():
        found[filled] = ufunc.reduceat(values, (np.cumsum(lengths) - lengths)[filled])
    return found


def _integers(column: pa.ChunkedArray | pa.Array) -> IntArray:
    return np.asarray(pc.fill_null(column, -1).to_numpy(), dtype=np.int64)


def _lists(column: pa.ChunkedArray) -> tuple[IntArray, IntArray]:
    """The lengths [R] of the column's lists, and all their values, concatenated."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    return lengths.astype(np.int64), np.asarray(pc.list_flatten(column).to_numpy(), dtype=np.int64)
