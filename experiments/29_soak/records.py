"""The records of a very long run: their size, and what `verify` and `report` cost on them.

    python experiments/29_soak/records.py --steps 50000 --folder runs/long    # a quarter of an hour on one core

The loops, the fake engine, the buffer and the records are those of any run of the local runtime; learner steps only
raise the version, for a pass costs most of a small run's time and records nothing more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest

from asyncrlhf.cli.main import main as command
from tests.loop import FAKE, QUIET, train_nothing

WORDS = (*FAKE, *QUIET, "runtime=local", "weights.audit_every=0", "checkpoint.keep=1", "eval_every=0")


def measured(*words: str) -> dict[str, float]:
    """Processor seconds and largest memory (MiB) of a command of its own."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "asyncrlhf", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, words
    seconds = {"cpu_seconds": used.ru_utime + used.ru_stime, "seconds": time.monotonic() - began}
    return {name: round(value, 1) for name, value in {**seconds, "max_mib": used.ru_maxrss / 1024}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    if not given.folder.exists():
        with pytest.MonkeyPatch.context() as patch:
            train_nothing(patch)
            every = f"checkpoint.every={max(1, given.steps // 10)}"
            if command(["train", f"run_dir={given.folder}", *WORDS, f"steps={given.steps}", every]):
                raise SystemExit("the run failed")
    sizes = {}
    for entry in sorted(given.folder.iterdir()):
        files = [entry] if entry.is_file() else [path for path in entry.rglob("*") if path.is_file()]
        sizes[entry.name] = (round(sum(path.stat().st_size for path in files) / 2**20, 1), len(files))
    found = {name: measured(name, str(given.folder)) for name in ("verify", "report")}
    print(json.dumps({"steps": given.steps, "mib_and_files": sizes, **found}, indent=1))


if __name__ == "__main__":
    main()
