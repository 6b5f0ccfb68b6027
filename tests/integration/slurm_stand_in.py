"""Stands for SLURM's commands on one machine, as ``sbatch SCRIPT ...`` (this module) and the programs in a folder.

A job is one node. The batch shell, and it alone, gets the script's signal when the run has made so many steps; a while
after that all processes of the job are killed. ``scontrol requeue`` has the job start again, under the same id.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

JOB = "4711"
GRACE_SECONDS = 60.0
JOB_SECONDS = 100.0  # until it is warned, or ends
PROGRAMS = {
    "scontrol": 'if [ "$1" = show ]; then echo here; else touch "$STAND_IN/$1-$2"; fi',
    # Its options end at the first word that is none.
    "srun": 'while [ "${1#-}" != "$1" ]; do [ "$1" = -w ] && shift; shift; done; exec "$@"',
    "hostname": "echo 127.0.0.1",
}


def install(folder: Path) -> None:
    """Write the programs that the script calls."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


def steps(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    return int(json.loads(rows[-1])["step"]) if rows else 0


def batch(script: Path, *words: str, warn_at: int) -> tuple[int, bool]:
    """Run the job once, and warn it at that step; returns its exit code, and whether it asked to be queued again."""
    folder = Path(os.environ["STAND_IN"])
    asked = re.search(r"^#SBATCH --signal=B:(\w+)@\d+$", script.read_text(), re.MULTILINE)
    assert asked is not None, "the script asks for no signal to its shell"
    environment = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "4", "SLURM_GPUS_ON_NODE": "0",
        "TMPDIR": os.environ["RAY_TMPDIR"],
    }  # fmt: skip
    with (folder / "job.log").open("a") as log:
        job = subprocess.Popen(
            ["bash", str(script), *words], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            limit = time.monotonic() + JOB_SECONDS
            while job.poll() is None and steps(folder / f"runs/slurm-{JOB}") < warn_at:
                assert time.monotonic() < limit, (folder / "job.log").read_text()
                time.sleep(0.05)
            job.send_signal(getattr(signal, f"SIG{asked.group(1)}"))
            job.wait(GRACE_SECONDS)
        finally:
            end(job.pid)
            job.wait()
    requeued = folder / f"requeue-{JOB}"
    again = requeued.exists()
    requeued.unlink(missing_ok=True)
    return job.returncode, again


def end(session: int) -> None:
    """As SLURM does with what a job leaves: kill the processes of its session."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _session(int(entry.name)) == session:
            try:
                os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                continue


def _session(process: int) -> int:
    try:
        return os.getsid(process)
    except (ProcessLookupError, PermissionError):
        return -1


if __name__ == "__main__":
    print(json.dumps(batch(Path(sys.argv[1]), *sys.argv[3:], warn_at=int(sys.argv[2]))))
