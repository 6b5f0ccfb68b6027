"""Which part sits on which device: a pure function from the parts to bundles of resources and seats on them.

    separate    [learner-0][learner-1] | [generator-0][generator-1]                 rewards beside the generators
    interleave  [learner-0][learner-1] | [generator-0][generator-1] | [reward-0][reference-0][critic-0]
    flatten     [learner-0 + generator-0][learner-1 + generator-1]                  they take turns

A bracket is a device: one GPU (a replica that spans several has as many), or on a CPU the threads of a part. Brackets
of one side of a bar are kept off the nodes of the other sides where there are nodes enough. What holds for reward
workers holds for those of the reference and of the critic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from asyncrlhf.actors.annotator import AnnotatorSpec, CriticSpec, ReferenceSpec, RewardSpec
from asyncrlhf.actors.learner import LearnerSpec
from asyncrlhf.actors.worker import GeneratorSpec
from asyncrlhf.errors import ConfigError

Side = Literal["learner", "generators", "rewards"]
Strategy = Literal["PACK", "STRICT_PACK"]
EPSILON = 1e-6
SHARES = 10_000  # Ray counts a device in ten-thousandths


@dataclass(frozen=True)
class Part:
    """What one actor asks for. ``workers``: engine processes of a replica, each with a GPU of its own."""

    name: str
    kind: str  # learner, generator, reward, reference or critic
    cpus: float
    gpus: float
    workers: int = 1
    stages: int = 1  # pipeline stages: they may lie on several nodes

    def __post_init__(self) -> None:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ConfigError(f"{self.name} asks for {self.gpus:g} GPUs; allowed: a whole number, or less than 1.")


@dataclass(frozen=True)
class DeviceGroup:
    """Bundles that Ray reserves together (a placement group); STRICT_PACK keeps them on one node."""

    name: str
    side: Side
    strategy: Strategy
    bundles: tuple[Mapping[str, float], ...]


@dataclass(frozen=True)
class Seat:
    """Where one part sits and what it asks of Ray there. Without ``group`` Ray chooses.

    ``bundles``: the first holds the part. Where there are more, each holds one of its engine's workers, which asks for
    ``worker_gpus``.
    """

    group: str = ""
    bundles: tuple[int, ...] = ()
    cpus: float = 0.0
    gpus: float = 0.0
    worker_gpus: float = 0.0

    def demand(self) -> dict[str, float]:
        """What the part itself asks of Ray."""
        return _bundle(self.cpus, self.gpus)


@dataclass(frozen=True)
class Plan:
    """``sharing``: the replicas that sleep while the learner trains."""

    placement: str
    groups: tuple[DeviceGroup, ...] = ()
    seats: Mapping[str, Seat] = field(default_factory=dict)
    sharing: frozenset[str] = frozenset()

    def bundles(self) -> list[Mapping[str, float]]:
        """All that Ray must hold at once: the groups' bundles, and what the parts outside of them ask for."""
        own = [b for group in self.groups for b in group.bundles]
        return own + [seat.demand() for seat in self.seats.values() if not seat.group and seat.demand()]

    def total(self, kind: str) -> float:
        return sum(bundle.get(kind, 0.0) for bundle in self.bundles())

    def side_of(self, part: str) -> str:
        group = self.seats[part].group
        return next((g.side for g in self.groups if g.name == group), "anywhere")

    def describe(self) -> list[str]:
        """One line a device group: what it reserves and who sits there."""
        lines = []
        for group in self.groups:
            members = [name for name, seat in self.seats.items() if seat.group == group.name]
            resources = "".join(f"[{words(bundle)}]" for bundle in group.bundles)
            lines.append(f"{resources} {', '.join(members)}")
        free = [name for name, seat in self.seats.items() if not seat.group]
        return lines + ([f"wherever Ray likes: {', '.join(free)}"] if free else [])


@dataclass(frozen=True)
class Specs:
    """Everything that the parts of a run are started with. ``reference`` and ``critic``: None where no service is
    asked."""

    generators: Sequence[GeneratorSpec]
    learner: LearnerSpec
    reward: RewardSpec
    reference: ReferenceSpec | None = None
    critic: CriticSpec | None = None

    @property
    def annotators(self) -> list[AnnotatorSpec]:
        return [spec for spec in (self.reward, self.reference, self.critic) if spec is not None]


def parts_of(specs: Specs) -> list[Part]:
    """Every actor of a run, learner ranks first."""
    own = specs.learner.learner
    ranks = [Part(f"learner-{i}", "learner", own.threads, own.gpus) for i in range(own.ranks)]
    workers = [
        Part(f"{spec.kind}-{i}", spec.kind, spec.settings.threads, spec.settings.gpus)
        for spec in specs.annotators
        for i in range(spec.settings.workers)
    ]
    return [*ranks, *map(generator_part, specs.generators), *workers]


def generator_part(spec: GeneratorSpec) -> Part:
    own = spec.generator
    spans = own.engine == "vllm" and own.gpus > 0
    return Part(
        spec.name,
        "generator",
        own.threads,
        own.gpus,
        workers=own.vllm.workers if spans else 1,
        stages=own.vllm.pipeline_parallel_size if spans else 1,
    )


def make_plan(placement: str, parts: Sequence[Part], nodes: int) -> Plan:
    """``nodes``: how many Ray has. ``auto`` becomes ``separate`` on several. Raises ConfigError with one sentence for
    what no cluster could hold."""
    if placement == "auto":
        # Fractions of a GPU are asked for in order to share it, which Ray does as well as a plan.
        apart = nodes > 1 and not any(0 < p.gpus < 1 for p in parts)
        placement = "separate" if apart else "auto"
    if placement == "auto":
        return Plan("auto", seats={p.name: _loose(p) for p in parts})
    if placement == "flatten":
        return _flatten(parts)
    return _apart(placement, parts)


def add_replica(plan: Plan, part: Part) -> Plan:
    """The plan with devices of its own for a replica that comes later; no other part shares them."""
    if plan.placement == "auto":
        return replace(plan, seats={**plan.seats, part.name: _loose(part)})
    (block,) = _blocks([part], spread=False)
    return _with_blocks(plan, [block], "generators")


def _loose(part: Part) -> Seat:
    return Seat(cpus=part.cpus, gpus=part.gpus)


@dataclass
class _Block:
    """A device group in the making."""

    name: str
    strategy: Strategy
    bundles: list[dict[str, float]]
    seats: dict[str, Seat]
    room: float = 0.0  # of the one GPU that fractional parts share


def _blocks(parts: Iterable[Part], spread: bool) -> list[_Block]:
    """Devices for the parts in their order. ``spread``: a bundle for each GPU, so that others can join it there."""
    blocks: list[_Block] = []
    for part in parts:
        if 0 < part.gpus < 1:
            block = next((b for b in blocks if b.room >= part.gpus - EPSILON), None)
            if block is None:
                block = _Block(part.name, "PACK", [_bundle(0.0, 1.0)], {}, room=1.0)
                blocks.append(block)
            block.room -= part.gpus
            block.bundles[0] = add_amounts([block.bundles[0], _bundle(part.cpus, 0.0)])
            block.seats[part.name] = Seat(block.name, (0,), part.cpus, part.gpus)
        elif part.workers > 1 and (spread or part.stages > 1):
            bundles = [_bundle(part.cpus, 1.0), *([_bundle(0.0, 1.0)] * (part.workers - 1))]
            places = tuple(range(part.workers))
            seat = Seat(part.name, places, part.cpus, worker_gpus=1.0)
            strategy: Strategy = "STRICT_PACK" if part.stages == 1 else "PACK"
            blocks.append(_Block(part.name, strategy, bundles, {part.name: seat}))
        else:
            cpus = part.cpus if part.gpus else max(1.0, part.cpus)  # a bundle holds something
            seat = Seat(part.name, (0,), part.cpus, part.gpus)
            blocks.append(_Block(part.name, "PACK", [_bundle(cpus, part.gpus)], {part.name: seat}))
    return blocks


def _with_blocks(plan: Plan, blocks: Iterable[_Block], side: Side) -> Plan:
    groups, seats = list(plan.groups), dict(plan.seats)
    for block in blocks:
        groups.append(DeviceGroup(block.name, side, block.strategy, tuple(block.bundles)))
        seats.update(block.seats)
    return replace(plan, groups=tuple(groups), seats=seats)


def _with_ranks(plan: Plan, ranks: Sequence[Part]) -> Plan:
    """One group for all ranks, so that Ray packs them onto as few nodes as it can."""
    if not ranks:
        return plan
    group = _Block("learner", "PACK", [], {})
    for block in _blocks(ranks, spread=False):
        for name, seat in block.seats.items():
            group.seats[name] = replace(seat, group="learner", bundles=(len(group.bundles),))
        group.bundles += block.bundles
    return _with_blocks(plan, [group], "learner")


def _apart(placement: str, parts: Sequence[Part]) -> Plan:
    """Separate or interleave. A reward worker that asks for nothing needs no device, unless it is to have its own."""
    rewards = [p for p in parts if p.kind in ("reward", "reference", "critic")]
    if placement == "interleave":
        rewards = [p if p.gpus else replace(p, cpus=max(1.0, p.cpus)) for p in rewards]
    seated = [p for p in rewards if p.cpus or p.gpus]
    generators = [p for p in parts if p.kind == "generator"]
    plan = _with_ranks(Plan(placement), [p for p in parts if p.kind == "learner"])
    if placement == "interleave":
        plan = _with_blocks(plan, _blocks(generators, spread=False), "generators")
        plan = _with_blocks(plan, _blocks(seated, spread=False), "rewards")
    else:
        plan = _with_blocks(plan, _blocks([*generators, *seated], spread=False), "generators")
    return _with_rest(plan, rewards)


def _flatten(parts: Sequence[Part]) -> Plan:
    """The ranks are laid over the generators' devices, one after another; what is left over gets devices of its own."""
    wide = next((p for p in parts if p.gpus > 1 and p.workers == 1), None)
    if wide is not None:
        raise ConfigError(
            f"cluster.placement=flatten shares single GPUs, but {wide.name} asks for {wide.gpus:g}; allowed: at most 1."
        )
    ranks = [p for p in parts if p.kind == "learner"]
    generators = {p.name for p in parts if p.kind == "generator"}
    blocks = _blocks((p for p in parts if p.kind != "learner" and _asks(p)), spread=True)
    on_gpu = ranks[0].gpus > 0
    devices = [
        (block, place)
        for block in blocks
        for place, bundle in enumerate(block.bundles)
        if ("GPU" in bundle) == on_gpu and generators & block.seats.keys()
    ]
    if not devices:
        raise ConfigError(
            f"cluster.placement=flatten shares devices, but learner.gpus={ranks[0].gpus:g} and no generator is on "
            f"{'a GPU' if on_gpu else 'the CPU'}; allowed: both on GPUs, or both on the CPU."
        )
    each = math.floor(1 / ranks[0].gpus + EPSILON) if on_gpu else 1
    sharing: set[str] = set()
    for number, (block, place) in enumerate(devices):
        sharing |= _share(block, place, ranks[number * each : (number + 1) * each])
    plan = _with_blocks(Plan("flatten", sharing=frozenset(sharing & generators)), blocks, "generators")
    return _with_rest(_with_ranks(plan, ranks[len(devices) * each :]), parts)


def _share(block: _Block, place: int, ranks: Sequence[Part]) -> set[str]:
    """Seat ranks in a bundle that others hold, and name the others. All ask for equal parts, so that Ray's sums hold.

    A CPU's bundle is as large as its largest tenant, for they take turns; beside a GPU all keep their threads.
    """
    if not ranks:
        return set()
    others = {name for name, seat in block.seats.items() if place in seat.bundles}
    bundle = block.bundles[place]
    gpus = bundle.get("GPU", 0.0)
    threads = [bundle.get("CPU", 0.0), *(rank.cpus for rank in ranks)]
    block.bundles[place] = {**bundle, **_bundle(sum(threads) if gpus else max(threads), gpus)}
    share = math.floor(SHARES * gpus / (len(others) + len(ranks))) / SHARES
    for name in others:
        seat = block.seats[name]
        # One figure holds for all workers of a replica: that of its most crowded device.
        wide = len(seat.bundles) > 1
        worker_gpus = min(seat.worker_gpus, share) if wide else 0.0
        block.seats[name] = replace(seat, cpus=0.0, gpus=0.0 if wide else share, worker_gpus=worker_gpus)
    block.seats.update({rank.name: Seat(block.name, (place,), gpus=share) for rank in ranks})
    return others


def _asks(part: Part) -> bool:
    return part.kind != "reward" or part.cpus > 0 or part.gpus > 0


def _with_rest(plan: Plan, parts: Iterable[Part]) -> Plan:
    """Parts without a device sit wherever Ray likes."""
    return replace(plan, seats={**plan.seats, **{p.name: Seat() for p in parts if p.name not in plan.seats}})


def add_amounts(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of bundles, kind by kind."""
    total: dict[str, float] = {}
    for bundle in bundles:
        for kind, amount in bundle.items():
            total[kind] = total.get(kind, 0.0) + amount
    return total


def words(bundle: Mapping[str, float]) -> str:
    """A bundle as messages name it: ``1 GPU + 4 CPUs``."""
    plural = {kind: f"{kind}s" for kind in ("CPU", "GPU")}
    amounts = [
        f"{amount:g} {plural.get(kind, kind) if amount != 1 else kind}"
        for kind, amount in sorted(bundle.items(), key=lambda item: (item[0] != "GPU", item[0]))
        if amount
    ]
    return " + ".join(amounts) or "nothing"


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {kind: float(amount) for kind, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
