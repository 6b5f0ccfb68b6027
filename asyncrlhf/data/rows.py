"""Rows of prompts: JSONL and Parquet files, folders saved by `datasets`, datasets by name, the user's objects."""

from __future__ import annotations

import json
import mimetypes
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.plugins import guarded, load_object

SUFFIXES = (".jsonl", ".parquet")
# Other files that a user may give; a dataset's name does not end so.
OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zip", ".zst", ".pkl")
# Files of `save_to_disk` in the folder of a table, and in that of several splits.
SAVED_TABLE, SAVED_SPLITS = "state.json", "dataset_dict.json"
IMAGES = ("image", "images")  # columns
_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# (where the row stands, for messages; the row)
Row = tuple[str, dict[str, Any]]


def read_rows(config: TaskConfig, split: str) -> Iterator[Row]:
    """The rows of ``task.path``, one after the other; raises ConfigError, naming file and line if possible."""
    path = config.path
    local = Path(path).expanduser()
    if is_saved(local):
        yield from _rows_of(_load_saved(local), path, split)
    elif local.exists():
        files = sorted(f for f in local.iterdir() if f.suffix in SUFFIXES) if local.is_dir() else [local]
        if not files:
            raise ConfigError(f"The folder task.path={path} holds no {' or '.join(SUFFIXES)} file.")
        for file in files:
            yield from _read_file(file)
    elif looks_local(path):
        raise ConfigError(f"task.path={path} does not exist.")
    elif _OBJECT.fullmatch(path):
        found = load_object("task.path", path)
        made = guarded(f"task.path={path} could not be called", found) if callable(found) else found
        yield from _rows_of(made, path, split)
    else:
        yield from _rows_of(_load_dataset(config, split), path, split)


def looks_local(path: str) -> bool:
    """Whether the name is that of a file or folder of this machine, not of a dataset on the hub."""
    return path.startswith((".", "/", "~")) or Path(path).suffix.lower() in (*SUFFIXES, *OTHER_FILES)


def has_splits(path: str) -> bool:
    """Whether there may be splits other than ``task.split``: not for plain local files."""
    local = Path(path).expanduser()
    return not local.exists() or (local / SAVED_SPLITS).is_file()


def is_saved(local: Path) -> bool:
    """Whether `datasets` wrote this folder by ``save_to_disk``."""
    return any((local / name).is_file() for name in (SAVED_TABLE, SAVED_SPLITS))


def pick_split(found: Any, split: str, key: str, path: str) -> Any:
    """Returns a single table unchanged, and picks ``split`` out of a mapping of splits. Raises ConfigError if it is
    missing."""
    if not isinstance(found, Mapping):
        return found
    if split not in found:
        raise ConfigError(f"{key}={path} has no split {split}; allowed: {', '.join(map(str, found))}.")
    return found[split]


def _rows_of(found: Any, path: str, split: str) -> Iterator[Row]:
    """The rows of a Dataset, an IterableDataset, splits of them, or a plain list of mappings."""
    table = pick_split(found, split, "task.path", path)
    if not isinstance(table, Iterable):
        raise ConfigError(f"task.path={path} gave {type(table).__name__}; it must give a dataset or a list of rows.")
    for number, row in enumerate(table, start=1):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{path} row {number} is {type(row).__name__}, not a mapping of columns.")
        yield f"{path}[{split}] row {number}", dict(row)


def _read_file(file: Path) -> Iterator[Row]:
    if file.suffix == ".jsonl":
        yield from _read_jsonl(file)
    elif file.suffix == ".parquet":
        try:
            rows = (row for batch in pq.ParquetFile(file).iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{file.name} row {number}", row
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"{file} is not a Parquet file: {_reason(error)}.") from error
    else:
        raise ConfigError(
            f"task.path={file} is neither {' nor '.join(SUFFIXES)}; other files are read by `datasets`, in a function "
            "of your own: task.path=package.module:name."
        )


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file.name} line {number}"
            row, wrong = read_line(line)
            if row is None:
                raise ConfigError(f"{where} {wrong}.")
            yield where, row


def read_line(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """One line of JSONL: the row; or None, and its error as the end of a sentence."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return None, f"is not UTF-8 (byte {error.start + 1} of the line is {line[error.start]:#04x})"
    except json.JSONDecodeError as error:
        return None, f"is not valid JSON: {error.msg}"
    except RecursionError:
        return None, "is not valid JSON: it is nested too deeply"
    if not isinstance(row, dict):
        return None, "is not a JSON object"
    if b"\\ud" in line.lower():
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return None, "has half a surrogate pair (such as \\ud800), which is not a character"
    return row, ""


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def is_conversation(value: Any) -> bool:
    """Whether the value is a list of at least one message, each with a role and a text as content."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, Mapping) and is_text(m.get("role")) and isinstance(m.get("content"), str) for m in value)
    )


def refuse_images(where: str, fields: Mapping[str, Any], prompt: Any) -> None:
    """Raise ConfigError for a row with an image, which a language model would answer without seeing it: in a column
    named so, or among the contents of the messages ``prompt``."""
    found = next((name for name in IMAGES if _is_image(fields.get(name))), None)
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else ()
        if any(isinstance(part, Mapping) and str(part.get("type", "")).startswith("image") for part in parts):
            found = "content"
    if found:
        raise ConfigError(f"{where} has an image under the key {found!r}; allowed: text, as no image is trained on.")


def _is_image(value: Any) -> bool:
    """Whether the value is one or several images; a text may also name the image of a container."""
    if isinstance(value, str):
        return value.startswith("data:image/") or (mimetypes.guess_type(value)[0] or "").startswith("image/")
    if isinstance(value, list):
        return any(_is_image(one) for one in value)
    return value is not None


# The library takes a second to import, and only these two kinds of path need it.
def _load_saved(local: Path) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(str(local))
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise ConfigError(f"task.path={local} could not be read: {_reason(error)}.") from error


def _load_dataset(config: TaskConfig, split: str) -> Any:
    import datasets

    streaming = {"streaming": True} if config.streaming else {}
    try:
        return datasets.load_dataset(config.path, config.subset or None, split=split, **streaming)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"task.path={config.path} is neither a local file nor a dataset that loads: {_reason(error)}."
        ) from error


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
