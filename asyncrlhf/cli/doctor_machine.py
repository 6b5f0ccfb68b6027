"""What `asyncrlhf doctor` finds out about the machine itself: Python, cores, memory, disk, compiler, W&B login."""

from __future__ import annotations

import netrc
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

Level = Literal["good", "note", "fails"]
GIB = 2**30
MEMORY_NEEDED = 3 * GIB  # Ray, one learner, one generator and one reward worker on the tiny model
DISK_NEEDED = GIB
SHARED_MEMORY_WANTED = GIB // 2  # the object store of the default run


@dataclass(frozen=True)
class Finding:
    """One line of the table. ``fails`` means that the run in question would not work."""

    what: str
    found: str
    level: Level = "good"
    sentence: str = ""


def machine() -> list[Finding]:
    """Every finding that no package has to be imported for."""
    return [
        python_version(),
        cores(),
        memory(available_memory()),
        disk(Path.cwd()),
        shared_memory(Path("/dev/shm")),
        compiler(),
        tiny_model(Path(__file__).resolve().parents[1] / "assets" / "tiny-arithmetic"),
        wandb_login(os.environ),
    ]


def python_version() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] != (3, 11):
        return Finding("Python", found, "note", "the locked requirements were made and tested with Python 3.11.")
    return Finding("Python", found)


def cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count == 1:
        return Finding("CPU cores", "1", "note", "learner and generator share one core, so nothing overlaps.")
    return Finding("CPU cores", str(count))


def available_memory() -> int:
    """Bytes that new processes may use: what is free, or what the container's limit leaves when that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no such container, or no limit ("max")
        return available
    return min(available, limit - used)


def memory(available: int) -> Finding:
    found = f"{available / GIB:.1f} GiB available"
    if available < MEMORY_NEEDED:
        return Finding("memory", found, "fails", f"the default run needs about {MEMORY_NEEDED / GIB:.0f} GiB.")
    return Finding("memory", found)


def disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.0f} GiB free"
    if free < DISK_NEEDED:
        return Finding(
            "disk", found, "fails", f"{folder} has less than {DISK_NEEDED // GIB} GiB free for the run's records."
        )
    if not os.access(folder, os.W_OK):
        return Finding("disk", found, "fails", f"{folder} is not writable; go elsewhere or give run_dir=FOLDER.")
    return Finding("disk", found)


def shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding(
            "shared memory", "-", "note", "there is no /dev/shm; Ray keeps its objects in files, which is slower."
        )
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free"
    if free < SHARED_MEMORY_WANTED:
        sentence = "Ray will keep objects on disk, which is slower; in Docker, start with --shm-size=2g."
        return Finding("shared memory", found, "note", sentence)
    return Finding("shared memory", found)


def compiler() -> Finding:
    found = next((name for name in ("g++", "clang++") if shutil.which(name)), None)
    if found is None:
        sentence = "torch.compile needs one on the CPU: learner.compile=true and generator.engine=vllm would fail."
        return Finding("C++ compiler", "none", "note", sentence)
    return Finding("C++ compiler", found)


def tiny_model(folder: Path) -> Finding:
    if (folder / "config.json").is_file():
        return Finding("tiny model", "packaged")
    return Finding("tiny model", "-", "fails", f"the checkpoint of model.path=tiny is missing from {folder}.")


def wandb_login(environment: Mapping[str, str]) -> Finding:
    if environment.get("WANDB_API_KEY"):
        return Finding("W&B login", "by WANDB_API_KEY")
    try:
        known = netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    if known:
        return Finding("W&B login", "by ~/.netrc")
    return Finding(
        "W&B login", "none", "good", "runs are recorded offline; `wandb login`, then `wandb sync`, sends them."
    )
