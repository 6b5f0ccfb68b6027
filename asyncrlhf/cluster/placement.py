"""Which part sits on which device: a pure function from the parts to bundles of resources and seats on them.

    separate    [learner-0][learner-1] | [generator-0][generator-1]                 rewards beside the generators
    interleave  [learner-0][learner-1] | [generator-0][generator-1] | [reward-0][reference-0][critic-0]
    flatten     [learner-0 + generator-0][learner-1 + generator-1]                  they take turns
    one_gpu     [learner-0 + generator-0 + generator-1]                             all at the same time

A bracket is a device: one GPU (a replica that spans several has as many), or on a CPU the threads of a part. Brackets
of one side of a bar are kept off the nodes of the other sides where there are nodes enough. What holds for reward
workers holds for those of the reference and of the critic.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from asyncrlhf.actors.annotator import AnnotatorSpec, RewardSpec
from asyncrlhf.actors.episodes import EpisodeSpec
from asyncrlhf.actors.learner import LearnerSpec, LearnerWorker
from asyncrlhf.actors.model_annotators import CriticSpec, ReferenceSpec
from asyncrlhf.actors.worker import GeneratorSpec
from asyncrlhf.cluster.handles import LONG_SECONDS, LearnerHandle
from asyncrlhf.config.environment_config import ClusterConfig
from asyncrlhf.errors import ConfigError

Side = Literal["learner", "generators", "rewards"]
Strategy = Literal["PACK", "STRICT_PACK"]
EPSILON = 1e-6
SHARES = 10_000  # Ray counts a device in ten-thousandths


@dataclass(frozen=True)
class Part:
    """The resources that one actor requests. ``workers``: engine processes of a replica, each with its own GPU."""

    name: str
    kind: str  # learner, generator, reward, reference, critic or episode
    cpus: float
    gpus: float
    workers: int = 1
    stages: int = 1  # pipeline stages: they may lie on several nodes
    labels: Mapping[str, str] = field(default_factory=dict)  # that its node must have

    def __post_init__(self) -> None:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ConfigError(f"{self.name} asks for {self.gpus:g} GPUs; allowed: a whole number, or less than 1.")


@dataclass(frozen=True)
class Seat:
    """Where one part sits and what it requests from Ray there. Without ``group`` Ray chooses the place.

    ``bundles``: the first holds the part. If there are more, each holds one of its engine's workers, which requests
    ``worker_gpus``.
    """

    group: str = ""
    bundles: tuple[int, ...] = ()
    cpus: float = 0.0
    gpus: float = 0.0
    worker_gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)  # of its node, where Ray chooses the place

    def demand(self) -> dict[str, float]:
        """The resources that the part itself requests from Ray."""
        return _bundle(self.cpus, self.gpus)


@dataclass
class DeviceGroup:
    """Bundles that Ray reserves together (a placement group), and the names of the parts on them; STRICT_PACK keeps
    them on one node. ``room``: what is left of the one GPU that fractional parts share."""

    name: str
    strategy: Strategy
    bundles: list[dict[str, float]]
    seats: dict[str, Seat]
    side: Side = "generators"
    room: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)  # that its nodes must have


@dataclass(frozen=True)
class Plan:
    """``loose``: parts that Ray may place anywhere. ``sharing``: the replicas that sleep while the learner trains."""

    placement: str
    groups: tuple[DeviceGroup, ...] = ()
    loose: Mapping[str, Seat] = field(default_factory=dict)
    sharing: frozenset[str] = frozenset()

    @property
    def seats(self) -> dict[str, Seat]:
        """The seats of all parts, by name."""
        return {name: seat for group in self.groups for name, seat in group.seats.items()} | {**self.loose}

    def bundles(self) -> list[Mapping[str, float]]:
        """All resources that Ray must hold at once: the groups' bundles, and the requests of other parts."""
        own: list[Mapping[str, float]] = [bundle for group in self.groups for bundle in group.bundles]
        return own + [seat.demand() for seat in self.loose.values() if seat.demand()]

    def total(self, kind: str) -> float:
        return sum(bundle.get(kind, 0.0) for bundle in self.bundles())

    @property
    def crowd(self) -> int:
        """Learner ranks on the device that has the most of them."""
        learners = [seat for name, seat in self.seats.items() if name.startswith("learner-")]
        places = Counter((seat.group, bundle) for seat in learners for bundle in seat.bundles)
        return max(places.values(), default=1)

    def describe(self) -> list[str]:
        """One line per device group: its resources and its parts."""
        lines = [
            f"{''.join(f'[{words(bundle)}]' for bundle in group.bundles)} {', '.join(group.seats)}"
            for group in self.groups
        ]
        return lines + ([f"wherever Ray likes: {', '.join(self.loose)}"] if self.loose else [])


@dataclass(frozen=True)
class Specs:
    """The specs of all parts of a run. ``reference`` and ``critic``: None without such a service; ``episodes``: None if
    a rollout is one answer."""

    generators: Sequence[GeneratorSpec]
    learner: LearnerSpec
    reward: RewardSpec
    reference: ReferenceSpec | None = None
    critic: CriticSpec | None = None
    episodes: EpisodeSpec | None = None

    @property
    def annotators(self) -> list[AnnotatorSpec]:
        return [spec for spec in (self.reward, self.reference, self.critic) if spec is not None]


async def first_turn(learner: LearnerHandle, specs: Specs, sharing: Collection[str], crowd: int = 1) -> Specs:
    """The start on shared devices takes turns: the ``learner``, which has loaded, falls asleep, then engines measure
    what it leaves them. Returns ``specs`` in which the generators ``sharing`` know how many bytes of their device its
    ranks keep, ``crowd`` on one device."""
    beside = max(await learner.every(LONG_SECONDS, LearnerWorker.sleep)) * crowd
    generators = [replace(s, beside_bytes=beside) if s.name in sharing else s for s in specs.generators]
    return replace(specs, generators=generators)


def parts_of(specs: Specs, cluster: ClusterConfig) -> list[Part]:
    """Every actor of a run, learner ranks first."""
    own = specs.learner.learner
    ranks = [Part(f"learner-{i}", "learner", own.threads, own.gpus) for i in range(own.ranks)]
    workers = [
        Part(f"{spec.kind}-{i}", spec.kind, spec.settings.threads, spec.settings.gpus)
        for spec in specs.annotators
        for i in range(spec.settings.workers)
    ]
    playing = specs.episodes
    if playing is not None:
        workers += [Part(f"{playing.kind}-{i}", playing.kind, 0.0, 0.0) for i in range(playing.settings.workers)]
    parts = [*ranks, *workers]
    labelled = [replace(part, labels=cluster.labels_for(part.kind)) for part in parts]
    generators = [generator_part(spec, cluster) for spec in specs.generators]
    return [*labelled[: own.ranks], *generators, *labelled[own.ranks :]]


def generator_part(spec: GeneratorSpec, cluster: ClusterConfig) -> Part:
    own = spec.generator
    spans = own.engine == "vllm" and own.gpus > 0
    return Part(
        spec.name,
        "generator",
        own.threads,
        own.gpus,
        workers=own.vllm.workers if spans else 1,
        stages=own.vllm.pipeline_parallel_size if spans else 1,
        labels=cluster.labels_for("generator"),
    )


def make_plan(placement: str, parts: Sequence[Part], nodes: int) -> Plan:
    """The plan for a Ray with ``nodes`` nodes; ``auto`` becomes ``separate`` on several. Raises ConfigError, with one
    sentence, for a plan that no cluster could hold."""
    if placement == "auto":
        # Fractions of a GPU are requested in order to share it, which Ray does as well as a plan.
        apart = nodes > 1 and not any(0 < p.gpus < 1 for p in parts)
        placement = "separate" if apart else "auto"
    if placement == "auto":
        return Plan("auto", loose={p.name: _loose(p) for p in parts})
    if placement == "flatten":
        return _flatten(parts)
    return _one_gpu(parts) if placement == "one_gpu" else _apart(placement, parts)


def add_replica(plan: Plan, part: Part) -> Plan:
    """The plan with its own devices for a replica that joins later."""
    if plan.placement == "auto":
        return replace(plan, loose={**plan.loose, part.name: _loose(part)})
    return replace(plan, groups=(*plan.groups, *_groups([part])))


def _loose(part: Part) -> Seat:
    return Seat(cpus=part.cpus, gpus=part.gpus, labels=part.labels)


def _groups(parts: Iterable[Part], side: Side = "generators", spread: bool = False) -> list[DeviceGroup]:
    """Devices for the parts in their order. ``spread``: one bundle per GPU, so that other parts can join it there."""
    groups: list[DeviceGroup] = []
    for part in parts:
        if 0 < part.gpus < 1:
            fitting = (g for g in groups if g.room >= part.gpus - EPSILON and g.labels == part.labels)
            group = next(fitting, None)
            if group is None:
                group = DeviceGroup(part.name, "PACK", [_bundle(0.0, 1.0)], {}, side, 1.0, part.labels)
                groups.append(group)
            group.room -= part.gpus
            group.bundles[0] = add_amounts([group.bundles[0], _bundle(part.cpus, 0.0)])
            group.seats[part.name] = Seat(group.name, (0,), part.cpus, part.gpus)
        elif part.workers > 1 and (spread or part.stages > 1):
            bundles = [_bundle(part.cpus, 1.0), *([_bundle(0.0, 1.0)] * (part.workers - 1))]
            seat = Seat(part.name, tuple(range(part.workers)), part.cpus, worker_gpus=1.0)
            strategy: Strategy = "STRICT_PACK" if part.stages == 1 else "PACK"
            groups.append(DeviceGroup(part.name, strategy, bundles, {part.name: seat}, side, 0.0, part.labels))
        else:
            cpus = part.cpus if part.gpus else max(1.0, part.cpus)  # a bundle holds something
            seat = Seat(part.name, (0,), part.cpus, part.gpus)
            bundles = [_bundle(cpus, part.gpus)]
            groups.append(DeviceGroup(part.name, "PACK", bundles, {part.name: seat}, side, 0.0, part.labels))
    return groups


def _of_ranks(ranks: Sequence[Part]) -> list[DeviceGroup]:
    """One group for all ranks, so that Ray packs them onto as few nodes as possible."""
    whole = DeviceGroup("learner", "PACK", [], {}, "learner", labels=ranks[0].labels if ranks else {})
    for group in _groups(ranks):
        for name, seat in group.seats.items():
            whole.seats[name] = replace(seat, group="learner", bundles=(len(whole.bundles),))
        whole.bundles += group.bundles
    return [whole] if ranks else []


def _apart(placement: str, parts: Sequence[Part]) -> Plan:
    """Separate or interleave. A reward worker without resource requests gets a device only under interleave."""
    rewards = [p for p in parts if p.kind in ("reward", "reference", "critic", "episode")]
    if placement == "interleave":
        rewards = [p if p.gpus or p.kind == "episode" else replace(p, cpus=max(1.0, p.cpus)) for p in rewards]
    seated = [p for p in rewards if p.cpus or p.gpus]
    generators = [p for p in parts if p.kind == "generator"]
    groups = _of_ranks([p for p in parts if p.kind == "learner"])
    if placement == "interleave":
        groups += [*_groups(generators), *_groups(seated, "rewards")]
    else:
        groups += _groups([*generators, *seated])
    return _seating(placement, groups, rewards)


def _one_gpu(parts: Sequence[Part]) -> Plan:
    """One GPU for the learner and all generators, by their shares of it; the other parts sit wherever Ray likes."""
    tenants = [part for part in parts if part.kind in ("learner", "generator")]
    labels: Mapping[str, str] = {}
    for part in tenants:
        labels = _both(labels, part.labels, "one_gpu")
    groups = _groups(replace(part, labels=labels) for part in tenants)
    if len(groups) > 1 or any(part.gpus <= 0 for part in tenants):
        shares = ", ".join(f"{part.name} {part.gpus:g}" for part in tenants)
        raise ConfigError(
            f"cluster.placement=one_gpu deals out one GPU, and the shares of it are {shares}; allowed: learner.gpus "
            "and generator.gpus over 0, at most 1 in the sum over all replicas."
        )
    others = {part.name: _loose(part) for part in parts if part not in tenants}
    return Plan("one_gpu", tuple(groups), others)


def _flatten(parts: Sequence[Part]) -> Plan:
    """Put the ranks on the generators' devices, one after another; remaining ranks get devices of their own."""
    wide = next((p for p in parts if p.gpus > 1 and p.workers == 1), None)
    if wide is not None:
        raise ConfigError(
            f"cluster.placement=flatten shares single GPUs, but {wide.name} asks for {wide.gpus:g}; allowed: at most 1."
        )
    ranks = [p for p in parts if p.kind == "learner"]
    generators = {p.name for p in parts if p.kind == "generator"}
    groups = _groups(
        (p for p in parts if p.kind != "learner" and (p.kind not in ("reward", "episode") or p.cpus or p.gpus)),
        spread=True,
    )
    on_gpu = ranks[0].gpus > 0
    devices = [
        (group, place)
        for group in groups
        for place, bundle in enumerate(group.bundles)
        if ("GPU" in bundle) == on_gpu and generators & group.seats.keys()
    ]
    if not devices:
        raise ConfigError(
            f"cluster.placement=flatten shares devices, but learner.gpus={ranks[0].gpus:g} and no generator is on "
            f"{'a GPU' if on_gpu else 'the CPU'}; allowed: both on GPUs, or both on the CPU."
        )
    each = math.floor(1 / ranks[0].gpus + EPSILON) if on_gpu else 1
    sharing: set[str] = set()
    for number, (group, place) in enumerate(devices):
        sharing |= _share(group, place, ranks[number * each : (number + 1) * each])
    groups += _of_ranks(ranks[len(devices) * each :])
    return _seating("flatten", groups, parts, frozenset(sharing & generators))


def _share(group: DeviceGroup, place: int, ranks: Sequence[Part]) -> set[str]:
    """Seat ranks in a bundle of generators, and return the generators' names. All request equal shares, so that Ray's
    sums are valid.

    A CPU's bundle is as large as its largest tenant, for they take turns; beside a GPU all keep their threads.
    """
    if not ranks:
        return set()
    others = {name for name, seat in group.seats.items() if place in seat.bundles}
    group.labels = _both(group.labels, ranks[0].labels, "flatten")
    bundle = group.bundles[place]
    gpus = bundle.get("GPU", 0.0)
    threads = [bundle.get("CPU", 0.0), *(rank.cpus for rank in ranks)]
    group.bundles[place] = {**bundle, **_bundle(sum(threads) if gpus else max(threads), gpus)}
    share = math.floor(SHARES * gpus / (len(others) + len(ranks))) / SHARES
    for name in others:
        seat = group.seats[name]
        # One figure holds for all workers of a replica: that of its most crowded device.
        wide = len(seat.bundles) > 1
        worker_gpus = min(seat.worker_gpus, share) if wide else 0.0
        group.seats[name] = replace(seat, cpus=0.0, gpus=0.0 if wide else share, worker_gpus=worker_gpus)
    group.seats.update({rank.name: Seat(group.name, (place,), gpus=share) for rank in ranks})
    return others


def _both(one: Mapping[str, str], other: Mapping[str, str], placement: str) -> dict[str, str]:
    """The labels of a node that both want."""
    for label in one.keys() & other.keys():
        if one[label] != other[label]:
            raise ConfigError(
                f"cluster.placement={placement} puts learner and generators on the same devices, but "
                f"cluster.node_labels wants {label}={other[label]} for the one and {one[label]} for the others; "
                "allowed: the same value."
            )
    return {**one, **other}


def _seating(
    placement: str, groups: Sequence[DeviceGroup], parts: Iterable[Part], sharing: frozenset[str] = frozenset()
) -> Plan:
    """The plan; ``parts`` without a device sit wherever Ray likes."""
    plan = Plan(placement, tuple(groups), sharing=sharing)
    seats = plan.seats
    return replace(plan, loose={p.name: Seat(labels=p.labels) for p in parts if p.name not in seats})


def add_amounts(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of bundles, per resource."""
    total: dict[str, float] = defaultdict(float)
    for bundle in bundles:
        for kind, amount in bundle.items():
            total[kind] += amount
    return dict(total)


def words(bundle: Mapping[str, float]) -> str:
    """A bundle as text for messages: ``1 GPU + 4 CPUs``."""
    plural = {kind: f"{kind}s" for kind in ("CPU", "GPU")}
    amounts = [
        f"{amount:g} {plural.get(kind, kind) if amount != 1 else kind}"
        for kind, amount in sorted(bundle.items(), key=lambda item: (item[0] != "GPU", item[0]))
        if amount
    ]
    return " + ".join(amounts) or "nothing"


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {kind: float(amount) for kind, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
