"""Measures overlap: asynchronous steps/s against each side running alone, and against the synchronous loop."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.bench.measure import LOAD, QUIET, show, spread, tell, write
from asyncrlhf.cluster.handles import LONG_SECONDS, GeneratorHandle, Runtime
from asyncrlhf.cluster.parts import build_runtime
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.orchestrator.rollouts.dispatch import request_seed
from asyncrlhf.orchestrator.run import Prepared, prepare, train
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.types import GenerationRequest, RolloutInfo
from asyncrlhf.validation import typed_path

WARM_UP = 5  # steps left out at the head of every measurement


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """``--repeats`` rounds of: generator alone, learner alone, async, sync, in turn. Other arguments are overrides."""
    parser = argparse.ArgumentParser(prog="asyncrlhf bench overlap", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=typed_path, default=None)
    options, overrides = parser.parse_known_args(list(arguments))
    rates: dict[str, list[float]] = {"generator alone": [], "learner alone": [], "async": [], "sync": []}
    for number in range(1, options.repeats + 1):
        settings = [*QUIET, *LOAD, f"steps={options.steps}", *overrides]
        config = load_config(settings)
        tell(number, options.repeats, "generator alone, learner alone")
        generator, learner = asyncio.run(alone(config))
        rates["generator alone"].append(generator)
        rates["learner alone"].append(learner)
        for mode in ("async", "sync"):
            tell(number, options.repeats, mode)
            rates[mode].append(loop_rate([*settings, f"async.mode={mode}"]))
    rows = {name: spread(values) for name, values in rates.items()}
    show("Learner steps a second, each side on its own thread", rows, "steps/s")
    slower = [min(g, t) for g, t in zip(rates["generator alone"], rates["learner alone"], strict=True)]
    ratios = {
        "async / slower side alone": spread([a / s for a, s in zip(rates["async"], slower, strict=True)]),
        "sync / slower side alone": spread([a / s for a, s in zip(rates["sync"], slower, strict=True)]),
        "async / sync": spread([a / s for a, s in zip(rates["async"], rates["sync"], strict=True)]),
    }
    show("Ratios, each of one round", ratios, "")
    return write({"steps_per_second": rows, "ratios": ratios, "overrides": overrides}, options.out)


def loop_rate(overrides: Sequence[str]) -> float:
    """Learner steps per second of a whole run after its warm-up, by the run's own clock."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config([f"run_dir={folder}/run", *overrides])
        train(config)
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    first, last = rows[WARM_UP - 1], rows[-1]
    # The last steps of a run find their batches ready, for nothing is generated after them: they are left out.
    tail = config.async_.bound + 1
    if config.async_.mode == "async" and len(rows) > WARM_UP + 2 * tail:
        last = rows[-1 - tail]
    return float((last["step"] - first["step"]) / (last["wall_time"] - first["wall_time"]))


async def alone(config: RunConfig, warm_up: int = WARM_UP) -> tuple[float, float]:
    """The rate in steps per second, after ``warm_up`` of them, at which the generators without a learner make rollouts,
    and that of the learner with ready batches. The same actors as in a run, one side at a time."""
    # Weights travel before anything is timed, in a way that needs no group.
    config = replace(config, weights=config.weights.beside_the_policy(config.runtime))
    prepared = prepare(config)
    runtime = build_runtime(config)
    try:
        await runtime.start()
        await runtime.learner.snapshot(None)
        await runtime.connect(runtime.generators)
        seconds = config.weights.timeout_seconds
        ticket = await runtime.learner.call(seconds, LearnerWorker.ticket)
        received = [g.call(LONG_SECONDS, GeneratorWorker.receive, ticket) for g in runtime.generators]
        await asyncio.gather(runtime.learner.call(LONG_SECONDS, LearnerWorker.transfer, ticket), *received)
        for generator in runtime.generators:
            await generator.call(seconds, GeneratorWorker.load, ticket.version, "keep")
        generated, rollouts = await _generate(config, prepared, runtime, warm_up)
        return generated, await _train(config, runtime, rollouts, warm_up)
    finally:
        await runtime.close()


async def _generate(
    config: RunConfig, prepared: Prepared, runtime: Runtime, warm_up: int
) -> tuple[float, list[RolloutInfo]]:
    """Keep every slot busy until ``steps`` batches are there."""
    source = prepared.task.train_source(config.seed)
    wanted = config.steps * config.batch_size
    rollouts: list[RolloutInfo] = []
    marks: list[float] = []
    issued = 0

    def group() -> list[GenerationRequest]:
        nonlocal issued
        prompt, size = source.next(), config.num_generations
        ids = range(issued, issued + size)
        issued += size
        return [GenerationRequest(i, i // size, prompt, request_seed(config.seed, i), prepared.sampling) for i in ids]

    async def keep_busy(generator: GeneratorHandle) -> None:
        in_flight = 0
        while len(rollouts) < wanted:
            fresh: list[GenerationRequest] = []
            while in_flight + len(fresh) < generator.slots:
                fresh.extend(group())
            if fresh:
                await generator.submit(fresh)
                in_flight += len(fresh)
            finished = (await generator.collect()).finished
            in_flight -= len(finished)
            rollouts.extend(finished)
            marks.extend([time.monotonic()] * len(finished))

    await asyncio.gather(*(keep_busy(g) for g in runtime.generators))
    for generator in runtime.generators:
        await generator.call(LONG_SECONDS, GeneratorWorker.cancel, range(issued))
    return rate(marks, warm_up * config.batch_size) / config.batch_size, rollouts[: 4 * config.batch_size]


def rate(marks: Sequence[float], head: int) -> float:
    """Ends per second from the one numbered ``head`` on: the slope of a line through them, because responses of one
    length that began together also end together. Raises AsyncRLHFError if nearly all ended before."""
    later = np.asarray(marks[head:])
    if later[-1] - later[0] <= 0.1 * (marks[head] - marks[0]):  # also where all ended at one moment
        raise AsyncRLHFError("Nearly all responses ended during the warm-up; it needs more steps, or fewer slots.")
    return float(np.polyfit(later - later[0], np.arange(len(later)), 1)[0])


async def _train(config: RunConfig, runtime: Runtime, rollouts: list[RolloutInfo], warm_up: int) -> float:
    """Train on the same few batches again and again, with rewards that have spread."""
    size = config.batch_size
    batches = [
        [replace(r, reward=float(i % 2)) for i, r in enumerate(rollouts[start : start + size])]
        for start in range(0, len(rollouts) - size + 1, size)
    ]
    started = 0.0
    for step in range(config.steps):
        if step == warm_up:
            started = time.monotonic()
        await runtime.learner.train(batches[step % len(batches)])
    return (config.steps - warm_up) / (time.monotonic() - started)
