"""RLHFuse's fused training of actor and critic and consolidation of the generation tail (2409.13221), as what-if."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """Two models whose pipelines run in opposite directions over the same ``stages[0]`` devices.

    Args:
        stages: (p0 of the actor, p1 of the critic); p1 divides p0, and the critic has p0 / p1 copies.
        microbatches: of the actor, and of each copy of the critic.
        forward: time of a microbatch's forward pass in one stage; a backward pass takes twice as long.
    """

    stages: tuple[int, int]
    microbatches: tuple[int, int]
    forward: tuple[float, float]

    def __post_init__(self) -> None:
        if self.stages[0] % self.stages[1]:
            raise ValueError(f"the critic's stages ({self.stages[1]}) must divide the actor's ({self.stages[0]}).")


def bound(pair: Pair) -> float:
    """A lower bound of the fused makespan, not always reached.

    Each device processes the microbatches of both models and is idle for at least its distance from the nearer first
    stage; the fused makespan is also at least that of each pipeline alone.
    """
    (p0, p1), (m0, m1), (f0, f1) = pair.stages, pair.microbatches, pair.forward
    idle = max(min(3 * f0 * s, 3 * f1 * (p1 - 1 - s % p1)) for s in range(p0))
    return max(3 * (m0 * f0 + m1 * f1) + idle, 3 * f0 * (m0 + p0 - 1), 3 * f1 * (m1 + p1 - 1))


def one_after_another(pair: Pair) -> float:
    """The makespan of both pipelines in turn, each with the 1F1B schedule."""
    return sum(3 * f * (m + p - 1) for p, m, f in zip(pair.stages, pair.microbatches, pair.forward, strict=True))


def greedy(pair: Pair) -> float:
    """The makespan of a feasible schedule, the best of six priority rules for a free device: prefer one model, the
    other, or the one with more work left; among its passes prefer backward or forward. At most p - s microbatches are
    in flight at stage s.
    """
    return min(_list_schedule(pair, first, backward) for first in (0, 1, None) for backward in (True, False))


def _list_schedule(pair: Pair, first: int | None, backward: bool) -> float:
    tasks, free = _Tasks(pair), [0.0] * pair.stages[0]

    def rank(task: Task) -> tuple[float, ...]:
        kind, model, _, _, number = task
        left = 3 * pair.forward[model] * (pair.microbatches[model] - number)
        return (float(model != first) if first is not None else -left, float(kind if backward else 1 - kind), number)

    while tasks.left:
        start, _, device, task = min(
            (max(free[device], ready), rank(task), device, task)
            for device in range(pair.stages[0])
            for ready, task in tasks.ready(device)
        )
        free[device] = tasks.finish(task, start)
    return max(free)


Task = tuple[int, int, int, int, int]  # (0 backward | 1 forward, model, copy, stage, microbatch)


class _Tasks:
    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._ended: dict[Task, float] = {}
        copies = pair.stages[0] // pair.stages[1]
        self._streams = [
            (model, copy, stage)
            for model, count in ((0, 1), (1, copies))
            for copy in range(count)
            for stage in range(pair.stages[model])
        ]
        self._done = {(kind, *stream): 0 for kind in (0, 1) for stream in self._streams}
        self.left = sum(2 * pair.microbatches[model] for model, _, _ in self._streams)

    def _device(self, model: int, copy: int, stage: int) -> int:
        """The device of a stage; the critic's stages run in reverse order on the devices of each copy."""
        p1 = self._pair.stages[1]
        return stage if model == 0 else copy * p1 + (p1 - 1 - stage)

    def ready(self, device: int) -> Sequence[tuple[float, Task]]:
        """The next tasks of each stream on the device, each with its earliest start."""
        found = []
        for model, copy, stage in self._streams:
            if self._device(model, copy, stage) != device:
                continue
            last = self._pair.stages[model] - 1
            for kind in (0, 1):
                number = self._done[kind, model, copy, stage]
                if number == self._pair.microbatches[model]:
                    continue
                if kind:
                    in_flight = number - self._done[0, model, copy, stage]
                    before = (1, model, copy, stage - 1, number) if stage else None
                    if in_flight >= self._pair.stages[model] - stage:
                        continue
                else:
                    before = (0, model, copy, stage + 1, number) if stage < last else (1, model, copy, stage, number)
                if before is None or before in self._ended:
                    found.append((self._ended[before] if before else 0.0, (kind, model, copy, stage, number)))
        return found

    def finish(self, task: Task, start: float) -> float:
        kind, model, *_ = task
        end = start + self._pair.forward[model] * (1 if kind else 2)
        self._ended[task] = end
        self._done[task[:4]] += 1
        self.left -= 1
        return end


@dataclass(frozen=True)
class Tail:
    """When to move the last samples of a generation to fewer instances.

    Args:
        remaining: number of unfinished samples at the move; 0: no move.
        seconds: of generation and inference together; without a move they run in sequence.
    """

    remaining: int
    seconds: float


def consolidate(
    ends: Sequence[float], instances: int, keep: int, move_seconds: float, infer_seconds: float, slowdown: float = 1.0
) -> Tail:
    """The best number of remaining samples at which to move all of them to ``keep`` of ``instances``, by a scan.

    Args:
        ends: end of each sample without a move, in seconds.
        move_seconds: time to send the keys and values of one sample over the link.
        infer_seconds: inference of all samples on all instances.
        slowdown: factor on the decoding time of the moved samples, because their batches are larger.
    """
    ordered = sorted(ends)
    total, best = len(ordered), Tail(0, ordered[-1] + infer_seconds)
    freed = (instances - keep) / instances
    for remaining in range(1, total):
        at = ordered[total - remaining - 1]
        moved = at + remaining * move_seconds / keep
        end = moved + (ordered[-1] - at) * slowdown
        done = min(infer_seconds, (end - at) * freed)  # inference done on the freed instances, in seconds of all
        seconds = end + infer_seconds - done
        if seconds < best.seconds:
            best = Tail(remaining, seconds)
    return best
