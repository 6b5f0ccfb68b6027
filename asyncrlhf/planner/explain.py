"""A plan in words: why this layout, why not the others, and what its figures rest on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from asyncrlhf.planner.choose import Candidate, Chosen
from asyncrlhf.planner.layout import Layout
from asyncrlhf.planner.ranking import Subject, bytes_of, estimate

STUDIES = "experiments/01_off_policyness, experiments/05_staleness_lab"
WORTH = ("measured", "fitted", "extrapolated", "catalogue")  # of a figure's source, best first


def sources(chosen: Layout, subject: Subject) -> dict[str, str]:
    """By figure, where it comes from; what lies beyond the source's own setting is extrapolated."""
    if subject.measured is None:
        return {name: "catalogue" for name in ("decode", "prefill", "train", "publish", "messages", "memory")}
    known = dict(subject.measured.sources)
    if chosen.slots > subject.base.slots:
        known["decode"] = "extrapolated"
    if (chosen.ranks, chosen.batch_size) != (subject.base.ranks, subject.base.batch_size):
        known["train"] = "extrapolated"
    return known


def weakest(known: Mapping[str, str]) -> str:
    return max(known.values(), key=WORTH.index, default="fitted")


def sentences(chosen: Chosen, subject: Subject) -> list[str]:
    """Why this layout."""
    best, layout = chosen.best, chosen.best.layout
    guess, figures = best.estimate, best.figures
    said = [
        f"A step of {layout.batch_size} rollouts takes {seconds_in_words(figures['step_seconds'])}: the learner needs "
        f"{seconds_in_words(guess.train)}, the generators {seconds_in_words(guess.generation)}; the learner waits "
        f"{figures['learner_idle']:.0%} of its time, the generators {figures['generator_idle']:.0%}."
    ]
    if layout.placement == "flatten":
        said.append("Both sides take turns on the same devices, so that nothing overlaps there.")
    else:
        enough = guess.generation <= guess.train
        rate = layout.batch_size / guess.generation / layout.replicas
        another = estimate(replace(layout, replicas=layout.replicas + 1), subject)
        said.append(
            f"A replica makes {rate:.3g} rollouts/s: {layout.replicas} of them "
            + ("keep the learner busy" if enough else "are slower than the learner")
            + f"; with another one a step would take {seconds_in_words(another.step)} by the closed forms, and the "
            f"generators would be held back {another.held_back:.0%} of their time."
        )
    said.append(_lag(chosen))
    if layout.in_flight < layout.replicas * layout.slots:
        said.append(
            f"Of {layout.replicas * layout.slots} slots no more than {layout.in_flight} are ever in use: the bound "
            f"admits no more rollouts at once."
        )
    generator, learner = bytes_of(layout, subject)
    said.append(
        f"A rank holds {learner.total / 1e9:.3g} GB and a replica's device {generator.total / 1e9:.3g} GB"
        + (
            f"; {len(chosen.refused)} other layouts are refused, such as: {next(iter(chosen.refused.values()))}"
            if chosen.refused
            else "."
        )
    )
    known = sources(layout, subject)
    if weakest(known) == "catalogue":
        device = subject.clusters[layout.learner_on].device
        said.append(f"Figures of {device.name} are a data sheet's ({device.source}): not measured here, expect 30%.")
    elif weakest(known) == "extrapolated":
        names = ", ".join(name for name, source in known.items() if source == "extrapolated")
        said.append(f"Beyond what was measured: {names}. Measure again after the first run (asyncrlhf plan --compare).")
    said.append(f"Staleness is predicted, reward is not: what a lag costs in quality, see {STUDIES}.")
    return said


def _lag(chosen: Chosen) -> str:
    """Why this staleness bound: what the best layouts of the others would do."""
    best = chosen.best
    bound = best.layout.max_staleness
    rivals: dict[int, float] = {}
    for other in chosen.others:
        lag, step = other.layout.max_staleness, other.figures["step_seconds"]
        if lag != bound:
            rivals[lag] = min(step, rivals.get(lag, math.inf))
    tried = ", ".join(f"{lag}: {seconds_in_words(step)}" for lag, step in sorted(rivals.items()))
    return (
        f"max_staleness {bound} means a mean staleness of {best.figures['staleness']:.2f} and "
        f"{best.figures['dropped_share']:.1%} dropped" + (f"; a step at other bounds: {tried}." if tried else ".")
    )


def reason(other: Candidate, best: Candidate) -> str:
    """Why another one was not chosen."""
    excess = other.figures["step_seconds"] / best.figures["step_seconds"] - 1
    changed = ", ".join(f"{name}={value}" for name, value in other.layout.changes(best.layout).items())
    slower = f"{abs(excess):.1%} {'slower' if excess >= 0 else 'faster'}"
    worse = "" if excess >= 0.01 else ", which is no difference, and it is staler or takes more devices"
    return f"{changed}: {seconds_in_words(other.figures['step_seconds'])} a step, {slower}{worse}"


def seconds_in_words(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 0.1 else f"{value:.3g} s"
