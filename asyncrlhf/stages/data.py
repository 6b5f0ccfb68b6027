"""Reads a stage's training data with the `datasets` library, checks every row, and holds prompts out."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.stages.training_config import TrainerConfig
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from datasets import Dataset

# By suffix: what `datasets` calls the format.
BUILDERS = {".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows held out, and the prompt that each held-out row belongs to, as a number."""

    train: Dataset
    heldout: Dataset
    heldout_prompts: list[int]


def read_rows(path: str, split: str, key: str) -> Dataset:
    """The table that ``path`` names; raises ConfigError, naming the setting ``key``, where there is none or no row."""
    import datasets  # seconds of imports, which a wrong setting need not wait for

    check(path, f"{key} is empty; give a JSONL or Parquet file, a folder of them, or the name of a dataset.")
    local = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or local.suffix in BUILDERS
    files = _files(local, key) if local.exists() else []
    if not files and looks_local:
        raise ConfigError(f"{key}={path} does not exist.")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what goes wrong is said in one sentence below
    try:
        if files:
            names = [str(file) for file in files]
            table = datasets.load_dataset(BUILDERS[files[0].suffix], data_files=names, split="train")
        else:
            table = datasets.load_dataset(path, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = _innermost(error)
        kind = "could not be read" if files else "is no local file, and no dataset that loads"
        raise ConfigError(f"{key}={path} {kind}: {reason}.") from error
    check(len(table), f"{key}={path} holds no rows.")
    return table


def _files(local: Path, key: str) -> list[Path]:
    """The files of one format that ``local`` is or holds, those of no byte left out."""
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


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def check_columns(table: Dataset, wanted: Sequence[Sequence[str]], key: str, path: str) -> tuple[str, ...]:
    """The first of the sets of columns in ``wanted`` that the table has; raises ConfigError where it has none."""
    for columns in wanted:
        if set(columns) <= set(table.column_names):
            return tuple(columns)
    allowed = ", or ".join(" and ".join(columns) for columns in wanted)
    raise ConfigError(f"{key}={path} has the columns {', '.join(table.column_names) or 'none'}; needed are: {allowed}.")


def check_rows(table: Dataset, columns: Sequence[str], key: str, path: str) -> bool:
    """Whether the rows are conversations; raises ConfigError, naming the row, for one that is empty or of another kind.

    A text has a character; a conversation has at least one message, each with a role and a content.
    """
    conversational = isinstance(table[0][columns[0]], list)
    good, kind = (_is_conversation, "list of messages") if conversational else (_is_text, "text")
    for column in columns:
        for number, value in enumerate(table[column], start=1):
            if not good(value):
                raise ConfigError(f"{key}={path} row {number} has no {kind} in the column {column!r}.")
    return conversational


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(m, dict) and _is_text(m.get("role")) and isinstance(m.get("content"), str) for m in value)


def hold_out(
    table: Dataset,
    config: TrainerConfig,
    key: str,
    read: Callable[[str], Dataset],
    prompt: Callable[[dict[str, Any]], Any],
) -> Split:
    """Separate the rows that are never trained on. ``read`` gives another split of the same data, ``prompt`` what a row
    is about.

    Without ``heldout_split`` a share of the prompts goes, by their hash: at least one, and the same ones whatever the
    seed and the order of the rows. Raises ConfigError when no row is left to train on.
    """
    if config.heldout_split:
        if Path(config.path).expanduser().exists():
            raise ConfigError(f"{key}.heldout_split is for datasets by name; give {key}.heldout_fraction for files.")
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
