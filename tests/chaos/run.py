"""`make chaos`: real runs under real faults, one a seed; what each left is held against what runs promise.

    make chaos SEEDS=0-199                  on Ray: one Ray for all seeds, each run a process of its own
    make chaos RUNTIME=local SEEDS=0-499    in one process a run, whose calls of parts meet the fault
    make chaos RUNTIME=moments SEEDS=0-143  on Ray: every part struck at every moment (tests/chaos/moments.py)
    make chaos SEEDS=0-39 ARGS="--also weights.transport=relay weights.delta=sparse"
    make chaos SIMULATED=0-1999 SEEDS=      schedules of faults on the virtual clock (tests/chaos/simulation.py)

One row a seed in experiments/24_chaos/<runtime>.jsonl. Rows of this commit are kept, so that what was cut off goes on
where it was. Exit code 1 if any promise broke.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false", RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0",
    RAY_process_group_cleanup_enabled="1",
)  # fmt: skip

import psutil

from asyncrlhf.cluster.own_ray import OwnRay
from asyncrlhf.last_words import ENDING
from asyncrlhf.records.write.checkpoint import list_checkpoints
from asyncrlhf.records.write.journal import JOURNAL_FILE
from tests.chaos.injection import STALL_SECONDS, Case, child, draw_case
from tests.chaos.moments import BUILDING, moment_cases
from tests.chaos.promises import broken_promises, figures
from tests.chaos.simulation import main as simulate
from tests.chaos.simulation import seeds_of

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "experiments/24_chaos"
RAY_STARTS = 5
SMALL_DISK = "size=1500k"
ORPHAN_SECONDS = 15.0
SCAN_SECONDS = 0.5  # between two looks at the processes, each of which costs some milliseconds of a core


@contextmanager
def one_ray(cpus: int) -> Iterator[tuple[str, psutil.Process]]:
    """A Ray that outlives the runs: its address, and this process, which all of its processes descend from."""
    for tries_left in reversed(range(RAY_STARTS)):  # Ray gives its node 30 s, which a crowded machine exceeds
        try:
            own = OwnRay(cpus, 256 * 2**20)
            break
        except Exception as error:
            print(f"Ray did not start: {error}", flush=True)
            if not tries_left:
                raise
    try:
        yield own.address, psutil.Process()
    finally:
        own.stop()


def actors(keeper: psutil.Process | None) -> list[psutil.Process]:
    """Processes of parts that are alive on our Ray."""
    found = []
    for process in keeper.children(recursive=True) if keeper is not None else ():
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and title.startswith("ray::") and "Actor" in title:
                found.append(process)
    return found


@contextmanager
def folder_of(case: Case) -> Iterator[Path]:
    """A folder for one run; on a disk that it fills where the fault is that."""
    place = tempfile.mkdtemp(prefix="chaos-")  # no TemporaryDirectory: a forked child would remove it at its exit
    mounted = case.kind == "disk full"
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", SMALL_DISK, "tmpfs", place], check=True, capture_output=True)
    try:
        yield Path(place)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", place], check=False, capture_output=True)
        shutil.rmtree(place, ignore_errors=True)


@dataclasses.dataclass
class Ended:
    code: int
    hung: bool
    stall: float
    family: set[psutil.Process]
    seconds: float


@dataclasses.dataclass
class Processor:
    """Processor seconds of processes, those that ended meanwhile as of the last look."""

    spent: dict[psutil.Process, float] = dataclasses.field(default_factory=dict)

    def look(self, *roots: psutil.Process | None) -> set[psutil.Process]:
        """The processes below the roots."""
        found = set[psutil.Process]()
        for root in roots:
            with suppress(psutil.NoSuchProcess):
                found |= {root, *root.children(recursive=True)} if root is not None else set()
        for process in found:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self.spent[process] = times.user + times.system
        return found

    @property
    def total(self) -> float:
        return sum(self.spent.values())


PROCESSOR = Processor()


def attempt(
    case: Case, run_dir: Path, told: Path, address: str, keeper: psutil.Process | None, limit: float, *, faulty: bool
) -> Ended:
    """One process of the run, from its start to its end."""
    given = (str(run_dir), str(told), address, patience(limit), faulty)
    if case.runtime == "ray":  # a process that holds a Ray must not be forked
        words = [sys.executable, "-m", "tests.chaos.injection", json.dumps([dataclasses.asdict(case), *given])]
        number = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).pid
    elif (number := os.fork()) == 0:
        child(case, *given)
    began = moved = looked = time.monotonic()
    stall, hung, family = 0.0, False, set[psutil.Process]()
    struck = not (faulty and case.part == "driver")
    seen, begun = -1, False
    with ended_with_us(number):
        while True:
            done, status = os.waitpid(number, os.WNOHANG)
            if done:
                return Ended(os.waitstatus_to_exitcode(status), hung, stall, family, time.monotonic() - began)
            now = time.monotonic()
            if now - looked > SCAN_SECONDS:
                looked = now
                with suppress(psutil.NoSuchProcess):
                    own = psutil.Process(number)
                    family |= PROCESSOR.look(own) - {own}
                PROCESSOR.look(keeper)
            size = sum(path.stat().st_size for path in run_dir.glob("*.jsonl"))
            if size != seen:
                seen, moved = size, now
                begun = begun or has_begun(run_dir)
            if begun:
                stall = max(stall, now - moved)
            if not struck and begins(told) and moment(case, run_dir, now - began):
                struck = True
                strike_driver(case, number, told)
            if now - began > patience(limit):
                hung = True
                with suppress(ProcessLookupError):
                    os.killpg(number, signal.SIGKILL)
            time.sleep(0.02)


@contextmanager
def ended_with_us(number: int) -> Iterator[None]:
    """A process that does not outlive this one's interruption."""
    try:
        yield
    except BaseException:
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                end(number, signal.SIGKILL)
        raise


def has_begun(run_dir: Path) -> bool:
    """Whether its parts are there: a start has a limit of its own."""
    journal = run_dir / JOURNAL_FILE
    return journal.exists() and b'"publish"' in journal.read_bytes()


def begins(told: Path) -> bool:
    """Whether the command has said its first word: before, a signal meets this harness's own imports."""
    output = told.with_suffix(".txt")
    return output.exists() and output.stat().st_size > 0


def patience(limit: float) -> float:
    """``limit`` seconds of a free machine, on one that others use as well."""
    return limit * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def moment(case: Case, run_dir: Path, seconds: float) -> bool:
    """Whether the time has come to strike the driver."""
    if case.at < 0:
        return seconds > 20 * case.delay * (0.2 if case.runtime == "local" else 1)
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= case.at


def strike_driver(case: Case, number: int, told: Path) -> None:
    names = [signal.Signals(n).name for n in case.signals] if case.kind == "interrupt" else []
    told.write_text(json.dumps({"struck": [f"{case.kind} {' '.join(names)}".strip()], "part": "driver"}))
    with suppress(ProcessLookupError):
        if case.kind == "kill":
            os.kill(number, signal.SIGKILL)
        elif case.kind == "interrupt":
            for sent in case.signals:
                (os.killpg if sent == signal.SIGINT else os.kill)(number, sent)
                time.sleep(case.lasts / 3)
        else:
            os.kill(number, signal.SIGSTOP)
            time.sleep(case.lasts if case.kind == "freeze a while" else 0.5)
            os.kill(number, signal.SIGCONT)


def examine(case: Case, address: str, keeper: psutil.Process | None, limit: float) -> dict[str, Any]:
    """One case: the run under its fault, again by the same command until it is done, and what it left."""
    began, cpu_before = time.monotonic(), PROCESSOR.total
    with folder_of(case) as place:
        run_dir, told = place / "run", Path(tempfile.gettempdir()) / f"chaos-{os.getpid()}.json"
        told.unlink(missing_ok=True)
        told.with_suffix(".txt").unlink(missing_ok=True)
        codes, reasons, lasted, stall, hung, orphans, untrue = [], [], [], 0.0, False, 0, ""
        for number in range(4):
            ended = attempt(case, run_dir, told, address, keeper, limit, faulty=number == 0)
            codes.append(ended.code)
            lasted.append(round(ended.seconds, 1))
            reasons.append(reason_of(run_dir, told.with_suffix(".txt")))
            stall, hung = max(stall, ended.stall), hung or ended.hung
            orphans += left_over(ended.family, keeper)
            struck = json.loads(told.read_text()) if told.exists() else {}
            if number == 0 and not hung:
                untrue = "" if true_cause(case, struck, ended.code, reasons[-1]) else reasons[-1]
            if ended.code == 2 and not list_checkpoints(run_dir):
                shutil.rmtree(run_dir, ignore_errors=True)  # refused: there is nothing yet to go on from
            if ended.code == 0 or hung or case.kind in ("disk full", "nan"):
                break
        broken = broken_promises(run_dir) if run_dir.exists() else []
        found = figures(run_dir)
        output = told.with_suffix(".txt").read_text(errors="replace") if told.with_suffix(".txt").exists() else ""
    again = codes[-1] == 0 or case.kind in ("disk full", "nan")
    row = {
        "seed": case.seed, "runtime": case.runtime, "kind": case.kind, "part": case.part, "moment": case.moment,
        "struck": struck.get("struck", []),
        "exit": codes, "reasons": reasons, "cause_true": not untrue, "finished": again, "verify": broken[:3], **found,
        "hung": hung, "orphans": orphans, "longest_stall": round(stall, 1),
        "runs_seconds": lasted, "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(PROCESSOR.total - cpu_before, 1),
    }  # fmt: skip
    stood = stall > STALL_SECONDS * patience(limit) / limit
    row["held"] = not (broken or untrue or hung or orphans or stood or not again or any(found.values()))
    for mark in ("Traceback", "Timeout ("):
        if mark in output and not row["held"]:
            row["trace"] = output[output.index(mark) :][-1500:]
    return row


def reason_of(run_dir: Path, output: Path) -> str:
    """What the summary says; on a disk too full for one, the command's own sentence."""
    with suppress(OSError, ValueError, KeyError):
        return str(json.loads((run_dir / "summary.json").read_text())["exit_reason"])
    text = output.read_text(errors="replace") if output.exists() else ""
    said = [line for line in text.splitlines() if line.startswith("asyncrlhf: ")]
    return said[-1].replace("asyncrlhf", "failed", 1) if said else "no summary"


def left_over(family: set[psutil.Process], keeper: psutil.Process | None) -> int:
    """Processes of the run that outlive it; they are ended here."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while True:
        left = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] + actors(keeper)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return len(left)


def true_cause(case: Case, struck: dict[str, Any], code: int, reason: str) -> bool:
    """Whether how it ended is explained by what was done to it."""
    if code == 0:
        return reason == "done"
    if "is out of range" in reason:
        return False  # the case's own settings: nothing was tried
    if case.part == "driver":
        return (case.kind, code) in (("kill", -9), *(("interrupt", 128 + number) for number in ENDING))
    started = case.moment != BUILDING if case.moment else case.at >= 0
    if case.runtime == "ray" and started and case.kind in ("kill", "freeze", "freeze a while", "slow"):
        return False  # every part but the driver is replaced
    words = {"disk full": ["space", "disk"], "nan": ["finite", "nan"], "memory": ["memory", "alloc"]}.get(case.kind, [])
    if (case.runtime, case.part) == ("local", "record writer"):
        words += ["disk"]  # its planned fault there, whatever kind was drawn, is a full one
    if case.moment == BUILDING and case.part in ("reward", "reference", "critic"):
        words += ["reward", "reference", "critic"]  # which of them it is, no title tells while they are built
    part = str(struck.get("part", case.part))
    words += [part, case.part, *(f"fault {n}" for n in range(3))]
    return reason.startswith("failed") and any(word.lower() in reason.lower() for word in words)


def commit() -> str:
    """Of the tree, with a mark where files differ from it."""
    ask = ["git", "-C", str(ROOT)]
    name = subprocess.run([*ask, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(
        [*ask, "status", "--porcelain", "-uno"], capture_output=True, text=True
    ).stdout.splitlines()
    own = [line for line in changed if not line.endswith(".jsonl")]
    return name + ("+" if own else "")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a kind of fault, and the totals."""
    by_kind = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    lines = [
        "| fault | runs | struck | done at once | ended by its cause | broken | hung | orphans | stall s | s | CPU s |"
    ]
    lines.append("|---" * 11 + "|")
    for kind, own in [*sorted(by_kind.items()), ("all", list(rows))]:
        first = Counter(r["exit"][0] == 0 for r in own)
        cells = [
            kind, len(own), sum(bool(r["struck"]) for r in own), first[True], first[False],
            sum(not r["held"] for r in own), sum(r["hung"] for r in own), sum(r["orphans"] for r in own),
            max(r["longest_stall"] for r in own), max(max(r["runs_seconds"]) for r in own),
            round(sum(r["cpu_seconds"] for r in own) / len(own), 1),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    sums = {k: sum(r[k] for r in rows) for k in ("lost", "trained_twice", "over_bound")}
    return "\n".join([*lines, "", ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in sums.items())])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-199")
    parser.add_argument("--runtime", default="ray", choices=("ray", "local", "moments"))
    parser.add_argument("--simulated", default="", help="seeds of the simulation to run first")
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds of a free machine after which a process hangs"
    )
    parser.add_argument(
        "--also", nargs="+", default=[], help="overrides of every run, whose rows have a file of their own"
    )
    given = parser.parse_args(arguments)
    if given.simulated and simulate(["--seeds", given.simulated]):
        return 1
    if not given.seeds:
        return 0
    ROWS.mkdir(exist_ok=True)
    name = "-".join([given.runtime, *(one.replace("=", "-") for one in given.also)])
    path, version = ROWS / f"{name}.jsonl", commit()
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = {row["seed"]: row for row in kept if row["commit"] == version}
    moments = moment_cases() if given.runtime == "moments" else []
    wanted = [seed for seed in seeds_of(given.seeds) if not moments or seed < len(moments)]

    def work(address: str = "", keeper: psutil.Process | None = None) -> None:
        for seed in wanted:
            if seed in rows:
                continue
            case = moments[seed] if moments else draw_case(seed, given.runtime)
            case = dataclasses.replace(case, overrides=(*case.overrides, *given.also))
            row = rows[seed] = {"commit": version, **examine(case, address, keeper, given.limit)}
            path.write_text("".join(json.dumps(rows[s]) + "\n" for s in sorted(rows)))
            mark = "held" if row["held"] else "BROKEN"
            what = " at: ".join(filter(None, (f"{row['kind']} of {row['part']}", case.moment)))
            print(f"seed {seed}: {what}: {row['reasons']} {mark} {row['seconds']} s", flush=True)

    if given.runtime != "local":
        with one_ray(8 if moments else 4) as (address, keeper):
            work(address, keeper)
    else:
        work()
    chosen = [rows[seed] for seed in wanted]
    print(table(chosen))
    return 0 if all(row["held"] for row in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
