"""Layouts of a run in terms of its config: the layouts possible on a machine, and the overrides for each."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

MAX_LAYOUTS = 200_000
_KEEP = re.compile(r"(?:\w+=)?(\w+)(<=|>=|=)([\w.]+)")
_COMPARED = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}


@dataclass(frozen=True)
class Layout:
    """The decisions of a plan. On GPUs a replica is a vLLM engine on ``tensor`` x ``pipeline`` devices.

    Args:
        sharding: 0 (each rank holds everything), 1, 2, 3 (DeepSpeed's ZeRO) or fsdp2.
        learner_tensor, context_parallel, learner_pipeline: the learner's, with sharding 0 or fsdp2 (a pipeline: 0).
        services: number of devices for each of the reference and critic services; 0: the learner holds both models.
        max_staleness: 0 is ``async.mode=sync``.
        generators_on: index of the device group that holds the generators; ``learner_on`` likewise.
    """

    placement: str = "separate"
    replicas: int = 1
    tensor: int = 1
    pipeline: int = 1
    slots: int = 128
    ranks: int = 1
    sharding: str = "0"
    sequence_parallel: int = 1
    offload: bool = False
    checkpointing: bool = False
    services: int = 0
    max_staleness: int = 2
    publish_every: int = 1
    batch_size: int = 128
    generators_on: int = 0
    learner_on: int = 0
    learner_tensor: int = 1
    context_parallel: int = 1
    learner_pipeline: int = 1

    @property
    def parts(self) -> int:
        """Ranks that hold different parts of a layer, or other layers."""
        return self.learner_tensor * self.learner_pipeline

    @property
    def shares(self) -> int:
        """Shares of a batch that the learner's ranks take."""
        return self.ranks // (self.parts * self.context_parallel * self.sequence_parallel)

    @property
    def generator_devices(self) -> int:
        return self.replicas * self.tensor * self.pipeline

    @property
    def devices(self) -> int:
        """Devices of generators and learner together; with placement flatten both use the same ones."""
        sides = (self.generator_devices, self.ranks)
        return max(sides) if self.placement == "flatten" else sum(sides)

    @property
    def in_flight(self) -> int:
        """Sequences generated at once: limited by the slots and by the staleness bound."""
        return min(self.replicas * self.slots, (self.max_staleness + 1) * self.batch_size)

    def changes(self, other: Layout) -> dict[str, Any]:
        """The fields in which this layout differs from ``other``, with this layout's values."""
        return {name: value for name, value in asdict(self).items() if value != getattr(other, name)}


def overrides(layout: Layout, *, gpus: bool, kinds: Sequence[str] = ()) -> list[str]:
    """The overrides that give a run this layout. ``kinds``: the models that the algorithm needs beside the policy,
    among ``reference`` and ``critic``."""
    said: dict[str, Any] = {
        "cluster.placement": layout.placement,
        "generator.replicas": layout.replicas,
        "generator.slots": layout.slots,
        "learner.ranks": layout.ranks,
        "weights.publish_every": layout.publish_every,
        "batch_size": layout.batch_size,
        "async.mode": "async" if layout.max_staleness else "sync",
        "async.max_staleness": layout.max_staleness or None,
        "async.lag": None,
    }
    if gpus:
        deepspeed = layout.sharding in ("1", "2", "3")
        said |= {
            "generator.engine": "vllm",
            "generator.gpus": layout.tensor * layout.pipeline,
            "generator.vllm.tensor_parallel_size": layout.tensor,
            "generator.vllm.pipeline_parallel_size": layout.pipeline,
            "learner.gpus": 1,
            "learner.backend": "deepspeed" if deepspeed else "torch",
            "learner.zero_stage": int(layout.sharding) if deepspeed else 0,
            "learner.sharding": "fsdp2" if layout.sharding == "fsdp2" else "none",
            "learner.sequence_parallel_size": layout.sequence_parallel,
            "learner.tensor_parallel_size": layout.learner_tensor,
            "learner.context_parallel_size": layout.context_parallel,
            "learner.pipeline_parallel_size": layout.learner_pipeline,
            "learner.zero_offload": "cpu" if layout.offload else "none",
            "learner.gradient_checkpointing": layout.checkpointing,
            "learner.mixed_precision": "bfloat16",
        }
        for kind in kinds:
            served = layout.services > 0
            said |= {f"{kind}.workers": layout.services, f"{kind}.gpus": int(served)}
    return [f"{key}={_word(value)}" for key, value in said.items()]


def _word(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def keeps(said: str) -> Any:
    """The condition on a layout that ``[WHY=]NAME<=VALUE`` (or ``>=``, ``=``) describes; raises ValueError."""
    found = _KEEP.fullmatch(said)
    kinds: dict[str, Any] = {declared.name: declared.default for declared in fields(Layout)}
    if found is None or found[1] not in kinds:
        raise ValueError(f"{said} is not NAME<=VALUE, NAME>=VALUE or NAME=VALUE with NAME one of {', '.join(kinds)}")
    name, compare, word = found.groups()
    kind = type(kinds[name])
    try:
        value = {"true": True, "false": False}[word] if kind is bool else kind(word)
    except (KeyError, ValueError):
        raise ValueError(f"{said}: {word} is not of type {kind.__name__}") from None
    if kind is not int and compare != "=":
        raise ValueError(f"{said}: {name} cannot be compared; write {name}=VALUE")
    return lambda layout: bool(_COMPARED[compare](getattr(layout, name), value))


def counts(most: int) -> list[int]:
    """Counts to try from 1 to ``most``: all up to 16, then powers of two, three times these, and ``most``."""
    more = {k * 2**i for k in (1, 3) for i in range(24)}
    return sorted(n for n in {*range(1, 17), *more, most} if 1 <= n <= most)


def enumerate_layouts(
    learners: Sequence[Layout],
    generators: Sequence[Layout],
    devices: Sequence[int],
    axes: Mapping[str, Sequence[Any]],
    kinds: int = 0,
) -> Iterator[Layout]:
    """Every combination of a layout in ``learners`` (fields of ranks), one in ``generators`` (fields of replicas) and
    a value of each of ``axes`` that fits the number of ``devices`` per group. ``kinds``: number of services."""
    side = ("replicas", "tensor", "pipeline", "slots", "generators_on")
    for learner, generator in product(learners, generators):
        both = asdict(learner) | {name: getattr(generator, name) for name in side}
        for values in product(*axes.values()):
            layout = Layout(**(both | dict(zip(axes, values, strict=True))))
            if _suffices(layout, devices, kinds) and layout.publish_every <= layout.max_staleness + 1:
                yield layout


def _suffices(layout: Layout, devices: Sequence[int], kinds: int) -> bool:
    """Whether the devices suffice. With placement flatten ranks and generators use exactly the same devices, so that
    no device idles while another works."""
    asked = [0] * len(devices)
    asked[layout.generators_on] += layout.generator_devices + kinds * layout.services
    if layout.placement == "flatten":
        if layout.generators_on != layout.learner_on or layout.ranks != layout.generator_devices:
            return False
    else:
        asked[layout.learner_on] += layout.ranks
    return all(want <= have for want, have in zip(asked, devices, strict=True))
