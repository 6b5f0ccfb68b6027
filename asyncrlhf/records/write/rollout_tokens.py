"""Writes ``rollout_tokens/*.parquet``: every token of a seeded sample of the rollouts that a rank trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrlhf.records.write.whole_files import write_table

TOKENS_FOLDER = "rollout_tokens"
ROWS_OF_A_PART = 128
MAX_WAITING = 2  # parts that may wait for the disk before the step waits with them
UNFINISHED = "\ufffd"  # a tokenizer's text for an incomplete character

_FLOATS = pa.list_(pa.float32())
TOKENS_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int64()),
        ("rollout_id", pa.int64()),
        ("group_id", pa.int64()),
        ("reward", pa.float64()),
        ("weight", pa.float64()),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.string())),
        ("policy_versions", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("behavior_logprobs", _FLOATS),
        ("proximal_logprobs", _FLOATS),
        ("policy_logprobs", _FLOATS),
        ("ref_logprobs", _FLOATS),
        ("importance_weight", _FLOATS),
        ("behavior_weight", _FLOATS),
        ("advantages", _FLOATS),
        ("stayed", pa.map_(pa.string(), pa.list_(pa.bool_()))),
    ]
)


def sampled(rollout_ids: Sequence[int], count: int, seed: int) -> list[int]:
    """``count`` of a batch's rollouts, or all if there are fewer: those whose hash with the seed is smallest, so that
    the choice depends neither on their order nor on their distribution over ranks."""
    mixed = np.array(rollout_ids, np.int64).astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    order = np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")[:count]
    return sorted(int(rollout_ids[i]) for i in order)


class Pieces:
    """The text of single tokens, such that a response's texts, joined, are the response's text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("0", add_special_tokens=False)[-1:]  # some strip a space at a text's beginning
        self._cut = len(self._decode(self._anchor))
        self._known: dict[int, str] = {}

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _text(self, ids: list[int]) -> str:
        return self._decode([*self._anchor, *ids])[self._cut :]

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """One text per token, empty for special ones. The first token of a character gets all of it."""
        found: list[str] = []
        run: list[int] = []  # tokens that make no whole character yet
        for token in map(int, ids):
            if token not in self._known:
                self._known[token] = self._text([token])
            if run or UNFINISHED in self._known[token]:
                run.append(token)
                text = self._text(run)
                if UNFINISHED not in text:
                    found += [text, *[""] * (len(run) - 1)]
                    run = []
            else:
                found.append(self._known[token])
        found += [self._text(run), *[""] * (len(run) - 1)] if run else []
        if found and found[0][:1] == " " and not self._decode([int(i) for i in ids]).startswith(" "):
            found[0] = found[0][1:]
        return found


class TokenRecord:
    """The parts of one rank. A thread decodes and writes; :meth:`add` waits only if ``MAX_WAITING`` are unwritten."""

    def __init__(self, folder: Path, rank: int, tokenizer: Callable[[], Any]) -> None:
        """``tokenizer``: a function that loads it, called in that thread."""
        self._folder, self._rank, self._tokenizer = folder, rank, tokenizer
        folder.mkdir(parents=True, exist_ok=True)
        self._rows: list[dict[str, Any]] = []
        self._pieces: Pieces | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-tokens")
        self._pending: list[Future[None]] = []

    def add(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows of one learner step, without ``step``, ``rank`` and ``tokens``. Raises the writer's last error."""
        self._rows += [{"step": step, "rank": self._rank, **row} for row in rows]
        if len(self._rows) >= ROWS_OF_A_PART:
            self._put()
            self._wait(MAX_WAITING)

    def end_part(self) -> list[Future[None]]:
        """Put all rows so far in parts; returns futures that are done when the parts are on disk."""
        self._put()
        return list(self._pending)

    def flush(self) -> None:
        """Wait until all is on disk."""
        self._put()
        self._wait(0)

    def close(self) -> None:
        self.flush()
        self._pool.shutdown()

    def _put(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            name = f"steps-{rows[0]['step']:07d}-{rows[-1]['step']:07d}-rank-{self._rank}.parquet"
            self._pending.append(self._pool.submit(self._write, self._folder / name, rows))

    def _wait(self, allowed: int) -> None:
        while len(self._pending) > allowed or (self._pending and self._pending[0].done()):
            self._pending.pop(0).result()

    def _write(self, target: Path, rows: Sequence[dict[str, Any]]) -> None:
        if self._pieces is None:
            self._pieces = Pieces(self._tokenizer())
        for row in rows:
            row["tokens"] = self._pieces(row["response_ids"])
            row["stayed"] = None if (stayed := row.get("stayed")) is None else list(stayed.items())
            row["prompt"] = row["prompt"].encode(errors="replace").decode()  # Parquet holds no halves of characters
        write_table(target, {name: [row[name] for row in rows] for name in TOKENS_SCHEMA.names}, TOKENS_SCHEMA)


def cut_tokens(run_dir: Path, steps: int) -> None:
    """Remove parts with steps after the first ``steps``, which a resumed run repeats; a checkpoint ends a part."""
    for path in (run_dir / TOKENS_FOLDER).glob("steps-*"):
        if path.suffix == ".tmp" or int(path.name.split("-")[2]) > steps:
            path.unlink()
