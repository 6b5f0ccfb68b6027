"""`asyncrlhf doctor [overrides]`: what this machine offers, and what would fail on it, in plain sentences."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from asyncrlhf.cli import doctor_parts
from asyncrlhf.cli.doctor_machine import Finding, Level, machine
from asyncrlhf.cli.doctor_probes import PROBES, plugin_installed, probe_cluster, probe_import
from asyncrlhf.config.compose import load_config

if TYPE_CHECKING:
    from asyncrlhf.config.run_config import RunConfig

COLOURS: Mapping[Level, str] = {"good": "green", "note": "yellow", "fails": "red"}
Probe = Callable[[str], dict[str, Any]]


def run(arguments: Sequence[str] = ()) -> int:
    """Print the table and the verdict on the run that ``asyncrlhf train`` would make of the same arguments; 0 unless
    it would fail on this machine, then 1. Raises ConfigError for arguments that no machine would take."""
    findings = examine(load_config(list(arguments)))
    console = Console()
    table = Table(title="asyncrlhf doctor", title_justify="left", show_lines=False)
    table.add_column("what")
    table.add_column("found", overflow="fold")
    table.add_column("verdict")
    for finding in findings:
        colour = COLOURS[finding.level]
        table.add_row(finding.what, finding.found.replace("[", r"\["), f"[{colour}]{finding.level}[/{colour}]")
    console.print(table)
    for finding in findings:
        if finding.sentence:
            sentence = finding.sentence.replace("[", r"\[")
            console.print(f"[{COLOURS[finding.level]}]{finding.level}[/] {finding.what}: {sentence}", highlight=False)
    name = f"`asyncrlhf train {' '.join(arguments)}`" if arguments else "The default run (`asyncrlhf train`)"
    failed = [finding.what for finding in findings if finding.level == "fails"]
    if failed:
        console.print(f"{name} would fail here: {', '.join(failed)}.", markup=False)
        return 1
    console.print(f"{name} should work here.", markup=False)
    return 0


def examine(config: RunConfig, probe: Probe = probe_import, cluster: Probe = probe_cluster) -> list[Finding]:
    """Every finding, machine first. ``probe`` imports one package and answers as :func:`probe_import` does; ``cluster``
    joins the Ray at an address."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        answers = dict(zip(PROBES, pool.map(probe, PROBES), strict=True))
    wanted = doctor_parts.needed(config)
    vllm_asked = "vllm" in doctor_parts.engines(config) and _imports(answers)
    head_size = doctor_parts.head_size(config) if vllm_asked else None
    compiler = any(shutil.which(name) for name in ("g++", "clang++"))
    return [
        *machine(),
        *(doctor_parts.package(name, answers[name], wanted) for name in PROBES),
        *doctor_parts.devices(answers["torch"]),
        *doctor_parts.vllm(config, answers, plugin_installed(), compiler, head_size),
        *doctor_parts.deepspeed(config, answers["deepspeed"]),
        *doctor_parts.signs(config),
        *doctor_parts.clip(config),
        *_placement(config, answers, cluster),
    ]


def _imports(answers: Mapping[str, Any]) -> bool:
    """Whether what a run is made of imports here."""
    return not any("error" in answers[name] for name in ("torch", "transformers", "ray"))


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
