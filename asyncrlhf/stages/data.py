"""Reads a stage's training data with the `datasets` library, checks every row, and holds prompts out."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrlhf.config.stage_config import TrainerConfig
from asyncrlhf.data.rows import SAVED_SPLITS, is_conversation, is_saved, pick_split, read_line
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from datasets import Dataset

# By suffix: the format's name in `datasets`.
BUILDERS = {".jsonl": "json", ".parquet": "parquet"}
LOOKED_AT = 2**26  # bytes: larger files are not checked by ``first_look``


@dataclass(frozen=True)
class Split:
    """Rows to train on and held-out rows, with the index of each held-out row's prompt."""

    train: Dataset
    heldout: Dataset
    heldout_prompts: list[int]


def read_rows(path: str, split: str, key: str) -> Dataset:
    """The table at ``path``; raises ConfigError, naming the setting ``key``, if it is missing or has no row."""
    local, files = find_rows(path, key)
    saved = is_saved(local)
    import datasets  # slow imports, after the checks of settings

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # errors become one sentence below
    try:
        if saved:
            table = pick_split(datasets.load_from_disk(str(local)), split, key, path)
        elif files:
            names = [str(file) for file in files]
            table = datasets.load_dataset(BUILDERS[files[0].suffix], data_files=names, split="train")
        else:
            table = datasets.load_dataset(path, split=split)
    except (OSError, TypeError, ValueError, datasets.exceptions.DatasetsError) as error:  # TypeError: datasets 4.7
        reason = _broken_line(files) or _innermost(error)
        kind = "could not be read" if files or saved else "is neither a local file nor a dataset that loads"
        raise ConfigError(f"{key}={path} {kind}: {reason}.") from error
    # `datasets` silently converts a column that is text in one file and lists in another to text.
    broken = _broken_line(files) if len(files) > 1 else ""
    check(not broken, f"{key}={path} could not be read: {broken}.")
    check(len(table), f"{key}={path} holds no rows.")
    return table


def find_rows(path: str, key: str) -> tuple[Path, list[Path]]:
    """The local place of ``path`` and its data files; no files for a folder saved by `datasets` or a dataset's name.
    Raises ConfigError for a local path without rows; needs no library."""
    check(path, f"{key} is empty; give a JSONL or Parquet file, a folder of them, or the name of a dataset.")
    local = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or local.suffix in BUILDERS
    if is_saved(local):
        return local, []
    files = _files(local, key) if local.exists() else []
    check(files or not looks_local, f"{key}={path} does not exist.")
    return local, files


def first_look(path: str, key: str) -> None:
    """As :func:`find_rows`, and check the lines of JSONL files up to ``LOOKED_AT`` bytes."""
    _, files = find_rows(path, key)
    broken = _broken_line([file for file in files if file.stat().st_size < LOOKED_AT], columns=False)
    check(not broken, f"{key}={path} could not be read: {broken}.")


def _files(local: Path, key: str) -> list[Path]:
    """The data files of ``local``, all of one format; empty files are left out."""
    found = sorted(file for file in local.iterdir() if file.suffix in BUILDERS) if local.is_dir() else [local]
    suffixes = sorted({file.suffix for file in found})
    allowed = " or ".join(BUILDERS)
    if not found:
        raise ConfigError(f"The folder {key}={local} holds no {allowed} file.")
    if len(suffixes) > 1:
        raise ConfigError(f"The folder {key}={local} holds {' and '.join(suffixes)} files; keep those of one format.")
    if suffixes[0] not in BUILDERS:
        raise ConfigError(f"{key}={local} is of no known format; allowed: {allowed}.")
    filled = [file for file in found if _has_content(file)]
    if not filled:
        raise ConfigError(f"{key}={local} holds no rows.")
    return filled


def _has_content(file: Path) -> bool:
    with file.open("rb") as lines:
        return any(line.strip() for line in lines)


def _broken_line(files: Sequence[Path], columns: bool = True) -> str:
    """The place of the first line that does not fit the JSONL files' table; empty if all lines fit. Arrow's own message
    counts rows within a block, which does not help to find the line. Without ``columns`` any JSON objects fit."""
    kinds: dict[str, str] = {}
    for file in files:
        if file.suffix != ".jsonl":
            return ""
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            where = f"{file.name} line {number}"
            row, wrong = read_line(line) if line.strip() else ({}, "")
            if row is None:
                return f"{where} {wrong}"
            for column, value in row.items() if columns else ():
                kind = type(value).__name__
                if value is not None and kinds.setdefault(column, kind) != kind:
                    return f"{where} has {kind} in the column {column!r} where {kinds[column]} stood before"
    return ""


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def check_columns(table: Dataset, wanted: Sequence[Sequence[str]], key: str, path: str) -> tuple[str, ...]:
    """The first of the sets of columns in ``wanted`` that the table has; raises ConfigError if it has none of them."""
    for columns in wanted:
        if set(columns) <= set(table.column_names):
            return tuple(columns)
    allowed = ", or ".join(" and ".join(columns) for columns in wanted)
    raise ConfigError(f"{key}={path} has the columns {', '.join(table.column_names) or 'none'}; needed: {allowed}.")


def check_rows(table: Dataset, columns: Sequence[str], key: str, path: str) -> bool:
    """Whether the rows are conversations; raises ConfigError, naming the row, for an empty row or one of another kind.

    A text has at least one character; a conversation at least one message, each with a role and a content.
    """
    conversational = isinstance(table[0][columns[0]], list)
    good, kind = (is_conversation, "list of messages") if conversational else (_is_text, "text")
    for column in columns:
        for number, value in enumerate(table[column], start=1):
            if not good(value):
                raise ConfigError(f"{key}={path} {row_place(path, number)} has no {kind} in the column {column!r}.")
    return conversational


def row_place(path: str, number: int) -> str:
    """The place of row ``number``, counted from 1, of the table at ``path``; in a folder with its file's name."""
    local = Path(path).expanduser()
    if not local.is_dir() or is_saved(local):
        return f"row {number}"
    for file in _files(local, "path"):
        rows = _rows_in(file)
        if number <= rows:
            return f"row {number} of {file.name}"
        number -= rows
    return f"row {number}"


def _rows_in(file: Path) -> int:
    if file.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        return int(ParquetFile(file).metadata.num_rows)
    with file.open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def hold_out(
    table: Dataset,
    config: TrainerConfig,
    key: str,
    read: Callable[[str], Dataset],
    prompt: Callable[[dict[str, Any]], Any],
) -> Split:
    """Separate the held-out rows from the training rows. ``read`` loads another split of the same data, ``prompt``
    returns a row's prompt.

    Without ``heldout_split`` a fraction of the prompts is held out, by their hash: at least one, and the same for any
    seed and order of rows. Raises ConfigError when no row is left to train on.
    """
    if config.heldout_split:
        local = Path(config.path).expanduser()
        if local.exists() and not (local / SAVED_SPLITS).is_file():
            raise ConfigError(f"{key}.heldout_split is for data with splits; give {key}.heldout_fraction for this.")
        heldout = read(config.heldout_split)
        return Split(table, heldout, _numbered([_digest(prompt(row)) for row in heldout]))
    digests = [_digest(prompt(row)) for row in table]
    ranked = sorted(set(digests))
    size = max(1, round(config.heldout_fraction * len(ranked))) if config.heldout_fraction else 0
    if size >= len(ranked):
        raise ConfigError(
            f"{key}.path={config.path} holds {len(ranked)} prompt{'s' * (len(ranked) > 1)}, and "
            f"{key}.heldout_fraction={config.heldout_fraction:g} leaves none to train on."
        )
    chosen = set(ranked[:size])
    apart = [i for i, digest in enumerate(digests) if digest in chosen]
    kept = [i for i, digest in enumerate(digests) if digest not in chosen]
    return Split(table.select(kept), table.select(apart), _numbered([digests[i] for i in apart]))


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _numbered(digests: Sequence[bytes]) -> list[int]:
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(digest, len(numbers)) for digest in digests]
