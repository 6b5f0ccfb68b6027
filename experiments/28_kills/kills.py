"""`kill -9` of all processes of a run at a seeded moment, and the same command again: does it end as an unbroken run?

    python experiments/28_kills/kills.py --seeds 0-19               # in one process: the local runtime
    python experiments/28_kills/kills.py --seeds 20-29              # a Ray of its own for each run

One row a seed goes to ``rows.jsonl`` beside this file; a second call does only what has no row of this commit yet.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false", RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0",
)  # fmt: skip
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch

from asyncrlhf.cli.main import main as command
from asyncrlhf.records.write.checkpoint import list_checkpoints
from tests.chaos.promises import broken_promises, figures
from tests.chaos.run import commit
from tests.chaos.simulation import seeds_of
from tests.loop import FAKE, Finished
from tests.processes import freeze

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("rows.jsonl")
MODES = {
    "sync": ("async.mode=sync",),
    "one_step": ("async.mode=one_step",),
    "fixed_lag": ("async=fixed_lag", "async.lag=2"),
    "async": ("async.max_staleness=3",),
}
MOMENTS = ("before the first checkpoint", "while one is written", "between two")
LOCAL = 20  # seeds below are of the local runtime
EVERY, STEPS = 4, 16
FILES = 9  # of a checkpoint under way, at most waited for
COMMON = (
    *FAKE, "generator.replicas=2", f"steps={STEPS}", f"checkpoint.every={EVERY}", "checkpoint.resume=auto",
    "logging=quiet", "task.heldout_size=2", "stall_timeout_seconds=60",
)  # fmt: skip
SAMPLED = ("generator.engine=hf", "generator.max_completion_length=12")
SANDBOXED = ("reward.kind=python", "reward.target=tests.reward_functions:obeys")
MARK = "ASYNCRLHF_KILLS"  # in the environment of all processes of one run
LIMIT = 240.0  # seconds of one process


@dataclass(frozen=True)
class Case:
    seed: int
    runtime: str
    mode: str
    moment: str
    overrides: tuple[str, ...]

    @property
    def repeatable(self) -> bool:
        """Whether a resumed run has to end as an unbroken one, bit for bit."""
        return self.runtime == "local" or self.mode != "async"


def draw(seed: int) -> Case:
    """Every third seed has each kind of moment, every fourth each mode; in turns of five come a model that samples and
    a reward function in a process of its own."""
    runtime, mode = "local" if seed < LOCAL else "ray", [*MODES][seed % 4]
    own = SAMPLED if seed % 5 == 1 else SANDBOXED if seed % 5 in (2, 4) else ()
    on_ray = ("generator.threads=0",) if runtime == "ray" else ("learner.virtual_step_seconds=0.1",)
    return Case(seed, runtime, mode, MOMENTS[seed % 3], (*COMMON, f"runtime={runtime}", *MODES[mode], *on_ray, *own))


class Process:
    """``asyncrlhf train`` in a session of its own, with a temporary folder of its own."""

    def __init__(self, case: Case, place: Path) -> None:
        self.run_dir, self.place = place / "run", place
        words = ["train", f"run_dir={self.run_dir}", *case.overrides]
        env = {**os.environ, MARK: str(place), "TMPDIR": str(place / "t"), "PYTHONPATH": str(ROOT)}
        (place / "t").mkdir(exist_ok=True)
        self.number = _forked(words, env, place) if case.runtime == "local" else _started(words, env, place)
        self.root = psutil.Process(self.number)
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            done, status = os.waitpid(self.number, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if done else None
        return self.code

    def wait(self) -> int:
        deadline = time.monotonic() + LIMIT
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill(freeze(self.root))
                return -1
            time.sleep(0.02)
        return code

    def kill(self, tree: Sequence[psutil.Process]) -> None:
        _send(tree, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.005)


def _send(tree: Sequence[psutil.Process], number: int) -> None:
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _forked(words: Sequence[str], env: dict[str, str], place: Path) -> int:
    """The same command without the seconds that its imports take."""
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        os.setsid()
        os.environ.update(env)
        tempfile.tempdir = None
        output = os.open(place / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        code = command(words)
        atexit._run_exitfuncs()
    finally:
        os._exit(code)


def _started(words: Sequence[str], env: dict[str, str], place: Path) -> int:
    with (place / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "asyncrlhf", *words],
            cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True,
        ).pid  # fmt: skip


@dataclass
class State:
    """What a run's folder shows at a moment."""

    steps: int
    checkpoints: int
    under_way: int  # files of the checkpoint that is being written; -1: there is none


def look(run_dir: Path) -> State:
    metrics = run_dir / "metrics.jsonl"
    steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    files = -1
    for folder in (run_dir / "checkpoints").glob(".*.tmp"):
        files = sum(len(names) for _, _, names in os.walk(folder))  # which may get its name meanwhile
    return State(steps, len(list_checkpoints(run_dir)), files)


def moment_of(case: Case, rng: random.Random) -> tuple[Callable[[State], bool], float, dict[str, int]]:
    """The condition that holds when the run is struck, the seconds waited after it held first, and what was drawn."""
    if case.moment == MOMENTS[0]:
        steps = rng.randrange(EVERY)
        start = 12.0 if case.runtime == "ray" else 0.3  # with no step yet: at any time of its start
        delay = rng.uniform(0, start) if steps == 0 else rng.uniform(0, 0.05)
        return (lambda s: s.steps >= steps and not s.checkpoints and s.under_way < 0), delay, {"steps": steps}
    if case.moment == MOMENTS[1]:
        done, files = rng.randrange(3), rng.randrange(FILES)
        # Where a checkpoint with as many files was missed, one of the later ones with fewer will do.
        return (
            (lambda s: s.checkpoints >= done and s.under_way >= max(0, files - 2 * (s.checkpoints - done))),
            0.0,
            {"checkpoints": done, "files": files},
        )
    steps = rng.randrange(EVERY + 1, STEPS - 1)
    return (lambda s: s.steps >= steps and s.checkpoints > 0), rng.uniform(0, 0.05), {"steps": steps}


def strike(process: Process, holds: Callable[[State], bool], delay: float) -> State | None:
    """Kill the whole tree while the condition holds: it is frozen first, and looked at again. None where the run ended
    before."""
    due: float | None = None
    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if holds(look(process.run_dir)):
            due = time.monotonic() + delay if due is None else due
            if time.monotonic() >= due:
                tree = freeze(process.root)
                if holds(state := look(process.run_dir)):
                    process.kill(tree)
                    return state
                _send(tree, signal.SIGCONT)
        time.sleep(0.001)
    process.kill(freeze(process.root))
    return None


def outcome(run_dir: Path) -> dict[str, Any]:
    """What a run trained on and became: hashes of the sequences, of the metrics without times, and of the weights."""
    done = Finished(run_dir, json.loads((run_dir / "summary.json").read_text()))
    rows = done.trained
    lists = [[list(v) for v in rows[name]] for name in ("policy_versions", "behavior_logprobs", "consumed_at_version")]
    plain = rows[["rollout_id", "group_id", "prompt", "response", "reward", "staleness"]].to_numpy().tolist()
    metrics = [{k: v for k, v in row.items() if k != "mismatch_kl"} for row in done.untimed_metrics]
    ledger = done.summary["ledger"]
    return {
        "sequences": _digest([plain, lists]), "metrics": _digest(metrics), "weights": done.weights_digest()[:16],
        "trained": ledger["trained"], "admitted": ledger["admitted"], "adds_up": ledger["adds_up"],
        "steps": [row["step"] for row in done.metrics] == list(range(1, STEPS + 1)),
    }  # fmt: skip


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


@contextmanager
def place_of(case: Case) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="k-"))  # short: Ray puts sockets below it
    try:
        yield place
    finally:
        for left in _left(place):
            left.kill()
        shutil.rmtree(place, ignore_errors=True)


def _left(place: Path) -> list[psutil.Process]:
    """Processes of a run that live, under any parent."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == str(place):
                found.append(process)
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


def unbroken(case: Case, known: dict[tuple[str, ...], dict[str, Any]]) -> dict[str, Any]:
    if case.overrides not in known:
        with place_of(case) as place:
            process = Process(case, place)
            if process.wait():
                raise SystemExit(f"the unbroken run of seed {case.seed}: {(place / 'output.txt').read_text()[-2000:]}")
            known[case.overrides] = outcome(process.run_dir)
    return known[case.overrides]


def examine(case: Case, whole: dict[str, Any]) -> dict[str, Any]:
    """One run that is killed, and again by the same command until it is done."""
    rng, began, missed = random.Random(case.seed), time.monotonic(), 0
    while True:
        holds, delay, drawn = moment_of(case, rng)
        with place_of(case) as place:
            if (state := strike(Process(case, place), holds, delay)) is None:
                missed += 1
                if missed == 4:
                    raise SystemExit(f"seed {case.seed}: {case.moment} was missed four times")
                continue
            time.sleep(2.5)  # sandboxes may live two seconds longer
            orphans = len(_left(place))
            again = Process(case, place)
            code = again.wait()
            said = (place / "output.txt").read_text(errors="replace")
            found = outcome(again.run_dir) if code == 0 else {}
            broken, counted = broken_promises(again.run_dir), figures(again.run_dir)
            left = [str(p.relative_to(place)) for p in (place / "t").glob("asyncrlhf-*")]
            left += [p.name for p in (again.run_dir / "checkpoints").glob(".*.tmp")]
            orphans += len(_left(place))
        break
    names = [name for name in ("sequences", "metrics", "weights", "admitted") if found.get(name) == whole[name]]
    totals = code == 0 and found["adds_up"] and found["steps"] and found["trained"] == whole["trained"]
    row = {
        "seed": case.seed, "runtime": case.runtime, "mode": case.mode, "moment": case.moment, "drawn": drawn,
        "killed_at": state.__dict__, "missed": missed, "exit": code, "totals_go_on": totals, "same": names,
        "must_be_same": case.repeatable, "verify": broken[:3], **counted, "orphans": orphans, "files_left": left,
        "trained": found.get("trained"), "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    same = len(names) == 4 or not case.repeatable
    row["held"] = totals and same and not (broken or any(counted.values()) or orphans or left)
    if not row["held"]:
        row["said"] = said[-1500:]
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-29")
    given = parser.parse_args(arguments)
    version, known = commit(), {}
    kept = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    rows = {row["seed"]: row for row in kept}
    for seed in seeds_of(given.seeds):
        if rows.get(seed, {}).get("commit") == version:
            continue
        case = draw(seed)
        row = rows[seed] = {"commit": version, **examine(case, unbroken(case, known))}
        ROWS.write_text("".join(json.dumps(rows[s]) + "\n" for s in sorted(rows)))
        print(f"{seed}: {case.runtime} {case.mode}, {case.moment} {row['killed_at']}: "
              f"{'held' if row['held'] else 'BROKEN'} {row['seconds']} s", flush=True)  # fmt: skip
    return 0 if all(rows[seed]["held"] for seed in seeds_of(given.seeds)) else 1


if __name__ == "__main__":
    sys.exit(main())
