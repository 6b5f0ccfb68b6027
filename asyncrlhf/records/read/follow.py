"""Follows a run directory through its files alone: the run may start later, continue, be resumed or be killed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from asyncrlhf.records.show.summary import REPLICA_PREFIX
from asyncrlhf.records.write.recorder import CONFIG_FILE, METRICS_FILE, ROLLOUTS_FOLDER, read_summary
from asyncrlhf.records.write.rollout_rows import read_columns
from asyncrlhf.records.write.rollout_tokens import TOKENS_FOLDER
from asyncrlhf.types import OBSERVED

SHOWN_COLUMNS = (
    *("rollout_id", "prompt", "response", "reward", "staleness", "state", "generator_id"),
    *("policy_versions", "turns", "episode_reward"),
)
DEPTH = 4  # folders from runs to runs/sweeps/NAME/jobs/JOB
QUIET_SECONDS = 120.0  # of silence of a run without a summary: it may have been killed


class MetricsTail:
    """The complete lines of a metrics.jsonl; ``read`` adds the new ones. An incomplete line is left for the next call,
    and a file that became shorter, as a resumed run's does, is read from the beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last = b""  # the last line read: if it has moved, the file was replaced
        self.rows: list[dict[str, Any]] = []

    def read(self) -> bool:
        """Read new lines; returns whether there were any."""
        try:
            with self._path.open("rb") as file:
                if not self._goes_on(file):
                    self._offset, self._last, self.rows = 0, b"", []
                file.seek(self._offset)
                new = file.read()
        except OSError:
            gone, self._offset, self._last, self.rows = bool(self.rows), 0, b"", []
            return gone
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.splitlines(keepends=True):
            self._offset += len(line)
            self._last = line
            try:
                row = json.loads(line)
            except ValueError:  # cut by a crash, then continued by a resumed run
                continue
            if isinstance(row, dict) and "step" in row:
                self.rows.append(row)
        return bool(whole)

    def _goes_on(self, file: Any) -> bool:
        if os.fstat(file.fileno()).st_size < self._offset:
            return False
        file.seek(self._offset - len(self._last))
        return bool(file.read(len(self._last)) == self._last)


class RunFollower:
    """The displayed facts of one run; ``read`` updates them from its files."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._tail = MetricsTail(self.path / METRICS_FILE)
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.rollouts: list[dict[str, Any]] = []
        self._part = ""

    def read(self) -> None:
        self._tail.read()
        self.config = _config(self.path / CONFIG_FILE) or self.config
        self.summary = read_summary(self.path) or {}
        self._read_rollouts()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._tail.rows

    @property
    def last(self) -> dict[str, Any]:
        """The newest value of each metric of the last line, and the newest held-out accuracy."""
        row = dict(self.rows[-1]) if self.rows else {}
        if heldout := self.values("heldout_accuracy"):
            row["heldout_accuracy"] = heldout[-1]
        return row

    def values(self, metric: str) -> list[float]:
        """The metric's values by step, with the first and the last held-out evaluation, which only the summary has."""
        found = [float(row[metric]) for row in self.rows if isinstance(row.get(metric), int | float)]
        ends = (self.summary.get(metric) or {}) if metric == "heldout_accuracy" else {}
        before, after = ([ends[end]] if ends.get(end) is not None else [] for end in ("before", "after"))
        return [*before, *found, *after]

    @property
    def steps(self) -> tuple[int, int]:
        """(done, planned)."""
        return int(self.last.get("step", 0)), int(self.config.get("steps") or 0)

    def state(self, now: float) -> str:
        """The run's state in words; ``now`` in seconds since the epoch."""
        if self.summary:
            return str(self.summary.get("exit_reason", "ended"))
        try:
            since = now - max((self.path / name).stat().st_mtime for name in self._written())
        except ValueError:
            return "has not started yet"
        if since > QUIET_SECONDS:
            return f"silent for {since / 60:.0f} minutes: it waits, or was killed"
        return "running" if self.rows else "starting"

    def _written(self) -> list[str]:
        return [name for name in (CONFIG_FILE, METRICS_FILE) if (self.path / name).is_file()]

    @property
    def replicas(self) -> dict[str, dict[str, float]]:
        """The last metrics of each replica, by name; for a run with one replica, the run's own."""
        found: dict[str, dict[str, float]] = {}
        for key, value in self.last.items():
            if key.startswith(REPLICA_PREFIX) and isinstance(value, int | float):
                name, figure = key.removeprefix(REPLICA_PREFIX).rsplit("/", 1)
                found.setdefault(name, {})[figure] = value
        if found or not self.last:
            return found
        names = {
            "generator_idle_fraction": "idle_fraction",
            "generated_tokens_per_second": "tokens_per_second",
            "rollouts_in_flight": "in_flight",
        }
        return {"generator": {names[key]: self.last[key] for key in names if self.last.get(key) is not None}}

    def _read_rollouts(self, count: int = 50) -> None:
        """The last rollouts of the newest Parquet file, newest first."""
        parts = sorted((self.path / ROLLOUTS_FOLDER).glob("part-*.parquet"))
        newest = f"{parts[-1].name} {parts[-1].stat().st_mtime_ns}" if parts else ""
        if newest == self._part:
            return
        try:
            rows = read_columns(parts[-1], SHOWN_COLUMNS).to_pylist() if parts else []
        except (OSError, pa.ArrowInvalid):  # removed by a resumed run while it was read
            return
        self._part, self.rollouts = newest, rows[::-1][:count]


def recorded_tokens(run_dir: Path, rollout_id: int) -> list[tuple[str, bool]]:
    """The text of each response token, and whether the policy sampled it; empty for a rollout whose tokens are not
    recorded."""
    for path in sorted((run_dir / TOKENS_FOLDER).glob("steps-*.parquet"), reverse=True):
        try:
            table = pq.read_table(path, columns=["rollout_id", "tokens", "policy_versions"])
        except (OSError, pa.ArrowInvalid):  # removed by a resumed run while it was read
            continue
        for row in table.filter(pc.equal(table["rollout_id"], rollout_id)).to_pylist():
            return [(text, v != OBSERVED) for text, v in zip(row["tokens"], row["policy_versions"], strict=True)]
    return []


def newest_run(folder: Path) -> Path | None:
    """``folder`` itself if it is a run, else the run written to last, at most ``DEPTH`` folders below it."""
    if (folder / CONFIG_FILE).is_file():
        return folder
    found = [path for depth in range(1, DEPTH + 1) for path in folder.glob("*/" * depth + CONFIG_FILE)]

    def written(path: Path) -> float:
        metrics = path.with_name(METRICS_FILE)
        return max(file.stat().st_mtime for file in (path, metrics) if file.is_file())

    return max(found, key=written).parent if found else None


def _config(path: Path) -> dict[str, Any]:
    """The file's content; empty if it is missing or incomplete."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return dict(found) if isinstance(found, Mapping) else {}
