"""The control store of a user's own Ray cluster is killed and started again, alone: with what it knew in Redis, or not.

    python experiments/41_strikes/control_store.py                # needs redis-server; about three minutes

One head without a run of its own, as `ray start --head` leaves it; a run of two generators on it, `restarts=3`. The
control store is killed at step 100 and its command given again five seconds later. Without Redis the new one knows
neither nodes nor the session: those of before have half a minute to end, a new one tries to join by
`ray start --address`, and then the head is started again at the same address. One row each goes to
``control_store.jsonl`` beside this file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from asyncrlhf.records.read.verify import verify
from tests.chaos.run import commit
from tests.loop import FAKE

ROWS = Path(__file__).with_name("control_store.jsonl")
PORT, REDIS = 6479, 6399
STEPS, AT, AWAY, LIMIT = 1500, 100, 5.0, 240.0
COMMON = (*FAKE, "generator.replicas=2", "checkpoint.every=20", "logging=quiet", "task.heldout_size=2", "restarts=3")
MARK = "ASYNCRLHF_CONTROL_STORE"  # in the environment of the head's processes


def start(environment: dict[str, str], *where: str) -> bool:
    """Start a node that goes on by itself; whether it did."""
    words = ["start", *where, "--num-cpus=6", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    words += ["--object-store-memory=100000000"]
    line = [sys.executable, "-m", "ray.scripts.scripts", *words]
    return not subprocess.run(
        line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT
    ).returncode


def of_the_head() -> list[psutil.Process]:
    """Its processes, and those below them, some of which have a title where their environment was."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if MARK in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found |= {process, *process.children(recursive=True)}
    return list(found)


def end_the_head() -> None:
    """What `ray stop` does, to this head alone."""
    for process in (ending := of_the_head()):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ending, timeout=30)


def store() -> psutil.Process:
    return next(process for process in of_the_head() if process.name() == "gcs_server")


@contextmanager
def redis(folder: str, used: bool) -> Iterator[dict[str, str]]:
    """The environment of a head whose control store writes to Redis."""
    if not used:
        yield {}
        return
    line = ["redis-server", "--port", str(REDIS), "--dir", folder, "--save", "", "--appendonly", "no"]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as server:
        time.sleep(1.0)
        try:
            yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{REDIS}"}
        finally:
            server.kill()


def steps(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def examine(used: bool) -> dict[str, Any]:
    """A run through the loss and the return of the control store."""
    with tempfile.TemporaryDirectory(prefix="cs-") as folder, redis(folder, used) as more:
        environment = {**os.environ, **more, MARK: "1", "RAY_AUTH_MODE": "token"}
        head = ("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}/r")
        assert start(environment, *head)
        run_dir, began = Path(folder) / "run", time.monotonic()
        words = [*COMMON, f"ray.address=127.0.0.1:{PORT}", f"steps={STEPS}", f"run_dir={run_dir}"]
        own = {name: value for name, value in environment.items() if name != MARK}
        line = [sys.executable, "-m", "asyncrlhf", "train", *words]
        try:
            with subprocess.Popen(line, env=own, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
                while steps(run_dir) < AT and run.poll() is None:
                    time.sleep(0.05)
                killed = store()
                again, its = killed.cmdline(), killed.environ()
                killed.kill()
                at, moment, found = steps(run_dir), time.monotonic(), {}
                time.sleep(AWAY)
                subprocess.Popen(again, env=its, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                if not used:
                    _, alive = psutil.wait_procs([p for p in of_the_head() if p.name() == "raylet"], timeout=30)
                    found = {
                        "old_node_ended": not alive,
                        "a_node_joined": start(environment, f"--address=127.0.0.1:{PORT}"),
                    }
                    end_the_head()
                    assert start(environment, *head)
                try:
                    _, said = run.communicate(timeout=LIMIT)
                except subprocess.TimeoutExpired:
                    run.send_signal(signal.SIGTERM)
                    _, said = run.communicate(timeout=LIMIT)
            attempts = json.loads((run_dir / "attempts.json").read_text())
            summary = json.loads((run_dir / "summary.json").read_text())
            return {
                "commit": commit(),
                "redis": used,
                "killed_at": at,
                **found,
                "exit": run.returncode,
                "reason": summary["exit_reason"],
                "steps": steps(run_dir),
                "trained": (summary.get("ledger") or {}).get("trained"),
                "attempts": len(attempts),
                "seconds_after": round(time.monotonic() - moment, 1),
                "seconds": round(time.monotonic() - began, 1),
                "said": [text for text in said.splitlines() if text.startswith("asyncrlhf: ")],
                "verify": verify(run_dir),
            }
        finally:
            end_the_head()
            shutil.rmtree(f"{folder}/r", ignore_errors=True)


def main() -> None:
    rows = [examine(used) for used in (False, True)]
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
