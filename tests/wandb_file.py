"""Reads a ``.wandb`` file back: the records that W&B itself would send, decoded by W&B's own protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, FILE_HEADER, RECORD_HEADER = 32768, 7, 7


def _payloads(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, which W&B writes: chunks in blocks of 32 KiB."""
    assert data[:4] == b":W&B"
    at, parts = FILE_HEADER, b""
    while at + RECORD_HEADER <= len(data):
        if BLOCK - at % BLOCK < RECORD_HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + RECORD_HEADER : at + RECORD_HEADER + length]
        at += RECORD_HEADER + length
        if kind in (1, 4):  # whole, or its last chunk
            yield parts
            parts = b""


def records(path: Path) -> list[Any]:
    return [wandb_internal_pb2.Record.FromString(payload) for payload in _payloads(path.read_bytes())]


def history(path: Path) -> list[dict[str, Any]]:
    """The rows of the run's history, W&B's own columns (``_step``, ``_runtime``) among them; media are dictionaries."""
    return [_row(record.history.item) for record in records(path) if record.HasField("history")]


def _row(items: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for item in items:
        *outer, last = list(item.nested_key) or [item.key]
        place = row
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
    return row


def axes(path: Path) -> dict[str, str]:
    """The axis that each metric was bound to."""
    bound = [record.metric for record in records(path) if record.HasField("metric")]
    return {metric.name or metric.glob_name: metric.step_metric for metric in bound}


def run_of(path: Path) -> Any:
    return next(record.run for record in records(path) if record.HasField("run"))
