"""Plans of published systems by their call graphs, and common templates on equal devices, simulated."""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrlhf.errors import ConfigError
from asyncrlhf.planner.callgraph import PLACEMENTS, PPO, Graph, Space, placed
from asyncrlhf.planner.costs import System, reshard
from asyncrlhf.planner.schedules import Pair, bound, greedy, one_after_another
from asyncrlhf.planner.search import metropolis
from asyncrlhf.planner.shapes import EXPECT, ModelShape, Workload, cluster_of
from asyncrlhf.simulator.templates import HANDLES, MODELS, TEMPLATES, Scene, Split, Template, TemplateCosts

NOT_RUNNABLE = "A plan of other systems, which move models between the meshes of calls: `train` cannot run it."
FIGURES = ("step_seconds", "rollouts_per_device_hour", "idle", "staleness", "dropped", "learner_gb", "generator_gb")


def _shape(name: str) -> ModelShape:
    if name in MODELS:
        return MODELS[name]
    try:
        return ModelShape.from_config(Path(name))
    except ValueError as error:
        raise ConfigError(f"--model {name} is neither one of {', '.join(MODELS)} nor a folder: {error}") from error


def _beside(graph: Graph) -> list[str]:
    """The bytes of resharding between training and generation, and the gain of fused training of actor and critic, for
    training that is tensor parallel in a node and pipeline parallel between nodes."""
    cluster, shape = graph.cluster, graph.shapes["actor"]
    stages, tensor = cluster.nodes, cluster.per_node
    systems: tuple[System, ...] = ("ds-chat", "ungrouped", "hybridflow")
    moved = {name: float(reshard(name, stages, tensor, 1, 1, max(1, tensor // 2)).received) for name in systems}
    size = 2e-9 * shape.parameters
    words = ", ".join(f"{share * size:.2f} GB ({system})" for system, share in moved.items())
    said = [f"From training p={stages} t={tensor} to generation p=1 t={max(1, tensor // 2)} a device receives {words}."]
    if stages > 1:
        pair = Pair((stages, stages), (4 * stages, 4 * stages), (1.0, 1.0))
        gain, reached = (one_after_another(pair) / seconds for seconds in (bound(pair), greedy(pair)))
        said.append(
            f"Fused training of actor and critic, {stages} stages and {4 * stages} micro-batches each, is at most "
            f"{gain:.2f} times as fast as one after the other; a greedy schedule reaches {reached:.2f}."
        )
    return said


def _scene(options: argparse.Namespace, devices: int) -> Scene:
    lengths = Workload(options.prompt, options.response, options.cv, options.longest)
    batch = options.batch or min(32 * devices, 16384)
    if batch % 8:
        raise ValueError(f"--batch {batch} are no whole groups of 8.")
    return Scene(_shape(options.model), cluster_of(options.device, devices), lengths, batch)


def _row(scene: Scene, template: Template, options: argparse.Namespace) -> dict[str, Any]:
    """One template's figures; missing if it does not fit."""
    empty = dict.fromkeys(FIGURES, float("nan"))
    row: dict[str, Any] = {"devices": scene.cluster.devices, "batch": scene.batch, "template": template.name}
    try:
        split = scene.split(template)
    except ValueError as error:
        return {**row, "generating": 0, "scoring": 0, "training": 0, **empty, "note": str(error)}
    shares = {"generating": split.generating, "scoring": split.reward, "training": split.ranks}
    held = {f"{side}_gb": round(size / 1e9, 1) for side, size in scene.memory(split).items()}
    found = _simulated(scene, template, split, options)
    return {**row, **shares, **{name: {**found, **held}[name] for name in FIGURES}, "note": ""}


def _simulated(scene: Scene, template: Template, split: Split, options: argparse.Namespace) -> dict[str, float]:
    from asyncrlhf.config.compose import load_config
    from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
    from asyncrlhf.simulator.cost_world import Conditions
    from asyncrlhf.simulator.simulate import OVERRIDES, figures, simulate

    workers, batch = min(HANDLES // 2, split.reward), scene.batch // scene.thin
    costs = TemplateCosts(scene, split, template.chunk, workers, scene.thin)
    config = load_config(
        [
            *OVERRIDES,
            *template.overrides,
            f"steps={options.steps + 2 * template.lag}",
            f"batch_size={batch}",
            f"num_generations={scene.group}",
            f"generator.replicas={split.handles}",
            f"generator.slots={max(1, round(scene.slots(split) * split.cohort / scene.thin))}",
            f"generator.max_completion_length={scene.lengths.longest}",
            f"reward.workers={workers}",
            f"fusion.max_batch={math.ceil(batch / workers)}",
            f"seed={options.seed}",
            "logging.progress=none",
            "logging.report=false",
            "stall_timeout_seconds=1000000",
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        summary = simulate(config, costs, scene.lengths, run, Conditions(cohort=split.cohort))
        found = figures(read_metrics(run / METRICS_FILE), config.async_.bound, warm_up=options.steps // 3)
    return _as_row(scene, split, found, summary)


def _as_row(scene: Scene, split: Split, found: Mapping[str, float], summary: Mapping[str, Any]) -> dict[str, float]:
    devices, step = scene.cluster.devices, found["step_seconds"]
    scored = min(1.0, scene.stages(split)[1] / step)
    busy = (
        (1 - found["generator_idle"]) * split.generating
        + (1 - found["learner_idle"]) * split.ranks
        + scored * split.reward
    )
    return {
        "step_seconds": round(step, 3),
        "rollouts_per_device_hour": round(3600 * scene.batch / step / devices, 1),
        "idle": round(max(0.0, 1 - busy / devices), 3),
        "staleness": round(found["staleness"], 2),
        "dropped": round(found["dropped_share"], 4),
    }


def _show(scene: Scene, rows: Sequence[Mapping[str, Any]]) -> None:
    first = rows[0]["step_seconds"]
    table = Table(title=f"{scene.cluster.devices} {scene.cluster.device.name}, {scene.batch} rollouts per step")
    for name in (
        "template",
        "generate / score / train",
        "s a step",
        "speed",
        "idle",
        "staleness",
        "GB, learner / generator",
    ):
        table.add_column(name, justify="left" if name == "template" else "right")
    for row in rows:
        if row["note"]:
            table.add_row(row["template"], "", row["note"])
            continue
        table.add_row(
            row["template"],
            f"{row['generating']} / {row['scoring']} / {row['training']}",
            f"{row['step_seconds']:.2f}",
            f"{first / row['step_seconds']:.2f}",
            f"{row['idle']:.2f}",
            f"{row['staleness']:.2f}",
            f"{row['learner_gb']:.0f} / {row['generator_gb']:.0f}",
        )
    Console().print(table)


def published_plans(options: argparse.Namespace) -> None:
    """Print the seconds per iteration of synchronous PPO with each placement, by the call graph."""
    shape = _shape(options.model)
    try:
        cluster = cluster_of(options.device, options.devices)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    models = {call.model: shape for call in PPO}
    graph = Graph(models, cluster, options.prompt, options.response, options.batch)
    table = Table("placement", "seconds per iteration", "layouts (first device + devices, p x t x d)")
    for placement, delay in [*((name, 0) for name in PLACEMENTS), ("separate", 1), ("any", 1)]:
        chosen = replace(graph, delay=delay)
        allowed = placed(chosen, placement)
        if not all(devices for meshes in allowed for _, devices in meshes):
            continue
        space = Space(chosen, allowed)
        found = metropolis(space, options.steps, options.seed, seconds=60)
        name = f"{placement}, delayed" if delay else placement
        if math.isinf(found.cost):
            table.add_row(name, "fits in no layout", "")
            continue
        layouts = [f"{x.first}+{x.devices}, {x.pipeline}x{x.tensor}x{x.data}" for x in found.state]
        rows = [f"{call.name}: {words}" for call, words in zip(PPO, layouts, strict=True)]
        table.add_row(name, f"{found.cost:.2f}", "\n".join(rows))
    Console().print(table)
    for sentence in _beside(graph):
        print(sentence)
    print(f"{NOT_RUNNABLE} Figures are {EXPECT}.")


def common_templates(options: argparse.Namespace) -> None:
    """Simulate each template on equal devices with the real controller; print and write the results."""
    try:
        counts = [int(word) for word in options.devices.split(",")]
        scenes = [_scene(options, devices) for devices in counts]
    except ValueError as error:
        raise ConfigError(f"--devices {options.devices}: {error}") from error
    rows = []
    for scene in scenes:
        own = [_row(scene, template, options) for template in TEMPLATES]
        _show(scene, own)
        rows += [{"model": options.model, "device": options.device, **row} for row in own]
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    print(f"Staleness is predicted, quality is not. Figures are {EXPECT}.")
