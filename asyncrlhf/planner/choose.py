"""Choice of a layout: memory excludes, closed forms rank, simulations on the virtual clock decide among the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from typing import Any

from asyncrlhf.planner.layout import MAX_LAYOUTS, Layout, enumerate_layouts
from asyncrlhf.planner.ranking import Estimate, Subject, bytes_of, costs_of, estimate, rank_refusal, refusal

# Of a simulated run: step_seconds, learner_idle, generator_idle, staleness, dropped_share.
Figures = Mapping[str, float]
SEEDS = (0, 1, 2)
FINALISTS = 6  # candidates simulated with all seeds
VARIANTS = 3  # fastest learner layouts kept per number of ranks
HOPELESS = 1.5  # times the shortest step by the closed forms; slower layouts are not simulated
TIE = 0.01  # share of a step by which seeds differ
LEARNER = (
    "ranks", "sharding", "sequence_parallel", "offload", "checkpointing", "services", "learner_tensor",
    "context_parallel", "learner_pipeline",
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A layout, its estimate, and the mean figures of its simulated runs."""

    layout: Layout
    estimate: Estimate
    figures: Figures
    seeds: int = 1

    @property
    def seconds(self) -> float:
        """Simulated seconds per rollout, the objective."""
        return self.figures["step_seconds"] / self.layout.batch_size


@dataclass(frozen=True)
class Chosen:
    """``refused``: why layouts were excluded, by subject; ``seen``: number of layouts that fit into memory."""

    best: Candidate
    others: Sequence[Candidate]
    refused: Mapping[str, str]
    seen: int


@dataclass(frozen=True)
class Space:
    """The layouts to choose from: learners, generators and further ``axes``; ``devices``: number in each group."""

    learners: Sequence[Layout]
    generators: Sequence[Layout]
    devices: Sequence[int]
    axes: Mapping[str, Sequence[Any]]
    keeps: Sequence[Callable[[Layout], bool]] = ()


def choose(
    space: Space,
    subject: Subject,
    valid: Callable[[Layout], str | None],
    simulate: Callable[[Layout, int], Figures],
    simulated: int = 32,
) -> Chosen:
    """The layout with the fewest seconds per rollout; among ties the least staleness, then the fewest devices. A layout
    larger than the measured one must be faster by the error of each extrapolated cost (``Subject.doubt``).

    Args:
        valid: returns one sentence if the config classes refuse a layout, else None.
        simulate: figures of a run of this layout with this seed.
        simulated: number of layouts simulated with one seed; the best FINALISTS of them get all three seeds.

    Raises ValueError with one sentence if no layout remains.
    """
    refused: dict[str, str] = {}

    def passes(layout: Layout) -> bool:
        if (sentence := valid(layout)) is not None:
            refused.setdefault(sentence, sentence)
        return sentence is None

    learners = _variants(space, subject, passes, refused)
    ranked = _ranked(replace(space, learners=learners), subject, passes, refused)
    if not ranked:
        why = f", for example: {next(iter(refused.values()))}" if refused else ""
        raise ValueError(f"no layout fits these devices{why}" if why else "no layout is left to choose from")
    tried: list[Candidate] = []
    for layout, guess in ranked:
        if len(tried) == simulated:
            break
        if passes(layout):
            tried.append(Candidate(layout, guess, simulate(layout, SEEDS[0])))

    def doubted(candidate: Candidate) -> float:
        return candidate.seconds * subject.doubt(candidate.layout)

    tried.sort(key=doubted)
    finalists = [_averaged(candidate, simulate) for candidate in tried[:FINALISTS]]
    least = min(map(doubted, finalists))
    best = min(finalists, key=lambda c: (doubted(c) > (1 + TIE) * least, *_modest(c)))
    others = sorted((c for c in (*finalists, *tried[FINALISTS:]) if c is not best), key=lambda c: c.seconds)
    return Chosen(best, others, refused, len(ranked))


def _modest(candidate: Candidate) -> tuple[float, ...]:
    old, layout = round(candidate.figures["staleness"], 1), candidate.layout
    return old, layout.devices, layout.max_staleness, layout.publish_every, layout.slots


def _averaged(candidate: Candidate, simulate: Callable[[Layout, int], Figures]) -> Candidate:
    runs = [candidate.figures, *(simulate(candidate.layout, seed) for seed in SEEDS[1:])]
    mean = {name: sum(run[name] for run in runs) / len(runs) for name in candidate.figures}
    return replace(candidate, figures=mean, seeds=len(runs))


def _variants(
    space: Space, subject: Subject, passes: Callable[[Layout], bool], refused: dict[str, str]
) -> list[Layout]:
    """For each number of ranks the fastest learner layouts that fit, and the one with the least memory: their other
    fields affect only the learner's seconds and bytes."""
    batch = max(space.axes.get("batch_size", (subject.base.batch_size,)))
    lengths = [round(subject.workload.prompt + subject.workload.mean)] * batch
    found: dict[tuple[int, int, int], list[Layout]] = {}
    for layout in space.learners:
        if subject.measured is None and (sentence := rank_refusal(layout, subject)) is not None:
            refused.setdefault(sentence.partition(" needs ")[0], sentence)
        else:
            found.setdefault((layout.learner_on, layout.ranks, layout.services), []).append(layout)

    kept = dict[Layout, None]()
    for group in found.values():
        seconds = {layout: costs_of(layout, subject).train(lengths) for layout in group}
        kept |= dict.fromkeys(islice(filter(passes, sorted(group, key=lambda one: seconds[one])), VARIANTS))
        small = sorted(group, key=lambda one: bytes_of(one, subject)[1].total)
        kept |= dict.fromkeys(islice(filter(passes, small), 1))
    return list(kept)


def _ranked(
    space: Space, subject: Subject, passes: Callable[[Layout], bool], refused: dict[str, str]
) -> list[tuple[Layout, Estimate]]:
    """Layouts that fit and satisfy ``keeps``, best first, alternating between staleness bounds because the closed
    forms compare bounds least accurately; none that is hopeless beside the best one that ``passes``."""
    trained: dict[tuple[Any, ...], float] = {}
    by_bound: dict[int, list[tuple[Layout, Estimate]]] = {}
    for seen, layout in enumerate(
        enumerate_layouts(space.learners, space.generators, space.devices, space.axes, len(subject.kinds))
    ):
        if seen == MAX_LAYOUTS:
            raise ValueError(f"over {MAX_LAYOUTS} layouts: fix some fields, for example with --keep tensor=8")
        if not all(keep(layout) for keep in space.keeps):
            continue
        if (sentence := refusal(layout, subject)) is not None:
            refused.setdefault(sentence.partition(" needs ")[0], sentence)
            continue
        key = (layout.batch_size, layout.learner_on, *(asdict(layout)[n] for n in LEARNER))
        if key not in trained:
            trained[key] = estimate(layout, subject).train
        by_bound.setdefault(layout.max_staleness, []).append((layout, estimate(layout, subject, trained[key])))

    def each(entry: tuple[Layout, Estimate]) -> float:
        return entry[1].step / entry[0].batch_size * subject.doubt(entry[0])

    for entries in by_bound.values():
        entries.sort(key=lambda e: (each(e), e[0].devices, e[0].publish_every, e[0].slots))
    firsts = (next((e for e in entries if passes(e[0])), None) for entries in by_bound.values())
    least = min((each(entry) for entry in firsts if entry is not None), default=0.0)
    turns = zip_longest(*(by_bound[bound] for bound in sorted(by_bound)))
    return [e for turn in turns for e in turn if e is not None and each(e) <= HOPELESS * least]
