"""Every kind of part, killed and frozen at every moment of a run on Ray: one case each, struck exactly there."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrlhf.cluster.ray_runtime import RayRuntime
from asyncrlhf.orchestrator.controller import Controller
from asyncrlhf.orchestrator.learning.bookkeeping import Bookkeeping
from asyncrlhf.orchestrator.replicas.weight_sync import WeightPublisher
from asyncrlhf.orchestrator.rollouts.heldout import HeldOut
from tests.chaos.injection import PARTS, Case, process_of, say, targets

STEPS = 8
# The method that begins the moment, and its how manieth call; the first moment is the building of an actor instead.
MOMENTS: dict[str, tuple[type, str, int]] = {
    "first weights": (WeightPublisher, "_transfer", 1),
    "first evaluation": (HeldOut, "measure", 1),
    "training": (Bookkeeping, "after_step", 2),
    "publish": (WeightPublisher, "_transfer", 4),
    "checkpoint": (Bookkeeping, "save", 1),
    "checkpoint's files": (Bookkeeping, "_write", 1),
    "evaluation": (HeldOut, "measure", 2),
    "last checkpoint": (Bookkeeping, "save", 3),
    "last evaluation": (HeldOut, "measure", 3),
    "last records": (Controller, "_end_loops", 1),
    "closing": (RayRuntime, "close", 1),
}
BUILDING = "building"
ACTORS = {"generator": "GeneratorActor", "learner": "LearnerActor", "record writer": "RecordActor"}
SENT = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


def moment_cases() -> list[Case]:
    """In an order of their own, so that the first few are of all kinds."""
    parts = [part for part in PARTS if part != "driver"]
    found = list(itertools.product((BUILDING, *MOMENTS), parts, SENT))
    order = sorted(range(len(found)), key=lambda i: (i * 61) % len(found))
    return [_case(number, *found[i]) for number, i in enumerate(order)]


def _case(number: int, moment: str, part: str, kind: str) -> Case:
    mode = ("async", "sync", "async", "fixed_lag", "one_step")[number % 5]
    overrides = (
        f"seed={number}", f"async.mode={mode}", f"steps={STEPS}", "generator.engine=fake", "algorithm=ppo",
        "critic=service", "reference=service", "algorithm.kl=loss", "algorithm.beta=0.1", "batch_size=16",
        "num_generations=4", "generator.slots=16", "generator.replicas=2", "generator.threads=0", "reward.workers=2",
        "generator.max_completion_length=12", "checkpoint.every=3", "checkpoint.resume=auto", "eval_every=5",
        "task.heldout_size=8", "stall_timeout_seconds=10", "weights.timeout_seconds=5", "logging.wandb=disabled",
        "cluster.start_timeout_seconds=20", "logging.progress=plain", "logging.report=false", "logging.flush_every=16",
        "learner.learning_rate=1e-4",
    )  # fmt: skip
    return Case(number, "ray", kind, part, -1, 0.0, 0.0, (), overrides, moment)


def inject_at_moment(case: Case, told: Path) -> None:
    """Strike the process of the part where the moment begins, before anything of it happens."""

    def strike(number: int) -> None:
        say(told, struck=[f"{case.kind} of {case.part} (process {number}) at: {case.moment}"], part=case.part)
        os.kill(number, SENT[case.kind])

    if case.moment == BUILDING or case.part == "record writer":
        # The first file builds a record writer: before that moment, it is struck as soon as it is there.
        begun = threading.Event()
        if case.moment == BUILDING:
            begun.set()
        else:
            before_call(*MOMENTS[case.moment], lambda self: begun.set())
        title = f"ray::{ACTORS.get(case.part, 'AnnotatorActor')}"
        title += ".__init__" if case.part != "record writer" and case.moment == BUILDING else ""
        nth = ("reward", "reference", "critic").index(case.part) if case.part not in ACTORS else 0
        threading.Thread(target=lambda: (begun.wait(), strike(awaited(title, nth))), daemon=True).start()
        return
    number: list[int] = []
    start = RayRuntime.start

    async def started(self: RayRuntime) -> None:
        await start(self)
        number.append(process_of(targets(self, case.part)[-1][1]))

    RayRuntime.start = started  # type: ignore[method-assign]
    before_call(*MOMENTS[case.moment], lambda self: strike(number[0]))


def before_call(kind: type, method: str, nth: int, act: Callable[[Any], None]) -> None:
    """Call ``act`` with the object before the ``nth`` call of its method."""
    original, calls = getattr(kind, method), itertools.count(1)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            act(self)
        return original(self, *args, **kwargs)

    setattr(kind, method, wrapped)


def awaited(title: str, nth: int) -> int:
    """The number of the ``nth`` process whose title begins so, as soon as it is there."""
    met: list[int] = []
    while True:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            number = int(path.parent.name)
            try:
                found = number not in met and path.read_bytes().decode(errors="replace").startswith(title)
            except OSError:
                continue
            if found:
                met.append(number)
                if len(met) > nth:
                    return number
