"""A run, on either runtime, uses up the quota of its folder: is it said, and is nothing lost?

    python experiments/41_strikes/quota.py        # about a minute; root, btrfs-progs

The folder is a subvolume of btrfs (in a file of 300 MB) with a limit of a few MB; the run has no end of its own. It
must end with one sentence and exit code 1; once the limit is gone the same command must go on, and `verify` find
nothing. One row a runtime goes to ``quota.jsonl`` beside this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from asyncrlhf.records.read.verify import verify
from tests.chaos.run import commit
from tests.loop import FAKE

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("quota.jsonl")
LIMIT = "16M"
COMMON = (*FAKE, "logging=quiet", "logging.flush_every=16", "checkpoint.every=20", "checkpoint.keep=1", "eval_every=0")


def call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def limited() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quota-") as folder:
        image, place = Path(folder) / "disk", Path(folder) / "on"
        with image.open("wb") as file:
            file.truncate(300 * 2**20)
        place.mkdir()
        call("mkfs.btrfs", "-q", image)
        call("mount", "-o", "loop", image, place)
        try:
            call("btrfs", "quota", "enable", place)
            call("btrfs", "subvolume", "create", place / "run")
            call("btrfs", "qgroup", "limit", LIMIT, place / "run")
            yield place / "run"
        finally:
            call("umount", place)


def examine(runtime: str) -> dict[str, Any]:
    with limited() as run_dir:
        line = [sys.executable, "-m", "asyncrlhf", "train", *COMMON, f"runtime={runtime}", f"run_dir={run_dir}"]
        began = time.monotonic()
        ended = subprocess.run([*line, "steps=1000000"], cwd=ROOT, capture_output=True, text=True, timeout=400)
        seconds = time.monotonic() - began
        reached = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        left = sorted(path.name for path in run_dir.rglob("*.tmp"))
        call("btrfs", "qgroup", "limit", "none", run_dir)
        further = reached + 20
        again = subprocess.run(
            [*line, f"steps={further}", "checkpoint.resume=auto"], cwd=ROOT, capture_output=True, text=True, timeout=400
        )
        summary = json.loads((run_dir / "summary.json").read_text())
        return {
            "commit": commit(),
            "runtime": runtime,
            "exit": ended.returncode,
            "said": [text for text in ended.stderr.splitlines() if text.startswith("asyncrlhf: ")],
            "steps": reached,
            "seconds": round(seconds, 1),
            "half_written": left,
            "again": again.returncode,
            "reason": summary["exit_reason"],
            "trained": summary["ledger"]["trained"],
            "expected": further * 16,
            "verify": verify(run_dir),
        }


def main() -> None:
    assert os.getuid() == 0, "btrfs needs root"
    rows = [examine(runtime) for runtime in ("local", "ray")]
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
