"""Strikes against what a run stands on, at seeded moments: Ray's processes, its own process, its memory, its machine.

    python experiments/41_strikes/strikes.py --seeds 0-99        # restarts=3: each has to end "done" by itself
    python experiments/41_strikes/strikes.py --seeds 100-139     # restarts=0: one sentence; the same command goes on
    python experiments/41_strikes/strikes.py --seeds 140-159     # notices: a checkpoint; the same command goes on

About half a minute a seed, one after the other, each with a Ray of its own and a /dev/shm of its own (root, or a system
whose users may have namespaces). One row a seed goes to ``rows.jsonl`` beside this file; a second call does only what
has no row of this commit yet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from tests.chaos.promises import broken_promises, figures
from tests.chaos.run import commit
from tests.chaos.simulation import seeds_of
from tests.loop import FAKE, Finished
from tests.processes import freeze

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("rows.jsonl")
SHARED = Path("/dev/shm")
OWN = "ASYNCRLHF_STRIKES_SHM"  # in the environment of this program once /dev/shm is its own
MARK = "ASYNCRLHF_STRIKES"  # in the environment of all processes of one run
LIMIT = 240.0  # seconds for each thing that is waited for
ORPHAN_SECONDS = 5.0
ALONE, NOTICED = 100, 140  # seeds from here on have restarts=0; are notices
BATCH, STALL = 16, 6
GROUPS = Path("/sys/fs/cgroup/memory")  # version 1; version 2 has its own names
MODES = (("async.max_staleness=3",), ("async.mode=one_step",), ("async=fixed_lag", "async.lag=2"), ("async.mode=sync",))
COMMON = (
    *FAKE, f"batch_size={BATCH}", "generator.replicas=2", "checkpoint.every=5", "logging=quiet",
    "task.heldout_size=2", f"stall_timeout_seconds={STALL}", "checkpoint.resume=auto",
)  # fmt: skip
# What is struck, and words of the sentence that has to follow. None: the run goes on, and says nothing; no words: who
# would speak is dead.
KINDS: dict[str, tuple[str, ...] | None] = {
    "raylet": ("Ray lost its node process (raylet)", "raylet failed to startup"),
    "gcs_server": ("Ray lost its control store (gcs_server)",),
    "killed": ("the run's process was killed (SIGKILL)",),
    "crashed": ("the run's process crashed (SIGSEGV)",),
    "memory": ("memory was short",),
    "agents": ("Ray lost its node process (raylet)", "raylet failed to startup"),
    "group": (),
    "suspended": None,
    "notice": (),
}
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, 0)  # 0: the file `stop`
AGENTS = ("dashboard/agent.py", "runtime_env/agent/main.py", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


@dataclass(frozen=True)
class Case:
    """``at``: the steps at which it is struck, one time for each; ``delay``: seconds after that step, for each."""

    seed: int
    kind: str
    at: tuple[int, ...]
    delay: tuple[float, ...]
    overrides: tuple[str, ...]

    @property
    def steps(self) -> int:
        """A run without Ray's control store goes on for seconds, in which a short one would end."""
        return 400 if self.kind == "gcs_server" else 30

    @property
    def alone(self) -> bool:
        return self.seed >= ALONE


def draw(seed: int) -> Case:
    """Each kind in turn. One to three strikes, each after the checkpoint that the attempt before it may have begun
    with, so that progress is possible; a tenth of the first ones come while the run starts."""
    rng = random.Random(seed)
    kind = "notice" if seed >= NOTICED else [*KINDS][seed % (len(KINDS) - 1)]
    number = 1 if seed >= ALONE else rng.choice((1, 1, 2, 3))
    at = sorted(rng.sample(range(1, 29), number))
    if rng.random() < 0.1:
        at[0] = 0
    delays = tuple(rng.uniform(0, 8) if step == 0 else rng.uniform(0, 0.2) for step in at)
    engine = ("generator.engine=hf", "generator.max_completion_length=12") if rng.random() < 0.3 else ()
    restarts = f"restarts={0 if seed >= ALONE else 3}"
    case = Case(seed, kind, tuple(at), delays, (*COMMON, f"seed={seed}", restarts, *rng.choice(MODES), *engine))
    return replace(case, overrides=(*case.overrides, f"steps={case.steps}"))


class Command:
    """``asyncrlhf train`` as a user starts it, in a session and with a temporary folder of its own."""

    def __init__(self, case: Case, place: Path) -> None:
        self.run_dir, self.place = place / "run", place
        (place / "t").mkdir(exist_ok=True)
        env = {**os.environ, MARK: str(place), "TMPDIR": str(place / "t"), "PYTHONPATH": str(ROOT)}
        env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}
        words = [sys.executable, "-m", "asyncrlhf", "train", f"run_dir={self.run_dir}", *case.overrides]
        with (place / "output.txt").open("a") as output:
            self.process = subprocess.Popen(
                words, cwd=place, env=env, stdout=output, stderr=output, start_new_session=True
            )
        self.root = psutil.Process(self.process.pid)

    @property
    def said(self) -> list[str]:
        text = (self.place / "output.txt").read_text(errors="replace")
        return [line for line in text.splitlines() if line.startswith("asyncrlhf: ")]

    def ended(self) -> bool:
        return self.process.poll() is not None

    def steps(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def own(self) -> psutil.Process | None:
        """The run's own process: the first below the one that was started; the others are what earlier ones left."""
        with suppress(psutil.NoSuchProcess):
            found = [p for p in self.root.children() if p.status() != psutil.STATUS_ZOMBIE]
            ours = [p for p in found if "asyncrlhf" in " ".join(p.cmdline())]
            return max(ours, key=lambda p: p.create_time(), default=None)
        return None

    def below(self) -> list[psutil.Process]:
        own = self.own()
        with suppress(psutil.NoSuchProcess):
            return [] if own is None else own.children(recursive=True)
        return []


def wait(there: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
    deadline = time.monotonic() + limit
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {limit:g} s")
        time.sleep(0.005)


def strike(case: Case, command: Command, step: int, delay: float) -> bool:
    """Strike at the moment; False if the run was over before."""
    wait(lambda: command.steps() >= step or command.ended(), f"step {step}")
    time.sleep(delay)
    wait(lambda: bool(_targets(case.kind, command)) or command.ended(), f"process to strike ({case.kind})")
    if command.ended() or command.steps() >= case.steps:
        return False
    targets = _targets(case.kind, command)
    if case.kind == "group":
        os.killpg(command.process.pid, signal.SIGKILL)
    elif case.kind == "notice":
        number = NOTICES[case.seed % len(NOTICES)]
        if number:
            os.kill(random.Random(case.seed).choice([command.root.pid, targets[0].pid]), number)
        else:
            (command.run_dir / "stop").touch()
    elif case.kind == "suspended":
        frozen = freeze(command.root)
        time.sleep(random.Random(case.seed).uniform(0.3, 3.0) * STALL)
        for process in reversed(frozen):
            with suppress(psutil.NoSuchProcess):
                process.resume()
    elif case.kind == "memory":
        with limited(targets[0], command.place.name):
            wait(lambda: not targets[0].is_running() or targets[0].status() == psutil.STATUS_ZOMBIE, "end by memory")
    else:
        for process in targets:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSEGV if case.kind == "crashed" else signal.SIGKILL)
    return True


def _targets(kind: str, command: Command) -> list[psutil.Process]:
    if kind in ("group", "suspended"):
        return [command.root]
    if kind in ("killed", "crashed", "memory", "notice"):
        return [own] if (own := command.own()) is not None else []
    found = []
    for process in command.below():
        with suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            if process.name() == kind or (kind == "agents" and any(word in line for word in AGENTS)):
                found.append(process)
    return found


@contextmanager
def limited(process: psutil.Process, name: str, limit: int = 2**20) -> Iterator[None]:
    """Give a process no more than ``limit`` bytes beside what it has, so that the kernel ends it when it asks for more.
    What is moved to a group brings no pages with it: only those count that it asks for from now on."""
    group = GROUPS / name
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        wait(lambda: not (group / "cgroup.procs").read_text().strip(), "end of the group", 10)
        group.rmdir()


def left(place: Path) -> list[psutil.Process]:
    """Processes of a run that live, under any parent, once they had some seconds to end."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while True:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(MARK) == str(place):
                    found.append(process)
        found = [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def titles(found: Sequence[psutil.Process]) -> list[str]:
    said = []
    for process in found:
        with suppress(psutil.Error):
            said.append((" ".join(process.cmdline()) or process.name())[:80])
            process.kill()
    return said


def examine(case: Case) -> dict[str, Any]:
    place, began = Path(tempfile.mkdtemp(prefix="s-")), time.monotonic()
    orphans: list[str] = []
    said: list[str] = []
    codes: list[int] = []
    struck = reached = lost_steps = 0
    try:
        command = Command(case, place)
        for step, delay in zip(case.at, case.delay, strict=True):
            before = len(command.said)
            if not strike(case, command, max(step, reached + 1) if reached else step, delay):
                break
            struck += 1
            if KINDS[case.kind] is None:
                continue
            if case.kind == "group" or case.alone:
                wait(command.ended, "end")
                codes.append(command.process.returncode)
                orphans += titles(left(place))
                said += command.said[before:]
                lost_steps = max(lost_steps, command.steps() - newest(command.run_dir))
                command = Command(case, place)
            else:
                wait(partial(spoken, command, before), "sentence of the parent")
                said += command.said[before:]
            reached = command.steps()  # where the attempt ended
        wait(command.ended, "end")
        codes.append(command.process.returncode)
        orphans += titles(left(place))
        shared = sorted(path.name for path in SHARED.iterdir())
        broken, found = broken_promises(command.run_dir), figures(command.run_dir)
        summary = json.loads((command.run_dir / "summary.json").read_text())
        done = Finished(command.run_dir, summary)
        ledger, steps = summary.get("ledger", {}), [row["step"] for row in done.metrics]
        everything = command.said
    except (TimeoutError, OSError, psutil.Error) as error:
        output = (place / "output.txt").read_text(errors="replace")
        return {**facts(case, struck, began), "held": False, "error": str(error), "output": output[-2000:]}
    finally:
        titles(left(place))
        shutil.rmtree(place, ignore_errors=True)
        for path in SHARED.iterdir():
            path.unlink()
    totals = (
        steps == list(range(1, case.steps + 1))
        and ledger.get("trained") == case.steps * BATCH
        and ledger.get("adds_up")
    )
    row = facts(case, struck, began) | {
        "exit": codes, "reason": summary["exit_reason"], "totals": bool(totals), "verify": broken[:3], **found,
        "orphans": orphans, "shared": shared, "lost_steps": lost_steps,
        "said": said, "cause": true_cause(case, struck, said, everything),
    }  # fmt: skip
    whole = codes[-1] == 0 and row["reason"] == "done" and totals and row["cause"]
    whole = whole and (case.kind != "notice" or (lost_steps == 0 and struck > 0))
    row["held"] = bool(whole and not (broken or any(found.values()) or orphans or shared))
    return row


def newest(run_dir: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(path.name.rpartition("-")[2]) for path in run_dir.glob("checkpoints/step-*")), default=0)


def spoken(command: Command, before: int) -> bool:
    return len(command.said) > before or command.ended()


def facts(case: Case, struck: int, began: float) -> dict[str, Any]:
    named = {"seed": case.seed, "kind": case.kind, "at": case.at, "struck": struck, "restarts": 0 if case.alone else 3}
    return named | {"seconds": round(time.monotonic() - began, 1)}


def true_cause(case: Case, struck: int, said: Sequence[str], everything: Sequence[str]) -> bool:
    """One sentence a strike with its cause, and no other but those of the attempts that follow."""
    words = KINDS[case.kind]
    own = ("asyncrlhf: interrupted.",) if case.kind == "notice" else ()  # of a command that has not begun its run yet
    causes = [line for line in everything if "the next attempt begins" not in line and line not in own]
    if not words:
        return not causes
    return len(causes) == struck and all(any(word in line for word in words) for line in causes)


def table(rows: Sequence[dict[str, Any]]) -> str:
    by_kind = defaultdict(list)
    for row in rows:
        by_kind[f"{row['kind']}, restarts={row['restarts']}"].append(row)
    lines = ["| struck | runs | strikes | ended done | right sentence | orphans | shared memory | broken | s |"]
    lines.append("|---" * 9 + "|")
    for kind, own in [*sorted(by_kind.items()), ("all", list(rows))]:
        counts = Counter(done=0)
        for row in own:
            counts["done"] += row.get("reason") == "done" and row["exit"][-1] == 0
            counts["cause"] += bool(row.get("cause"))
            counts["orphans"] += len(row.get("orphans", ()))
            counts["shared"] += len(row.get("shared", ()))
        cells = [kind, len(own), sum(row["struck"] for row in own), counts["done"], counts["cause"], counts["orphans"]]
        cells += [counts["shared"], sum(not row["held"] for row in own), max(row["seconds"] for row in own)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def in_own_shared_memory(arguments: Sequence[str]) -> None:
    """Become this program with a /dev/shm that no other process uses."""
    words = ["unshare", "-m", "--propagation", "private", *(("-r",) if os.geteuid() else ())]
    words += ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh", sys.executable, __file__, *arguments]
    os.execvpe(words[0], words, {**os.environ, OWN: "1"})


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-139")
    given = parser.parse_args(arguments)
    if OWN not in os.environ:
        in_own_shared_memory(arguments)
    version = commit()
    kept = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    rows = {row["seed"]: row for row in kept}
    for seed in seeds_of(given.seeds):
        if rows.get(seed, {}).get("commit") == version:
            continue
        row = rows[seed] = {"commit": version, **examine(draw(seed))}
        ROWS.write_text("".join(json.dumps(rows[s]) + "\n" for s in sorted(rows)))
        print(
            f"{seed}: {row['kind']} at {row['at']}: {'held' if row['held'] else 'BROKEN'} {row['seconds']} s",
            flush=True,
        )
    chosen = [rows[seed] for seed in seeds_of(given.seeds)]
    print(table(chosen))
    return 0 if all(row["held"] for row in chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
