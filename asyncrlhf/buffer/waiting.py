"""over_stale=wait: which stragglers a step waits for, and how many groups must go before fresher ones may."""

from __future__ import annotations

from collections.abc import Iterable


def must_wait(version: int, in_flight: Iterable[int], bound: int, groups_per_step: int) -> bool:
    """Whether the step at ``version`` waits: more than ``k`` steps' worth of unfinished groups have only ``k`` steps
    left after this one, for any k. (k = 0 alone is not enough: when fresher groups overtake, several batches of
    stragglers would reach the bound at one step.)

    ``in_flight`` holds one entry for each unfinished group: the lowest version its replicas held when it was admitted
    or begun.
    """
    pending = sorted(v for v in in_flight if v <= version)
    return any(
        position + 1 > max(0, begun - (version - bound)) * groups_per_step for position, begun in enumerate(pending)
    )


def groups_due(version: int, begun: list[int], bound: int, groups_per_step: int) -> int:
    """How many of the groups begun at these versions must go now so that every later step can still meet the bound.

    The last look-ahead, over all that is in play, needs no choice: any full batch meets it.
    """
    due = 0
    for steps_left in range(max(1, bound)):
        limit = version - bound + steps_left
        due = max(due, sum(v <= limit for v in begun) - steps_left * groups_per_step)
    return due
