"""Files that appear complete or not at all, and the sentence for a folder that cannot be written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrlhf.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa


def write_atomically(path: Path, text: str, lasting: bool = True) -> None:
    """Write a file that appears complete or not at all; if ``lasting``, also where the machine stops right after it."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # not on a disk that can only be read
            temporary.unlink()  # on a full disk others may need its room
        raise naming(error, path) from None


def naming(error: OSError, path: Path) -> OSError:
    """The error with the file's name, which the error of a failed write lacks."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def write_table(path: Path, columns: Mapping[str, Any], schema: pa.Schema) -> None:
    """Write a Parquet file that appears complete or not at all."""
    import pyarrow as pa  # not above: the process that speaks for a dead run, which writes a summary, is to stay small
    import pyarrow.parquet as pq

    temporary = path.with_suffix(".tmp")
    try:
        pq.write_table(pa.table(columns, schema=schema), temporary, compression="zstd")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()  # on a full disk others may need its room
        raise


@contextmanager
def writing_to(run_dir: Path) -> Iterator[None]:
    """Within this context, turn an OSError of writing to ``run_dir`` into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir} cannot be written: {error}.") from error
