"""What a run's folder shows of the promises that runs keep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.read.verify import verify
from asyncrlhf.records.write.recorder import CONFIG_FILE, ROLLOUTS_FOLDER, SUMMARY_FILE


def broken_promises(run_dir: Path) -> list[str]:
    """Sentences of what does not hold; empty where all does, and where the run ended before it recorded anything."""
    try:
        return verify(run_dir)
    except ConfigError:
        return []


def figures(run_dir: Path) -> dict[str, int]:
    """Rollouts of the records that are lost, were trained twice, or were trained over the bound."""
    rows = list(_rows(run_dir))
    ids = [row["rollout_id"] for row in rows]
    uses = [row["consumed_at_version"] or [] for row in rows]
    config = _document(run_dir / CONFIG_FILE, yaml.safe_load)
    reuse = config.get("buffer", {}).get("max_reuse", 1)
    lost, ledger = 0, _document(run_dir / SUMMARY_FILE, json.loads).get("ledger", {})
    if ledger.get("left") == 0:
        lost = len(set(range(ledger["admitted"])) - set(ids))
    twice = sum(len(set(used)) < len(used) or len(used) > reuse for used in uses) + len(ids) - len(set(ids))
    bound = _bound(config.get("async", {}))
    stale = [row["staleness"] for row in rows if row["state"] == "trained" and row["staleness"] is not None]
    return {"lost": lost, "trained_twice": twice, "over_bound": sum(age > bound for age in stale)}


def _bound(settings: dict[str, Any]) -> int:
    fixed = {"sync": 0, "one_step": 1, "fixed_lag": settings.get("lag", 1)}
    return int(fixed.get(settings.get("mode", "async"), settings.get("max_staleness", 2)))


def _document(path: Path, parse: Any) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = parse(path.read_text())
    return found if isinstance(found, dict) else {}


def _rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    columns = ["rollout_id", "state", "consumed_at_version", "staleness"]
    for part in sorted((run_dir / ROLLOUTS_FOLDER).glob("part-*.parquet")):
        try:
            yield from pq.ParquetFile(part).read(columns).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise AssertionError(f"{part} cannot be read: {error}") from error
