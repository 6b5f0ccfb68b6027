"""The records of a very long run: their size, what `verify` and `report` cost on them, and the memory of its process.

    python experiments/29_soak/records.py --steps 50000 --folder runs/long    # a quarter of an hour on one core
    python experiments/29_soak/records.py --steps 50000 --folder runs/thin logging.keep_gib=0.02

The loops, the fake engine, the buffer and the records are those of any run of the local runtime; learner steps only
raise the version, for a pass costs most of a small run's time and records nothing more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest

from asyncrlhf.cli.main import main as command
from asyncrlhf.records.write.recorder import METRICS_FILE
from tests.loop import FAKE, QUIET, train_nothing

soak = import_module("experiments.29_soak.bench")
WORDS = (*FAKE, *QUIET, "runtime=local", "weights.audit_every=0", "checkpoint.keep=1", "eval_every=0")


# A command, and its largest memory from its own mouth: that of wait4(2) counts the process that started it.
COMMAND = """
import re, sys
from pathlib import Path
from asyncrlhf.cli.main import main
code = main(sys.argv[1:])
sys.stderr.write(re.findall(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[0])
sys.exit(code)
"""


def measured(*words: str) -> dict[str, float]:
    """Processor seconds and largest memory (MiB) of a command of its own."""
    began = time.monotonic()
    line = [sys.executable, "-c", COMMAND, *words]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    kib = int(process.stderr.read().split()[-1])
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, words
    seconds = {"cpu_seconds": used.ru_utime + used.ru_stime, "seconds": time.monotonic() - began}
    return {name: round(value, 1) for name, value in {**seconds, "max_mib": kib / 1024}.items()}


@contextmanager
def looked_at(folder: Path, every: int) -> Iterator[list[tuple[int, Any]]]:
    """Memory and open files of this process, every so many steps of the run in ``folder``."""
    samples: list[tuple[int, Any]] = []
    over, lines = threading.Event(), soak.Lines(folder / METRICS_FILE)

    def look() -> None:
        due = every
        while not over.wait(0.5):
            lines.new()
            if lines.count >= due:
                samples.append((lines.count, {"run": soak.look(os.getpid())[f"parent ({os.getpid()})"]}))
                due = lines.count + every

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield samples
    finally:
        over.set()
        watch.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--folder", type=Path, required=True)
    given, overrides = parser.parse_known_args()
    memory: dict[str, Any] = {}
    if not given.folder.exists():
        with pytest.MonkeyPatch.context() as patch, looked_at(given.folder, max(1, given.steps // 50)) as samples:
            train_nothing(patch)
            every = f"checkpoint.every={max(1, given.steps // 10)}"
            if command(["train", f"run_dir={given.folder}", *WORDS, f"steps={given.steps}", every, *overrides]):
                raise SystemExit("the run failed")
        memory = soak.growth(soak.by_process(samples)["run"])
    sizes = {}
    for entry in sorted(given.folder.iterdir()):
        files = [entry] if entry.is_file() else [path for path in entry.rglob("*") if path.is_file()]
        sizes[entry.name] = (round(sum(path.stat().st_size for path in files) / 2**20, 1), len(files))
    found = {name: measured(name, str(given.folder)) for name in ("verify", "report")}
    told = {"steps": given.steps, "overrides": overrides, "memory": memory, "mib_and_files": sizes, **found}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
