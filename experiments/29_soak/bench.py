"""Memory and open files of every process of a long run, and its records on disk: what grows, by how much."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from asyncrlhf.bench.measure import write
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.validation import typed_path

RUN = (
    "generator.engine=fake", "logging=quiet", "task.heldout_size=2", "num_generations=4", "batch_size=16",
    "eval_every=0", "checkpoint.keep=1", "learner.learning_rate=1e-4",
)  # fmt: skip
GROWS_MIB, GROWS_FILES = 4.0, 2.0  # per thousand steps: more than that is reported as growth

Sample = dict[str, tuple[float, int]]  # MiB and open files of each process, by its name


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """A run of ``--steps`` steps in a separate process (the fake engine and the tiny model unless overridden), whose
    tree is measured every ``--every`` steps: each process's private memory (RssAnon) and open files. The slope is that
    of the second half of the run, by least squares. Other arguments are overrides of the run, such as
    ``runtime=local``."""
    parser = argparse.ArgumentParser(prog="asyncrlhf bench soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="steps between two looks")
    parser.add_argument("--out", type=typed_path, default=None)
    options, overrides = parser.parse_known_args(list(arguments))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        samples = watch(Path(folder), options.steps, options.every, overrides)
    processes = {name: growth(points) for name, points in by_process(samples).items()}
    show(processes)
    return write({"steps": options.steps, "overrides": overrides, "processes": processes}, options.out)


def watch(folder: Path, steps: int, every: int, overrides: Sequence[str]) -> list[tuple[int, Sample]]:
    """The measurements of the run's processes, with the number of steps at each; raises AsyncRLHFError for a run that
    failed."""
    words = [*RUN, f"checkpoint.every={max(1, steps // 8)}", *overrides, f"run_dir={folder / 'run'}", f"steps={steps}"]
    command, log = [sys.executable, "-m", "asyncrlhf", "train", *words], folder / "output.txt"
    samples: list[tuple[int, Sample]] = []
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    metrics, done, size, due = folder / "run" / "metrics.jsonl", 0, 0, every
    try:
        while process.poll() is None:
            time.sleep(0.05)
            if metrics.exists():
                with metrics.open("rb") as file:
                    file.seek(size)
                    new = file.read()
                size, done = size + len(new), done + new.count(b"\n")
            if done >= due:
                samples.append((done, look(process.pid) | on_disk(folder / "run")))
                due = done + every
                print(f"{time.strftime('%H:%M:%S')} step {done} of {steps}", flush=True)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise AsyncRLHFError(f"the run ended with exit code {process.returncode}: {log.read_text().strip()[-500:]}")
    return samples


def look(root: int) -> Sample:
    """Memory and open files of a process and its descendants."""
    found: Sample = {}
    with suppress(psutil.NoSuchProcess):
        driver = psutil.Process(root)
        for process in (driver, *driver.children(recursive=True)):
            with suppress(psutil.Error, OSError, AttributeError, IndexError):
                name = "driver" if process.pid == root else name_of(process.cmdline())
                status = Path(f"/proc/{process.pid}/status").read_text()
                kib = int(re.findall(r"RssAnon:\s+(\d+)", status)[0])
                found[f"{name} ({process.pid})"] = (kib / 1024, process.num_fds())
    return found


def on_disk(run_dir: Path) -> Sample:
    """Size and number of files of what a run records, apart from its checkpoints."""
    found: Sample = {}
    for entry in run_dir.iterdir():
        files = [entry] if entry.is_file() else [path for path in entry.rglob("*") if path.is_file()]
        with suppress(FileNotFoundError):
            found[f"on disk: {entry.name}"] = (sum(path.stat().st_size for path in files) / 2**20, len(files))
    return {name: size for name, size in found.items() if not name.endswith(("checkpoints", ".tmp"))}


def name_of(words: Sequence[str]) -> str:
    """``ray::LearnerActor.call`` is LearnerActor; another process has the name of its program or module."""
    if words[0].startswith("ray::"):
        return re.split(r"[.:(]", words[0].removeprefix("ray::"))[0]
    program = Path(words[0]).name
    if program.startswith("python"):
        module = words[words.index("-m") + 1] if "-m" in words else next((w for w in words if w.endswith(".py")), "")
        return Path(module).name or program
    return program


def by_process(samples: Sequence[tuple[int, Sample]]) -> dict[str, list[tuple[int, float, int]]]:
    """Steps, MiB and open files of each process that was there from the middle of the run to its end."""
    found: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
    for step, sample in samples:
        for name, (mib, files) in sample.items():
            found[name].append((step, mib, files))
    half = len(samples) // 2
    lasting = samples[half][1].keys() & samples[-1][1].keys() if samples else set()
    return {name: points for name, points in found.items() if name in lasting}


def growth(points: Sequence[tuple[int, float, int]]) -> dict[str, Any]:
    """MiB and files at the first and last measurement, and their growth per thousand steps in each half."""
    steps, mib, files = (np.asarray(column, float) for column in zip(*points, strict=True))
    early = steps <= steps[-1] / 2

    def slope(values: np.ndarray, part: np.ndarray) -> float:
        return 1000 * float(np.polyfit(steps[part], values[part], 1)[0]) if part.sum() > 1 else 0.0

    found = {
        "mib_first": mib[0], "mib_last": mib[-1], "mib_per_1000_first_half": slope(mib, early),
        "mib_per_1000": slope(mib, ~early), "files_first": files[0], "files_last": files[-1],
        "files_per_1000": slope(files, ~early),
    }  # fmt: skip
    return {name: round(float(value), 2) for name, value in found.items()}


def show(processes: dict[str, dict[str, Any]]) -> None:
    titles = ("MiB first", "last", "a 1,000 steps, 1st half", "2nd half", "files first", "last", "a 1,000 steps")
    table = Table(
        "process", *titles, title="Memory and open files of each process, and files on disk", title_justify="left"
    )
    for name, found in sorted(processes.items(), key=lambda item: -item[1]["mib_per_1000"]):
        table.add_row(name, *(f"{value:.4g}" for value in found.values()))
    Console(width=130).print(table)
    growing = [
        name
        for name, found in processes.items()
        if not name.startswith("on disk")
        and (found["mib_per_1000"] > GROWS_MIB or found["files_per_1000"] > GROWS_FILES)
    ]
    print(f"Growing in the second half: {', '.join(growing) or 'none'}")
