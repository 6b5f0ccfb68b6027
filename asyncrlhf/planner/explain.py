"""A plan in words: why this layout, why not the others, and where the figures come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from asyncrlhf.planner.choose import TIE, Candidate, Chosen
from asyncrlhf.planner.layout import Layout
from asyncrlhf.planner.ranking import Subject, bytes_of, estimate

STUDIES = "experiments/01_off_policyness, experiments/05_staleness_lab"
WORTH = ("measured", "fitted", "extrapolated", "catalogue")  # sources of a figure, most reliable first


def sources(chosen: Layout, subject: Subject) -> dict[str, str]:
    """Source of each figure; outside the layout that was measured it is ``extrapolated``."""
    if subject.measured is None:
        return {name: "catalogue" for name in ("decode", "prefill", "train", "publish", "messages", "memory")}
    return {**subject.measured.sources, **dict.fromkeys(subject.extrapolated(chosen), "extrapolated")}


def weakest(known: Mapping[str, str]) -> str:
    return max(known.values(), key=WORTH.index, default="fitted")


def sentences(chosen: Chosen, subject: Subject) -> list[str]:
    """Sentences that explain why this layout was chosen."""
    best, layout = chosen.best, chosen.best.layout
    guess, figures = best.estimate, best.figures
    said = [
        f"A step of {layout.batch_size} rollouts takes {seconds_in_words(figures['step_seconds'])}: the learner needs "
        f"{seconds_in_words(guess.train)}, the generators {seconds_in_words(guess.generation)}; the learner waits "
        f"{figures['learner_idle']:.0%} of the time, the generators {figures['generator_idle']:.0%}."
    ]
    if layout.placement == "flatten":
        said.append("Generators and learner take turns on the same devices: each waits while the other works.")
    else:
        enough = guess.generation <= guess.train
        rate = layout.batch_size / guess.generation / layout.replicas
        another = estimate(replace(layout, replicas=layout.replicas + 1), subject)
        said.append(
            f"A replica makes {rate:.3g} rollouts/s; replicas ({layout.replicas}) "
            + ("keep the learner busy" if enough else "are slower than the learner")
            + f". With one more, a step would take {seconds_in_words(another.step)} by the closed forms, and the "
            f"generators would be held back {another.held_back:.0%} of the time."
        )
    said.append(_lag(chosen))
    if layout.in_flight < layout.replicas * layout.slots:
        said.append(
            f"At most {layout.in_flight} of {layout.replicas * layout.slots} slots are in use, because the staleness "
            f"bound limits the rollouts in flight."
        )
    generator, learner = bytes_of(layout, subject)
    held = f"A learner rank holds {learner.total / 1e9:.3g} GB, a generator's device {generator.total / 1e9:.3g} GB"
    first, count = next(iter(chosen.refused.values()), ""), len(chosen.refused)
    said.append(held + (f"; reasons to refuse other layouts: {count}, such as: {first}" if count else "."))
    known = sources(layout, subject)
    if weakest(known) == "catalogue":
        device = subject.clusters[layout.learner_on].device
        said.append(f"Figures of {device.name} come from its data sheet ({device.source}): expect errors of 30%.")
    elif weakest(known) == "extrapolated":
        names = ", ".join(name for name, source in known.items() if source == "extrapolated")
        said.append(f"Extrapolated figures: {names}. Compare them with the first run (asyncrlhf plan --compare).")
    said.append(f"The plan predicts staleness, not reward: {STUDIES} measure what staleness costs in reward.")
    return said


def _lag(chosen: Chosen) -> str:
    """Why this staleness bound: the step time of the best layout at each other bound."""
    best = chosen.best
    bound = best.layout.max_staleness
    rivals: dict[int, float] = {}
    for other in chosen.others:
        lag, step = other.layout.max_staleness, other.figures["step_seconds"]
        if lag != bound:
            rivals[lag] = min(step, rivals.get(lag, math.inf))
    tried = ", ".join(f"{lag}: {seconds_in_words(step)}" for lag, step in sorted(rivals.items()))
    return (
        f"max_staleness {bound} gives a mean staleness of {best.figures['staleness']:.2f} and drops "
        f"{best.figures['dropped_share']:.1%} of rollouts" + (f"; a step at other bounds: {tried}." if tried else ".")
    )


def reason(other: Candidate, best: Candidate) -> str:
    """Why another candidate was not chosen."""
    excess = other.figures["step_seconds"] / best.figures["step_seconds"] - 1
    changed = ", ".join(f"{name}={value}" for name, value in other.layout.changes(best.layout).items())
    slower = f"{abs(excess):.1%} {'slower' if excess >= 0 else 'faster'}"
    worse = "" if excess >= TIE else ", within the noise, but staler or with more devices"
    worse = worse if excess >= -TIE else ", but by costs that were not measured at its size"
    return f"{changed}: {seconds_in_words(other.figures['step_seconds'])} per step, {slower}{worse}"


def seconds_in_words(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 0.1 else f"{value:.3g} s"
