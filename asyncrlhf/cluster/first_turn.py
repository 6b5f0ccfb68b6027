"""The start on shared devices takes turns: the learner loads first and falls asleep, then the engines measure what it
leaves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.cluster.handles import LONG_SECONDS, LearnerHandle
from asyncrlhf.cluster.placement import Plan, Specs


async def first_turn(learner: LearnerHandle, specs: Specs, sharing: Collection[str], plan: Plan | None = None) -> Specs:
    """End the turn of the ``learner``, which has loaded. Returns ``specs`` in which the generators ``sharing`` know how
    many bytes of their device it keeps. ``plan``: None where it has one rank."""
    kept = await learner.every(LONG_SECONDS, LearnerWorker.sleep)
    beside = max(kept) * (1 if plan is None else crowd(plan))
    generators = [replace(s, beside_bytes=beside) if s.name in sharing else s for s in specs.generators]
    return replace(specs, generators=generators)


def crowd(plan: Plan) -> int:
    """Learner ranks on the device that has the most of them."""
    places = Counter(
        (seat.group, bundle)
        for name, seat in plan.seats.items()
        if name.startswith("learner-")
        for bundle in seat.bundles
    )
    return max(places.values(), default=1)
