"""Memory and open files of every process of a long run, and its records on disk: what grows, by how much.

With ``--strike-every`` something of the run is killed each time, in turn, and the run goes on by itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from asyncrlhf.bench.measure import write
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.records.read.verify import verify
from asyncrlhf.records.write.recorder import METRICS_FILE, SUMMARY_FILE
from asyncrlhf.validation import typed_path

RUN = (
    "generator.engine=fake", "logging=quiet", "task.heldout_size=2", "num_generations=4", "batch_size=16",
    "eval_every=0", "checkpoint.keep=1", "learner.learning_rate=1e-4",
)  # fmt: skip
GROWS_MIB, GROWS_FILES = 4.0, 2.0  # per thousand steps: more than that is reported as growth

STRUCK_RUN = ("restarts=3", "checkpoint.every=50", "generator.replicas=2")  # beside RUN where something is killed
# What is killed, in turn: a process by its name, or the run's own.
STRUCK = ("GeneratorActor", "raylet", "LearnerActor", "gcs_server", "RecordActor", "driver")
WARM = 300  # steps of a new process that are not counted, where processes come and go

Sample = dict[str, tuple[float, int]]  # MiB and open files of each process, by its name
Point = tuple[int, float, int, str]  # steps made, MiB, open files, and the process


@dataclass
class Watch:
    """``samples``: with the number of steps that were made until then, those among them that a restart repeated.
    ``strikes``: seconds since the start, step, and what was killed. ``said``: the run's sentences."""

    samples: list[tuple[int, Sample]] = field(default_factory=list)
    strikes: list[tuple[float, int, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    seconds: float = 0.0
    made: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """A run of ``--steps`` steps in a separate process (the fake engine and the tiny model unless overridden), whose
    tree is measured every ``--every`` steps: each process's private memory (RssAnon) and open files. The slope is that
    of the second half of the run, by least squares. With ``--strike-every SECONDS`` a part, Ray's node process or
    control store, or the run itself is killed each time, in turn; slopes are then those within the processes of one
    name, and the records are verified at the end. Other arguments are overrides of the run, such as
    ``runtime=local``."""
    parser = argparse.ArgumentParser(prog="asyncrlhf bench soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="steps between two looks")
    parser.add_argument("--strike-every", type=float, default=0.0, help="seconds between two faults; 0: none")
    parser.add_argument("--out", type=typed_path, default=None)
    options, overrides = parser.parse_known_args(list(arguments))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        seen = watch(Path(folder), options.steps, options.every, overrides, options.strike_every)
    struck = bool(seen.strikes)
    processes = {name: growth(points) for name, points in by_process(seen.samples, struck).items()}
    show(processes)
    found = {"steps": options.steps, "overrides": overrides, "processes": processes}
    if struck:
        found |= {"seconds": round(seen.seconds), "made": seen.made, "strikes": seen.strikes, "said": seen.said}
        found |= {"ledger": seen.ledger, "broken": seen.broken}
        print(f"{len(seen.strikes)} strikes in {seen.seconds:.0f} s; {seen.made - options.steps} steps were repeated")
        print(f"verify: {'; '.join(seen.broken) or 'nothing is broken'}")
    return write(found, options.out)


def watch(folder: Path, steps: int, every: int, overrides: Sequence[str], strike_every: float = 0.0) -> Watch:
    """The measurements of the run's processes; raises AsyncRLHFError for a run that failed."""
    own = STRUCK_RUN if strike_every else (f"checkpoint.every={max(1, steps // 8)}",)
    words = [*RUN, *own, *overrides, f"run_dir={folder / 'run'}", f"steps={steps}"]
    command, log = [sys.executable, "-m", "asyncrlhf", "train", *words], folder / "output.txt"
    seen, lines, due = Watch(), Lines(folder / "run" / METRICS_FILE), every
    began, turn = time.monotonic(), itertools.cycle(STRUCK)
    next_strike = began + (strike_every or float("inf"))
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while process.poll() is None:
            time.sleep(0.05)
            seen.made += (new := lines.new())
            if seen.made >= due:
                seen.samples.append((seen.made, look(process.pid) | on_disk(folder / "run")))
                due = seen.made + every
                print(f"{time.strftime('%H:%M:%S')} step {lines.count} of {steps}", flush=True)
            # Struck is a run that makes steps, so that each fault meets it at work.
            if time.monotonic() >= next_strike and new and (name := strike(process.pid, next(turn))):
                seen.strikes.append((round(time.monotonic() - began, 1), lines.count, name))
                next_strike = time.monotonic() + strike_every
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    said = log.read_text(errors="replace")
    if process.returncode:
        raise AsyncRLHFError(f"the run ended with exit code {process.returncode}: {said.strip()[-500:]}")
    seen.seconds, seen.said = time.monotonic() - began, re.findall(r"^asyncrlhf: .*", said, re.MULTILINE)
    if strike_every:
        seen.ledger = json.loads((folder / "run" / SUMMARY_FILE).read_text())["ledger"]
        seen.broken = verify(folder / "run")
    return seen


class Lines:
    """Counts the lines of a file that grows, and is cut where a run goes on from a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path, self._size, self.count = path, 0, 0

    def new(self) -> int:
        """Lines since the last call: after a cut those that follow it."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._size:
                file.seek(0)
                self.count, self._size = file.read().count(b"\n"), file.tell()
                return 0
            file.seek(self._size)
            found = file.read()
        self._size += len(found)
        self.count += (lines := found.count(b"\n"))
        return lines


def strike(root: int, name: str) -> str:
    """Kill one process of that name; returns its name, or nothing if there is none."""
    for found, process in processes_of(root):
        if found == name:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                return name
    return ""


def processes_of(root: int) -> Iterator[tuple[str, psutil.Process]]:
    """A command's processes by name: its own ("parent"), the run's ("driver": forked, so that it has the same words),
    and what is below them."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(root)
        yield "parent", parent
        for process in parent.children(recursive=True):
            with suppress(psutil.Error, OSError, IndexError):
                words = process.cmdline()
                own = words == parent.cmdline() and process.ppid() == root
                yield "driver" if own else name_of(words), process


def look(root: int) -> Sample:
    """Memory and open files of a process and its descendants."""
    found: Sample = {}
    for name, process in processes_of(root):
        with suppress(psutil.Error, OSError, IndexError):
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


def by_process(samples: Sequence[tuple[int, Sample]], struck: bool = False) -> dict[str, list[Point]]:
    """The points of each process that was there from the middle of the run to its end. ``struck``: those of all
    processes of a name, without the first steps of each process that came later."""
    found: dict[str, list[Point]] = defaultdict(list)
    since: dict[str, int] = {}
    for step, sample in samples:
        for process, (mib, files) in sample.items():
            since.setdefault(process, step)
            name = process.partition(" (")[0] if struck else process
            if not struck or since[process] == samples[0][0] or step - since[process] >= WARM:
                found[name].append((step, mib, files, process))
    if struck:
        return {name: points for name, points in found.items() if len(points) > 1}
    half = len(samples) // 2
    lasting = samples[half][1].keys() & samples[-1][1].keys() if samples else set()
    return {name: points for name, points in found.items() if name in lasting}


def growth(points: Sequence[Point]) -> dict[str, Any]:
    """MiB and files at the first and last measurement, and their growth per thousand steps in each half, within each
    process."""
    steps, mib, files = (np.asarray(column, float) for column in list(zip(*points, strict=True))[:3])
    _, lives = np.unique([process for *_, process in points], return_inverse=True)
    early = steps <= steps[-1] / 2

    def slope(values: np.ndarray, part: np.ndarray) -> float:
        x, y = np.array(steps), np.array(values)
        for life in range(lives.max() + 1):
            own = part & (lives == life)
            x[own] -= x[own].mean() if own.any() else 0.0
            y[own] -= y[own].mean() if own.any() else 0.0
        spread = float((x[part] ** 2).sum())
        return 1000 * float((x[part] * y[part]).sum()) / spread if spread else 0.0

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
