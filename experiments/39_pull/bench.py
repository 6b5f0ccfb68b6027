"""Push against pull on the virtual clock: real loops and fake engines with a long tail, whose loads take time.

    python -m experiments.39_pull.bench             # figures.csv, 3 seeds of each world and way
    python -m experiments.39_pull.bench --steps 50  # a look

Learner and loads only let time pass.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncrlhf.actors.build_generator import build_worker
from asyncrlhf.actors.messages import Offer
from asyncrlhf.actors.worker import GeneratorSpec, GeneratorWorker
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.local_runtime import LocalRuntime, Workers
from asyncrlhf.cluster.parts import build_runtime
from asyncrlhf.config.compose import load_config
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.orchestrator.controller import Controller
from asyncrlhf.orchestrator.learning.bookkeeping import HeldOut
from asyncrlhf.orchestrator.run import prepare
from asyncrlhf.records.write.recorder import RunRecorder, read_metrics
from asyncrlhf.transport.manifest import FlatBuckets
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.types import Annotation, Rollout, WeightManifest

BASE = (
    "runtime=local", "logging.wandb=disabled", "logging.progress=none", "logging.report=false",
    "logging.rollouts=false", "checkpoint.at_end=false", "generator.engine=fake", "task.heldout_size=8", "eval_every=0",
    "fusion.max_wait_ms=0", "learner.virtual_step_seconds=0", "weights.transport=relay", "generator.replicas=4",
    "generator.slots=16", "batch_size=64", "num_generations=4", "generator.fake.latency_median=1.0",
    "generator.fake.latency_sigma=0.5", "generator.fake.latency_max_ratio=8", "generator.fake.tail_probability=0.05",
)  # fmt: skip
WAYS = ("pull", "in_flight", "drain")
WARM_UP, END = 10, 10  # steps
EMPTY = WeightManifest((), ())


@dataclass(frozen=True)
class World:
    """Seconds of a learner's step, of a transfer to the machines, and of a replica's load; ``slow``: of single ones.
    ``bound``: ``async.max_staleness``."""

    train: float
    transfer: float = 0.2
    load: float = 0.2
    slow: dict[str, float] = field(default_factory=dict)
    bound: int = 2


WORLDS = {
    "generators are slower": World(train=0.5),
    "both sides equal": World(train=1.55),
    "learner is slower": World(train=2.5),
    "one replica loads slowly": World(train=1.55, slow={"generator-3": 5.0}),
    "the same, bound 4": World(train=1.55, slow={"generator-3": 5.0}, bound=4),
}


def pausing(spec: GeneratorSpec, clock: Callable[[], float], world: World) -> GeneratorWorker:
    """A replica whose engine stands still while it loads."""
    worker: Any = build_worker(spec, clock)

    async def load(version: int, cache: Any, ticket: Ticket | None = None) -> None:
        worker.sleep()
        await asyncio.sleep(world.slow.get(spec.name, world.load))
        worker.wake()
        GeneratorWorker.load(worker, version, cache, ticket)

    worker.load = load
    return worker


class Learner:
    def __init__(self, world: World) -> None:
        self.version, self._world = 0, world

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        """Nothing is sent."""

    def snapshot(self, probe: Any) -> Offer:
        return Offer(0.0)

    def ticket(self) -> Ticket:
        return Ticket(self.version, 0, EMPTY, (FlatBuckets(EMPTY), {}))

    async def transfer(self, ticket: Ticket) -> TransferStats:
        await asyncio.sleep(self._world.transfer)
        return TransferStats(self._world.transfer, 0, 0.0)

    async def train(self, chosen: Sequence[Any], *bundles: Any, **recorded: Any) -> StepResult:
        await asyncio.sleep(self._world.train)
        self.version += 1
        return StepResult({"loss": 0.0})


class Scorer:
    async def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], list[Any]]:
        return [Annotation(r.rollout_id, float(r.rollout_id % 2)) for r in rollouts], []


@dataclass
class Ran:
    """Of a run: its metrics, and the controller's state at the end."""

    metrics: list[dict[str, Any]]
    state: Any


def imitate(world: World, *overrides: str, meddle: Callable[[LocalRuntime, Controller], Any] | None = None) -> Ran:
    """``meddle`` is called when the parts stand."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        bound = f"async.max_staleness={world.bound}"
        config = load_config([f"run_dir={run_dir}", *BASE, bound, *overrides])
        prepared = prepare(config)
        recorder = RunRecorder(run_dir, {}, config.logging, None)
        ignore = lambda *_: None  # noqa: E731
        view: Any = SimpleNamespace(
            stage=ignore, begin=ignore, step=ignore, message=ignore, published=ignore, stop_asked=False,
            evaluated=ignore, evaluated_apart=ignore,
        )  # fmt: skip
        kept: list[Controller] = []

        async def main() -> None:
            workers = Workers(
                generator=lambda spec, clock: pausing(spec, clock, world),
                learner=lambda spec: Learner(world),
                annotator=lambda spec, name: Scorer(),
            )
            runtime: Any = build_runtime(config, Path(folder), workers)
            heldout, source = HeldOut([], prepared.sampling, runtime), prepared.task.train_source(config.seed)
            controller = Controller(config, runtime, source, prepared.sampling, heldout, recorder, view, vocab_size=10)
            kept.append(controller)
            start = runtime.start

            async def started() -> None:
                await start()
                if meddle is not None:
                    meddle(runtime, controller)

            runtime.start = started
            try:
                assert (await controller.run()).reason == "done"
            finally:
                await controller.close()
                await runtime.close()

        run_virtual(main())
        recorder.finish({})
        return Ran(read_metrics(run_dir / "metrics.jsonl"), kept[0].state)


def figures(ran: Ran, batch: int) -> dict[str, float]:
    """Of the steps after the warm-up, without the last ones, for which no more prompts are admitted."""
    first, rows = ran.metrics[WARM_UP - 1], ran.metrics[WARM_UP:-END]
    seconds = rows[-1]["wall_time"] - first["wall_time"]
    return {
        "rollouts": len(ran.metrics) * batch,
        "rollouts_per_second": len(rows) * batch / seconds,
        "staleness_mean": statistics.fmean(row["staleness_mean"] for row in rows),
        "staleness_max": max(row["staleness_max"] for row in ran.metrics),
        "dropped": ran.metrics[-1]["dropped"],
        "generator_idle": statistics.fmean(row["generator_idle_fraction"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=540)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("figures.csv"))
    asked = parser.parse_args()
    rows = []
    for name, world in WORLDS.items():
        for way in WAYS:
            for seed in range(asked.seeds):
                began = time.monotonic()
                given = (f"steps={asked.steps}", f"seed={seed}", f"async.on_weight_update={way}")
                ran = imitate(world, *given)
                rows.append({"world": name, "way": way, "seed": seed, **figures(ran, 64)})
                print(*rows[-1].values(), f"{time.monotonic() - began:.0f} s", flush=True)
    with asked.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )


if __name__ == "__main__":
    main()
