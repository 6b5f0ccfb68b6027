"""The input of ``asyncrlhf plan``: the machine, the model's shape, and the possible layouts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.planner.layout import Layout, counts, keeps
from asyncrlhf.planner.shapes import Cluster, Device, Link, ModelShape, catalogue, nodes_for
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from asyncrlhf.planner.choose import Space
    from asyncrlhf.planner.ranking import Subject

BOUNDS, PUBLISHES = (0, 1, 2, 4, 8, 16), (1, 2, 4)
SLOTS = (32, 64, 128, 256, 512)


def shape_of(config: RunConfig) -> Any:
    from asyncrlhf.models.checkpoint_folder import named

    path = Path(named(config.model.path))
    check(
        path.is_dir(),
        f"plan: model.path={config.model.path} is not a folder here; give one that holds the model's config.json "
        "(its weights are not needed).",
    )
    try:
        return ModelShape.from_config(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def clusters_of(options: argparse.Namespace) -> tuple[Any, ...]:
    """The groups of devices; this machine's cores are one group."""
    if options.gpus is None:
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        here = Device("this machine", 1.0, 1.0, memory, "measured")
        return (Cluster(here, 1, options.cores, Link(0.0, 1.0), Link(0.0, 1.0)),)
    counts, names = options.gpus.split(","), options.device.split(",")
    if len(counts) != len(names) or not all(count.isdigit() and int(count) > 0 for count in counts):
        raise ValueError(
            f"plan: --gpus {options.gpus} --device {options.device} do not describe groups; write one number >= 1 "
            "per name, such as --gpus 8,16 --device H100,L4."
        )
    return tuple(nodes_for(name, int(count), options.per_node) for count, name in zip(counts, names, strict=True))


def node_labels(layout: Layout, subject: Subject) -> list[str]:
    """The override that puts each side on nodes of its own devices, where there are several groups of them."""
    if len(subject.clusters) == 1:
        return []
    on = {"learner": layout.learner_on, **dict.fromkeys(("generator", *subject.kinds), layout.generators_on)}
    known = catalogue()
    names = {kind: subject.clusters[group].device.name for kind, group in on.items()}
    labels = {kind: known[name].get("accelerator_type", name) for kind, name in names.items()}
    words = ", ".join(f"{kind}: {{ray.io/accelerator-type: {label}}}" for kind, label in labels.items())
    return [f"cluster.node_labels={{{words}}}"]


def layout_of(config: RunConfig, here: bool) -> Layout:
    """The layout of the config."""
    own, vllm = config.learner, config.generator.vllm
    stage = str(own.zero_stage) if own.backend == "deepspeed" else ("fsdp2" if own.sharding == "fsdp2" else "0")
    return Layout(
        config.cluster.placement if here or config.cluster.placement != "auto" else "separate",
        config.generator.replicas if config.generator.groups is None else 1,
        *((1, 1) if here else (vllm.tensor_parallel_size, vllm.pipeline_parallel_size)),
        config.generator.slots,
        own.ranks,
        stage,
        own.sequence_parallel_size,
        own.zero_offload != "none",
        own.gradient_checkpointing,
        max_staleness=config.async_.bound,
        publish_every=config.weights.publish_every,
        batch_size=config.batch_size,
        learner_tensor=own.tensor_parallel_size,
        context_parallel=own.context_parallel_size,
        learner_pipeline=own.pipeline_parallel_size,
    )


def space_of(subject: Subject, options: argparse.Namespace, config: RunConfig, kept: set[str | None]) -> Space:
    """The space of layouts; decisions in the user's overrides stay fixed."""
    from asyncrlhf.planner.choose import Space

    base, here = subject.base, subject.measured is not None

    def values(name: str, *of: Any) -> tuple[Any, ...]:
        return (getattr(base, name),) if name in kept else of

    threads = max(config.generator.threads, config.learner.threads, 1) if here else 1
    devices = [
        cluster.devices // threads if here else int(n)
        for cluster, n in zip(subject.clusters, [0] if here else options.gpus.split(","), strict=True)
    ]
    most = max(devices)
    slots = {max(1, round(base.slots * f)) for f in (0.25, 0.5, 1, 2)} if here else SLOTS
    batches = [base.batch_size] if not options.free else [base.batch_size // 2, base.batch_size, 2 * base.batch_size]
    axes = {
        "placement": values("placement", *(("auto", "flatten") if here else ("separate", "flatten"))),
        "max_staleness": values("max_staleness", *BOUNDS),
        "publish_every": values("publish_every", *PUBLISHES),
        "batch_size": batches,
    }
    generators = [
        replace(base, replicas=replicas, tensor=tensor, pipeline=pipeline, slots=size, generators_on=group)
        for group, cluster in enumerate(subject.clusters)
        for tensor in values("tensor", *([1] if here else _tensors(subject, cluster.per_node)))
        for pipeline in values("pipeline", *([1] if here or tensor < cluster.per_node else [1, 2, 4]))
        for replicas in values("replicas", *counts(devices[group] // (tensor * pipeline)))
        for size in values("slots", *sorted(slots))
    ]
    learners = [
        replace(base, ranks=ranks, learner_on=group, **more)
        for group in range(len(devices))
        for ranks in values("ranks", *counts(most))
        if ranks <= devices[group]
        for more in ([{}] if here else _learners(subject, ranks, values, subject.clusters[group].per_node))
    ]
    groups = config.batch_size // config.num_generations
    learners = [layout for layout in learners if layout.shares <= groups]  # each share takes whole groups of a batch
    try:
        return Space(learners, generators, devices, axes, [keeps(said) for said in options.keep])
    except ValueError as error:
        raise ConfigError(f"plan: --keep {error}.") from error


def _tensors(subject: Subject, per_node: int) -> list[int]:
    shape = subject.shape
    return [t for t in (1, 2, 4, 8) if t <= per_node and not shape.heads % t and not shape.kv_heads % t]


def _learners(
    subject: Subject, ranks: int, values: Callable[..., tuple[Any, ...]], per_node: int
) -> list[Mapping[str, Any]]:
    """The possible fields of a learner layout with this number of ranks. Ranks that divide matrices share a node."""
    shape = subject.shape
    return [
        {"sharding": sharding, "sequence_parallel": parallel, "learner_tensor": tensor, "context_parallel": context,
         "learner_pipeline": pipeline, "offload": offload, "checkpointing": checkpointing, "services": services}
        for sharding in values("sharding", *(("0",) if ranks == 1 else ("0", "1", "2", "3", "fsdp2")))
        for parallel in values("sequence_parallel", 1, 2, 4)
        if parallel == 1 or (sharding in "123" and not ranks % parallel and not shape.heads % parallel)
        for tensor in values("learner_tensor", *_tensors(subject, per_node))
        if tensor == 1 or sharding in ("0", "fsdp2")
        for context in values("context_parallel", 1, 2, 4)
        if context == 1 or sharding in ("0", "fsdp2")
        for pipeline in values("learner_pipeline", 1, 2, 4, 8)
        if pipeline == 1 or (sharding == "0" and context == 1 and pipeline <= shape.layers)
        if not ranks % (parallel * tensor * context * pipeline)
        for offload in values("offload", False, True)
        if not offload or sharding in "123"
        for checkpointing in values("checkpointing", False, True)
        for services in ((0, 1, 2) if subject.kinds else (0,))
    ]  # fmt: skip
