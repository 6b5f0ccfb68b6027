"""`asyncrlhf doctor [overrides]`: what this machine offers and what would fail on it, in plain sentences."""

from __future__ import annotations

import argparse
import netrc
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from asyncrlhf.cli.parser import Parser
from asyncrlhf.config.compose import load_config
from asyncrlhf.doctor import model as doctor_model
from asyncrlhf.doctor import parts as doctor_parts
from asyncrlhf.doctor.parts import Finding, Level, judge
from asyncrlhf.doctor.probes import PROBES, installed_version, plugin_installed, probe_cluster, probe_import
from asyncrlhf.validation import typed_path

if TYPE_CHECKING:
    from asyncrlhf.config.run_config import RunConfig

HELP = """asyncrlhf doctor [overrides]: checks whether `asyncrlhf train [overrides]` would work on this machine

  asyncrlhf doctor                                    the default run
  asyncrlhf doctor generator=vllm learner.ranks=2     a run with these overrides
  asyncrlhf doctor model.path=FOLDER                  how learner and engine will run this model, or why they cannot
  asyncrlhf doctor ray.address=auto generator.gpus=1  a run on a cluster, which it joins to see its free devices

  asyncrlhf doctor --all                              also imports the packages that the run does not use
  asyncrlhf doctor --gpu [--out FILE]                 measures this machine's GPUs in minutes (docs/gpu.md)
  asyncrlhf doctor --gpu --quick                      the main checks of them, in at most three minutes

Without --gpu it imports the run's packages in separate processes, and runs a tiny random model of the checkpoint's
family; it starts nothing else and changes nothing.
Exit codes: 0 the run should work here, 1 it would fail, 2 the settings or the model are wrong on every machine."""
COLOURS: Mapping[Level, str] = {"good": "green", "note": "yellow", "fails": "red"}
Probe = Callable[[str], dict[str, Any]]
GPU_WORDS = ("--gpu", "--quick", "--out")
GIB = 2**30
MEMORY_NEEDED = 3 * GIB  # Ray, one learner, one generator and one reward worker on the tiny model
DISK_NEEDED = GIB
SHARED_MEMORY_WANTED = GIB // 2  # the object store of the default run


def run(arguments: Sequence[str] = ()) -> int:
    """Print the table and a verdict on the run of ``asyncrlhf train`` with the same arguments; returns 0, 1 if the
    run would fail on this machine, or 2 if learner or engine cannot run the model. Raises ConfigError for arguments
    that are wrong on every machine."""
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    if any(argument.partition("=")[0] in GPU_WORDS for argument in arguments):
        options = gpu_options(arguments)
        from asyncrlhf.doctor import gpu_check

        return gpu_check.run(options.out, options.quick)
    overrides = [argument for argument in arguments if argument != "--all"]
    config = load_config(overrides)
    findings = examine(config, everything="--all" in arguments)
    if not {finding.what for finding in findings if finding.level == "fails"} & {"torch", "transformers"}:
        findings = [*findings, *doctor_model.ways(config)]
    console = Console()
    table = Table("what", Column("found", overflow="fold"), "verdict", title="asyncrlhf doctor", title_justify="left")
    for finding in findings:
        table.add_row(finding.what, escape(finding.found), f"[{COLOURS[finding.level]}]{finding.level}[/]")
    console.print(table)
    for finding in findings:
        if finding.sentence:
            sentence = escape(finding.sentence)
            console.print(f"[{COLOURS[finding.level]}]{finding.level}[/] {finding.what}: {sentence}", highlight=False)
    name = f"`asyncrlhf train {' '.join(overrides)}`" if overrides else "The default run (`asyncrlhf train`)"
    failed = ", ".join(finding.what for finding in findings if finding.level == "fails")
    verdict = f"would fail here: {failed}" if failed else "should work here"
    console.print(f"{name} {verdict}.", markup=False)
    refused = any(f.level == "fails" and f.what in (doctor_model.LEARNER, doctor_model.ENGINE) for f in findings)
    return 2 if refused else int(bool(failed))


def gpu_options(arguments: Sequence[str]) -> argparse.Namespace:
    """``out`` and ``quick`` of ``--gpu``. Raises ConfigError for other words, and for these without ``--gpu``."""
    parser = Parser("doctor", "Measures this machine's GPUs.")
    parser.add_argument("--gpu", action="store_true", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=typed_path, default=Path("gpu_check.json"))
    return parser.parse_args(list(arguments))


def examine(
    config: RunConfig, probe: Probe = probe_import, cluster: Probe = probe_cluster, everything: bool = False
) -> list[Finding]:
    """Every finding, the machine's first. ``probe`` imports one package and answers as :func:`probe_import` does;
    ``cluster`` joins the Ray at an address. Packages that the run does not need are only imported with
    ``everything``."""
    wanted = doctor_parts.needed(config)
    imported = [name for name in PROBES if everything or name in wanted]
    with ThreadPoolExecutor(max_workers=2) as pool:
        found = dict(zip(imported, pool.map(probe, imported), strict=True))
    answers = {name: found[name] if name in found else {"unused": installed_version(name)} for name in PROBES}
    vllm_asked = "vllm" in doctor_parts.engines(config) and _imports(answers)
    head_size = doctor_parts.head_size(config) if vllm_asked else None
    compiler = any(shutil.which(name) for name in ("g++", "clang++"))
    return [
        *machine(),
        *(doctor_parts.package(name, answers[name], wanted) for name in PROBES),
        *doctor_parts.devices(answers["torch"]),
        *doctor_parts.vllm(config, answers, plugin_installed(), compiler, head_size),
        *doctor_parts.deepspeed(config, answers["deepspeed"]),
        *doctor_parts.without_effect(config),
        *_placement(config, answers, cluster),
    ]


def _imports(answers: Mapping[str, Any]) -> bool:
    """Whether the packages of every run can be imported."""
    return not any(
        "error" in answers[name] for name in ("torch", "transformers", "ray") if "unused" not in answers[name]
    )


def _placement(config: RunConfig, answers: Mapping[str, Any], cluster: Probe) -> list[Finding]:
    if not _imports(answers) or config.runtime == "local":
        return []
    from asyncrlhf.cluster.nodes import Node

    address = config.ray.cluster
    if not address:
        return doctor_parts.placement(config, [], gpus=len(answers["torch"]["gpus"]))
    answer = cluster(address)
    found = doctor_parts.ray_cluster(address, answer)
    if found.level == "fails":
        return [found]
    return [found, *doctor_parts.placement(config, [Node(*node) for node in answer["nodes"]], gpus=0)]


def machine() -> list[Finding]:
    """Every finding that needs no import of a package."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    alone = "learner and generator share one core, so nothing overlaps."
    python, tested = ".".join(map(str, sys.version_info[:3])), sys.version_info[:2] == (3, 11)
    other = "the locked requirements are made and tested with Python 3.11."
    compiler = next((name for name in ("g++", "clang++") if shutil.which(name)), None)
    needs = "torch.compile needs a compiler on the CPU: learner.compile=true and generator.engine=vllm would fail."
    return [
        judge("Python", python, "note", not tested, other),
        judge("CPU cores", str(cores), "note", cores == 1, alone),
        memory(available_memory()),
        disk(Path.cwd()),
        shared_memory(Path("/dev/shm")),
        judge("C++ compiler", compiler or "none", "note", compiler is None, needs),
        tiny_model(Path(__file__).resolve().parents[1] / "assets" / "tiny-arithmetic"),
        wandb_login(os.environ),
    ]


def available_memory() -> int:
    """Bytes that new processes may use: the free memory, or what is left of the container's limit if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no such container, or no limit ("max")
        return available
    return min(available, limit - used)


def memory(available: int) -> Finding:
    sentence = f"the default run needs about {MEMORY_NEEDED / GIB:.0f} GiB."
    return judge("memory", f"{available / GIB:.1f} GiB available", "fails", available < MEMORY_NEEDED, sentence)


def disk(folder: Path) -> Finding:
    free, sentence = shutil.disk_usage(folder).free, ""
    if not os.access(folder, os.W_OK):
        sentence = f"{folder} is not writable; change to another folder or give run_dir=FOLDER."
    if free < DISK_NEEDED:
        sentence = f"{folder} has less than {DISK_NEEDED // GIB} GiB free for the run's records."
    return judge("disk", f"{free / GIB:.0f} GiB free", "fails", sentence, sentence)


def shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        sentence = "there is no /dev/shm; Ray keeps its objects in files, which is slower."
        return Finding("shared memory", "-", "note", sentence)
    free = shutil.disk_usage(folder).free
    sentence = "Ray will keep objects on disk, which is slower; in Docker, start with --shm-size=2g."
    return judge("shared memory", f"{free / GIB:.1f} GiB free", "note", free < SHARED_MEMORY_WANTED, sentence)


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
    sentence = "runs are recorded offline; `wandb login`, then `wandb sync`, sends them."
    return judge("W&B login", "by ~/.netrc" if known else "none", "good", not known, sentence)
