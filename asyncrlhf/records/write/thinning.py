"""Makes old records small, once those of a run take more room than ``logging.keep_gib``.

A part of ``rollouts/`` loses its texts and log-probs, one of ``rollout_tokens/`` and ``spans/`` its rows. What
``asyncrlhf verify`` needs stays, so that its guarantees can be checked for every step, however long the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrlhf.data.checkpoint_manifest import Seals, fsync
from asyncrlhf.records.write.rollout_rows import BULKY, ROLLOUTS_FOLDER
from asyncrlhf.records.write.rollout_tokens import TOKENS_FOLDER
from asyncrlhf.records.write.spans import SPANS_FOLDER
from asyncrlhf.records.write.whole_files import naming

THINNED_FROM = b"thinned_from"  # in a file's metadata: the SHA-256 of what it was
EMPTIED = (TOKENS_FOLDER, SPANS_FOLDER)  # what these folders tell is only looked at, and verified by nothing else
ROWS = 128  # in memory at a time


class Thinning:
    """Thins the files of one run, oldest first, until all of the three folders fit ``limit`` bytes."""

    def __init__(self, run_dir: Path, limit: float) -> None:
        self._run_dir, self._limit = run_dir, limit
        self._thin: dict[str, str] = {}  # names, with the hash of what each was: a rollback gives names again

    def apply(self, seals: Seals) -> None:
        """Thin what is sealed, as far as needed; each file changes at once or not at all. Blocks."""
        sizes = dict(self._sizes())
        total = sum(sizes.values())
        for name in self._oldest(sizes, seals):
            if total <= self._limit:
                return
            path = self._run_dir / name
            if not is_thin(path, seals[name]):
                thin(path, seals[name]["sha256"])
                total += path.stat().st_size - sizes[name]
            self._thin[name] = seals[name]["sha256"]

    def _sizes(self) -> Iterator[tuple[str, int]]:
        for folder in (ROLLOUTS_FOLDER, *EMPTIED):
            for path in (self._run_dir / folder).glob("*.parquet"):
                with suppress(FileNotFoundError):  # of a rank that undoes its steps
                    yield f"{folder}/{path.name}", path.stat().st_size

    def _oldest(self, sizes: Mapping[str, int], seals: Seals) -> list[str]:
        """The sealed files that may be thinned, all folders from their beginnings at the pace of their number; each
        folder's newest file stays, which the dashboard and W&B show."""
        aged = []
        for folder in (ROLLOUTS_FOLDER, *EMPTIED):
            names = sorted(name for name in sizes if name.startswith(f"{folder}/") and name in seals)
            left = [(i, name) for i, name in enumerate(names[:-1]) if self._thin.get(name) != seals[name]["sha256"]]
            aged += [((i + 0.5) / len(names), name) for i, name in left]
        return [name for _, name in sorted(aged)]


def thin(path: Path, sha256: str) -> None:
    """Replace a part by what is kept of it, which says of which file it was made, by its hash."""
    temporary = path.with_suffix(".tmp")
    try:
        with pq.ParquetFile(path) as file:
            kept = file.schema_arrow.with_metadata({THINNED_FROM: sha256.encode()})
            with pq.ParquetWriter(temporary, kept, compression="zstd") as writer:
                for batch in _kept(file, kept, path.parent.name):
                    writer.write_batch(batch)
        fsync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise naming(error, path) from None


def _kept(file: pq.ParquetFile, schema: pa.Schema, folder: str) -> Iterator[pa.RecordBatch]:
    if folder in EMPTIED:
        return
    names = [name for name in schema.names if name not in BULKY]
    for batch in file.iter_batches(ROWS, columns=names):
        columns = [
            pa.nulls(batch.num_rows, field.type) if field.name in BULKY else batch.column(field.name)
            for field in schema
        ]
        yield pa.record_batch(columns, schema=schema)


def is_thin(path: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a file is what was kept of the one with the seal ``facts``."""
    with suppress(OSError, pa.ArrowException, ValueError):
        made_from = (pq.read_schema(path).metadata or {}).get(THINNED_FROM, b"")
        return bool(made_from) and made_from.decode(errors="replace") == facts.get("sha256")
    return False
