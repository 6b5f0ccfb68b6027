"""Imitated worlds for the study of pacing: generators, scorer and learner let virtual time pass, the loops are real."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import statistics
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncrlhf.actors.messages import Offer
from asyncrlhf.actors.worker import Outbox
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.local_runtime import LocalRuntime, Workers
from asyncrlhf.cluster.parts import build_runtime
from asyncrlhf.config.compose import load_config
from asyncrlhf.engines.engine import StepOutput
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.orchestrator.controller import Controller
from asyncrlhf.orchestrator.learning.bookkeeping import HeldOut
from asyncrlhf.orchestrator.run import prepare
from asyncrlhf.records.write.recorder import RunRecorder, read_metrics
from asyncrlhf.types import Annotation, GenerationRequest, Rollout, WeightManifest

QUIET = (
    "runtime=local",
    "logging.wandb=disabled",
    "logging.progress=none",
    "logging.report=false",
    "checkpoint.at_end=false",
)
FAKE = ("generator.engine=fake", "task.heldout_size=8", "fusion.max_wait_ms=0", "learner.virtual_step_seconds=0")
ONE = np.zeros(1, np.float32)


@dataclass(frozen=True)
class World:
    """Seconds that things cost. A rollout takes ``median`` seconds times a log-normal factor of ``sigma``, with
    probability ``tail`` ``tail_ratio`` medians; with ``iteration`` it takes as many decode iterations as it has tokens
    instead, each ``iteration[0] + iteration[1] * running`` seconds. ``train`` by version, times a log-normal factor of
    ``jitter``; with probability ``hiccup`` three times that. ``slow``: factors of single replicas."""

    overrides: tuple[str, ...]
    median: float = 0.1
    sigma: float = 0.6
    tail: float = 0.0
    tail_ratio: float = 8.0
    iteration: tuple[float, float] | None = None
    train: Callable[[int], float] = lambda version: 0.35
    jitter: float = 0.05
    hiccup: float = 0.01
    transfer: float = 0.02
    load: float = 0.01
    score: float = 0.002
    slow: dict[str, float] = field(default_factory=dict)


class Generator:
    """A replica of ``slots`` places. Draws come from the request's seed, so that a world is one whatever the pacing."""

    def __init__(self, world: World, spec: Any, clock: Callable[[], float]) -> None:
        self.name, self.clock, self.outbox = spec.name, clock, Outbox()
        self.tokens, self.busy_seconds, self.version = 0, 0.0, -1
        self._world, self._slots = world, spec.generator.slots
        self._factor = world.slow.get(spec.name, 1.0)
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[tuple[float, int, int, GenerationRequest]] = []  # heap of (end, id, version at the start)
        self._iterations = 0
        self._next = 0.0  # end of the iteration under way
        self.frozen = False

    def submit(self, items: Sequence[GenerationRequest]) -> None:
        self._waiting.extend(items)

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        gone = set(rollout_ids)
        held = [i.rollout_id for i in self._waiting if i.rollout_id in gone]
        held += [entry[1] for entry in self._running if entry[1] in gone]
        self._waiting = deque(item for item in self._waiting if item.rollout_id not in gone)
        self._running = [entry for entry in self._running if entry[1] not in gone]
        heapq.heapify(self._running)
        return held + self.outbox.withdraw(rollout_ids)

    @property
    def running(self) -> int:
        return len(self._running)

    def worked(self, seconds: float) -> None:
        self.busy_seconds += seconds

    def has_work(self) -> bool:
        return bool(self._waiting or self._running) and not self.frozen

    def step(self) -> StepOutput:
        now = self.clock()
        if self._world.iteration is None:
            done = self._take_done(now)
            self._begin(lambda item: now + self._seconds(item))
        else:
            if now < self._next - 1e-9:
                return StepOutput([], wake_at=self._next)
            self._iterations += bool(self._running)
            done = self._take_done(self._iterations)
            self._begin(lambda item: self._iterations + self._length(item))
            fixed, each = self._world.iteration
            self._next = now + self._factor * (fixed + each * len(self._running))
        self.outbox.put(done, now)
        self.tokens += len(done)
        if not self._running:
            return StepOutput(done, wake_at=now)
        return StepOutput(done, wake_at=self._running[0][0] if self._world.iteration is None else self._next)

    def _take_done(self, until: float) -> list[Any]:
        done = []
        while self._running and self._running[0][0] <= until + 1e-9:
            _, rollout_id, version, item = heapq.heappop(self._running)
            versions = np.array([version, self.version])
            ids = np.ones(2, np.int64)
            done.append(
                Rollout(rollout_id, item.group_id, item.prompt, ids, ONE.repeat(2), versions, "stop", "", self.name)
            )
        return done

    def _begin(self, end: Callable[[GenerationRequest], float]) -> None:
        while self._waiting and len(self._running) < self._slots:
            item = self._waiting.popleft()
            heapq.heappush(self._running, (end(item), item.rollout_id, self.version, item))

    def _seconds(self, item: GenerationRequest) -> float:
        rng, world = random.Random(item.seed), self._world
        if rng.random() < world.tail:
            return self._factor * world.median * world.tail_ratio
        return self._factor * world.median * math.exp(world.sigma * rng.gauss(0.0, 1.0))

    def _length(self, item: GenerationRequest) -> int:
        return min(16, max(2, round(random.Random(item.seed).lognormvariate(math.log(7), 0.45))))

    def receive(self, ticket: Any) -> None:
        """The learner's transfer has taken the time."""

    async def load(self, version: int, cache: str) -> None:
        await asyncio.sleep(self._world.load)
        self.version = version


class Learner:
    """Takes the world's seconds a step."""

    def __init__(self, world: World, seed: int) -> None:
        self.version = 0
        self._world, self._rng = world, random.Random(seed)

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        """Nothing is sent."""

    def snapshot(self, probe: Any) -> Offer:
        return Offer(0.0)

    def ticket(self) -> Any:
        return SimpleNamespace(version=self.version, manifest=WeightManifest((), ()))

    async def transfer(self, ticket: Any) -> None:
        await asyncio.sleep(self._world.transfer)

    async def train(self, chosen: Sequence[Any], *bundles: Any, **recorded: Any) -> StepResult:
        world = self._world
        seconds = world.train(self.version) * math.exp(world.jitter * self._rng.gauss(0.0, 1.0))
        await asyncio.sleep(seconds * (3 if self._rng.random() < world.hiccup else 1))
        self.version += 1
        return StepResult({"loss": 0.0})


class Scorer:
    """Each call takes ``score`` seconds."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], list[Any]]:
        await asyncio.sleep(self._world.score)
        return [Annotation(r.rollout_id, float(r.rollout_id % 2)) for r in rollouts], []


def imitate(
    world: World, *overrides: str, seed: int = 0, meddle: Callable[[LocalRuntime], None] | None = None
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Metrics of the steps and rows of all ended rollouts. ``meddle`` gets the runtime when its parts stand."""
    with tempfile.TemporaryDirectory() as folder:
        given = [f"run_dir={folder}/run", *QUIET, *FAKE, f"seed={seed}", *world.overrides, *overrides]
        config = load_config(given)
        prepared = prepare(config)
        recorder = RunRecorder(Path(folder) / "run", {}, config.logging, None)
        view: Any = SimpleNamespace(
            stage=lambda name: None,
            begin=lambda: None,
            step=lambda metrics: None,
            message=lambda text: None,
            published=lambda version: None,
            stop_asked=False,
            evaluated=lambda version, accuracy: None,
            evaluated_apart=lambda version, seconds, accuracy: None,
        )
        rows: list[Any] = []

        def keep(target: Path, ended: Sequence[Any], payloads: Sequence[Any]) -> Future[None]:
            rows.extend(ended)
            done: Future[None] = Future()
            done.set_result(None)
            return done

        async def main() -> None:
            workers = Workers(
                generator=lambda spec, clock: Generator(world, spec, clock),
                learner=lambda spec: Learner(world, seed),
                annotator=lambda spec, name: Scorer(world),
            )
            runtime: Any = build_runtime(config, Path(folder), workers)
            runtime.write_part = keep
            start = runtime.start

            async def started() -> None:
                await start()
                if meddle is not None:
                    meddle(runtime)

            runtime.start = started
            heldout = HeldOut([], prepared.sampling, runtime)
            source = prepared.task.train_source(config.seed)
            controller = Controller(config, runtime, source, prepared.sampling, heldout, recorder, view, vocab_size=10)
            try:
                assert (await controller.run()).reason == "done"
            finally:
                await controller.close()
                await runtime.close()

        run_virtual(main())
        recorder.finish({})
        return read_metrics(Path(folder) / "run" / "metrics.jsonl"), rows


def figures(metrics: Sequence[dict[str, Any]], rows: Sequence[Any], warm_up: int) -> dict[str, float]:
    """Of the steps from ``warm_up`` on, without the last ones, which find their batches ready.

    ``floor`` is ``max(1, C M/B + rho)``: by Little's law ``C M/B`` is the mean time from admission to the last token of
    a group's slowest sibling, in steps, and rho the learner's busy share: generators make no more than it takes.
    """
    tail = int(max(row["staleness_bound"] for row in metrics)) + 2
    chosen = [row for row in metrics[:-tail] if row["step"] > warm_up]
    first, last = metrics[warm_up - 1], chosen[-1]
    interval = (last["wall_time"] - first["wall_time"]) / len(chosen)
    ends: dict[int, list[float]] = defaultdict(list)
    begun: dict[int, float] = {}
    for row in rows:
        used = row.consumed_at_version if not isinstance(row, dict) else row["consumed_at_version"]
        get = row.__getattribute__ if not isinstance(row, dict) else row.__getitem__
        if len(used) and first["step"] <= used[-1] < last["step"]:
            ends[get("group_id")].append(get("generated_at"))
            begun[get("group_id")] = get("admitted_at")
    in_flight = statistics.fmean(max(at) - begun[group] for group, at in ends.items()) / interval
    busy = statistics.fmean(row["train_seconds"] for row in chosen) / interval
    return {
        "staleness": statistics.fmean(row["staleness_mean"] for row in chosen),
        "staleness_p90": statistics.fmean(row["staleness_p90"] for row in chosen),
        "staleness_max": max(row["staleness_max"] for row in metrics),
        "steps_per_second": 1 / interval,
        "floor": max(1.0, in_flight + min(1.0, busy)),
        "in_flight": in_flight,
        "learner_busy": busy,
        "generator_idle": statistics.fmean(row["generator_idle_fraction"] for row in chosen),
        "dropped": metrics[-1]["dropped"],
        **{
            key: statistics.fmean(row[key] for row in chosen if row.get(key) is not None)
            for key in ("pacing_lead", "pacing_margin", "pacing_margin_predicted")
            if key in chosen[0]
        },
    }
