"""``attempts.json``: each start of a run: the step that it began at, how the one before ended, what changed.

The first entry holds the settings that the run began with; config.yaml holds those of the newest attempt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.recorder import plain
from asyncrlhf.records.write.whole_files import write_atomically, writing_to

ATTEMPTS_FILE = "attempts.json"


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """The attempts, oldest first; empty for a new run. Raises ConfigError for a file that no run wrote."""
    path = run_dir / ATTEMPTS_FILE
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove it to continue without its content.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "from_step" in row for row in rows):
        raise ConfigError(f"{path} is not a list of attempts; remove it to continue without its content.")
    return rows


def add_attempt(
    run_dir: Path,
    from_step: int,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    changes: Sequence[str],
    after: str,
) -> None:
    """Append this attempt. ``inputs``: digests of files that settings name; ``changes``: a sentence per setting;
    ``after``: how the attempt before ended."""
    rows = read_attempts(run_dir)
    row: dict[str, Any] = {
        "started": datetime.now().isoformat(sep=" ", timespec="seconds"),
        "from_step": from_step,
        "after": after if rows else None,
        "changes": list(changes),
        "inputs": dict(inputs),
    }
    if not rows:
        row["config"] = plain(config)
    with writing_to(run_dir):
        write_atomically(run_dir / ATTEMPTS_FILE, json.dumps([*rows, row], indent=1) + "\n")


def attempts(run_dir: Path) -> dict[str, Any]:
    """The attempts for summary.json: the digest of the first settings; of each attempt, first step and changes."""
    rows = read_attempts(run_dir)
    first = json.dumps(rows[0].get("config"), sort_keys=True) if rows else ""
    return {
        "first_config": hashlib.sha256(first.encode()).hexdigest()[:16],
        "attempts": [{key: row.get(key) for key in ("started", "from_step", "after", "changes")} for row in rows],
    }
