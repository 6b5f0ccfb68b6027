"""What the controller itself costs: CPU seconds of one rollout with 8, 128 and 1,000 replicas that only let time pass.

The dispatcher, gate, buffer, assembly, learner's loop and records are the real ones. Generators, reward worker and
learner are replaced by timers on the virtual clock, so nearly all CPU time that is measured is the controller's. This
file uses nothing that is private to one version of the package, so an older version can be measured with it, in turn
with this one: ``PYTHONPATH=OTHER_CHECKOUT python experiments/22_control_plane/bench.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncrlhf.actors.messages import Collected, Offer
from asyncrlhf.bench.measure import show, spread, write
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.orchestrator.controller import Controller
from asyncrlhf.orchestrator.learning.bookkeeping import HeldOut
from asyncrlhf.records.write.recorder import RunRecorder
from asyncrlhf.types import GenerationRequest, Payload, Prompt, Rollout, RolloutInfo, SamplingParams, WeightManifest

try:
    from asyncrlhf.types import Annotation
except ImportError:  # an older version
    from asyncrlhf.types import RewardResult as Annotation  # type: ignore[attr-defined,no-redef]

SLOTS = 128
SIZE = 8  # rollouts a prompt
MEDIAN_SECONDS = 400.0  # of a rollout: 16,000 tokens at 40 a second
SIGMA = 0.3  # of the logarithm of a rollout's seconds
WARM_UP = 0.9  # batches that end before the measurement begins, so that it begins with a learner step
TOKENS = np.zeros(1, dtype=np.int64)
LOGPROBS = np.zeros(1, dtype=np.float32)


class Meter:
    """Takes the CPU times when ``first`` and when ``last`` rollouts have ended; both the way to the first time and that
    to the second end after ``limit`` CPU seconds, however far they came."""

    def __init__(self, first: int, last: int, limit: float) -> None:
        self._first, self._last, self._limit = first, last, limit
        self._began: tuple[int, float, float] | None = None
        self._started = time.process_time()
        self.ended = 0
        self.done = asyncio.Event()
        self.result: dict[str, float] = {}

    def count(self, ended: int) -> None:
        self.ended += ended
        warm = self.ended >= self._first or time.process_time() - self._started > self._limit
        if self.done.is_set() or not (warm or self._began):
            return
        if self._began is None:
            self._began = (self.ended, time.process_time(), time.thread_time())
        ended, process, thread = self._began
        spent = time.process_time() - process
        if self.ended < self._last and spent < self._limit:
            return
        rollouts = max(1, self.ended - ended)
        loop_ms = 1e3 * (time.thread_time() - thread) / rollouts
        self.result = {"rollouts": rollouts, "process_ms": 1e3 * spent / rollouts, "loop_ms": loop_ms}
        self.done.set()


class Part:
    """What is asked of its worker by name, it answers itself."""

    async def call(self, seconds: float, method: Any, *arguments: Any) -> Any:
        return await getattr(self, method.__name__)(*arguments)


class TimerGenerator(Part):
    """``SLOTS`` rollouts at a time, each of which ends after seconds that its seed decides."""

    def __init__(self, name: str, meter: Meter) -> None:
        self.name, self.slots = name, SLOTS
        self._meter = meter
        self._version = -1
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[tuple[float, int, int, GenerationRequest]] = []  # heap of (end, rollout id, version, item)
        self._timer: asyncio.TimerHandle | None = None
        self._finished: list[tuple[float, int, GenerationRequest]] = []
        self._collector: asyncio.Future[None] | None = None

    async def submit(self, items: Sequence[GenerationRequest]) -> None:
        self._waiting.extend(items)
        self._begin(asyncio.get_running_loop().time())

    def _begin(self, now: float) -> None:
        while self._waiting and len(self._running) < self.slots:
            item = self._waiting.popleft()
            seconds = MEDIAN_SECONDS * math.exp(SIGMA * random.Random(item.seed).gauss(0.0, 1.0))
            heapq.heappush(self._running, (now + seconds, item.rollout_id, self._version, item))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._running[0][0], self._end) if self._running else None

    def _end(self) -> None:
        now = asyncio.get_running_loop().time()
        # The loop counts a timer as due a little early; what is not taken then would be due again at once, for ever.
        while self._running and self._running[0][0] <= now + 1e-6:
            end, _, version, item = heapq.heappop(self._running)
            self._finished.append((end, version, item))
        self._begin(now)
        if self._collector is not None and not self._collector.done():
            self._collector.set_result(None)

    async def collect(self) -> Collected:
        while not self._finished:
            self._collector = asyncio.get_running_loop().create_future()
            await self._collector
        finished, self._finished = self._finished, []
        self._meter.count(len(finished))
        rollouts = [
            Rollout(
                item.rollout_id, item.group_id, item.prompt, TOKENS, LOGPROBS, TOKENS, "stop", "7",
                self.name,
            )
            for _, _, item in finished
        ]  # fmt: skip
        infos = [
            RolloutInfo(
                item.rollout_id, item.group_id, self.name, 1, 1, version, self._version, "stop", end,
                Payload(rollouts, place),
            )
            for place, (end, version, item) in enumerate(finished)
        ]  # fmt: skip
        return Collected(infos, tokens=len(infos))

    async def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        gone = set(rollout_ids)
        self._waiting = deque(item for item in self._waiting if item.rollout_id not in gone)
        self._running = [entry for entry in self._running if entry[1] not in gone]
        heapq.heapify(self._running)
        self._begin(asyncio.get_running_loop().time())
        return list(rollout_ids)

    async def receive(self, ticket: Any) -> None:
        """Nothing travels."""

    async def load(self, version: int, cache: str) -> float:
        self._version = version
        return 0.0

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Coin:
    """A reward worker that answers at once."""

    name = "reward-0"

    async def annotate(self, payloads: Sequence[Payload], ticket: Any = None) -> list[Annotation]:
        ids = [p.ref[p.index].rollout_id for p in payloads]
        return [Annotation(i, float(i % 2)) for i in ids]

    score = annotate  # as an older version asks


class TimerLearner(Part):
    """A step takes ``seconds``; a publish takes none."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._version = 0

    async def train(self, items: Sequence[Any]) -> StepResult:
        await asyncio.sleep(self._seconds)
        self._version += 1
        return StepResult({"loss": 0.0})

    def snapshot(self, probe: Any) -> Awaitable[Offer]:
        offer: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        offer.set_result(Offer(0.0))
        return offer

    async def ticket(self) -> Any:
        return SimpleNamespace(version=self._version, manifest=WeightManifest((), ()))

    async def transfer(self, ticket: Any) -> None:
        """Nothing travels."""

    async def release(self, version: int) -> None:
        """Nothing is held."""


class TimerRuntime:
    """The parts above."""

    sharing: frozenset[str] = frozenset()
    maps = False
    references: Sequence[Any] = ()
    critics: Sequence[Any] = ()
    episodes: Sequence[Any] = ()

    def __init__(self, replicas: int, meter: Meter) -> None:
        self.generators: list[Any] = [TimerGenerator(f"generator-{i}", meter) for i in range(replicas)]
        self.rewards: list[Any] = [Coin()]
        self._writer = ThreadPoolExecutor(1)
        self.learner: Any = TimerLearner(0.3 * MEDIAN_SECONDS)  # generation is the slower side

    async def start(self) -> None:
        """Everything stands."""

    async def connect(self, receivers: Sequence[Any], workers: int = 0) -> int:
        """There is no group to form."""
        return 0

    async def fetch(self, payloads: Sequence[Payload]) -> list[Rollout]:
        return [p.ref[p.index] for p in payloads]

    def write_part(self, target: Path, rows: Sequence[Any], payloads: Sequence[Payload | None]) -> Any:
        from asyncrlhf.records.write.recorder import (
            write_part,  # which an older version lacks; it has ``fetch`` instead
        )

        return self._writer.submit(write_part, target, rows, [p.ref[p.index] if p else None for p in payloads])

    async def written(self, files: Sequence[Future[None]], tell: Any) -> None:
        wait(files)  # on the virtual clock the wait takes no time

    async def close(self) -> None:
        for generator in self.generators:
            await generator.close()


class OnePrompt:
    """The same prompt again and again."""

    def __init__(self) -> None:
        self._prompt = Prompt("p", "1+6=", TOKENS, "7")

    def heard(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        pass

    def next(self) -> Prompt:
        return self._prompt

    def state(self) -> dict[str, Any]:
        return {}


class Silent:
    """A view that shows nothing."""

    stop_asked = False

    def stage(self, name: str) -> None: ...

    def begin(self) -> None: ...

    def step(self, metrics: Any) -> None: ...

    def message(self, text: str) -> None: ...

    def published(self, version: int) -> None: ...


async def _measured(replicas: int, batches: float, limit: float, folder: Path) -> dict[str, float]:
    batch = replicas * SLOTS // 2
    meter = Meter(int(WARM_UP * batch), int((WARM_UP + batches) * batch), limit)
    generator = GeneratorConfig(engine="fake", replicas=replicas, slots=SLOTS)
    config = RunConfig(
        runtime="local", batch_size=batch, num_generations=SIZE, steps=10**6, generator=generator,
        stall_timeout_seconds=2e6,
    )  # fmt: skip
    runtime: Any = TimerRuntime(replicas, meter)
    sampling = SamplingParams(16)
    recorder = RunRecorder(folder, {}, LoggingConfig())
    view: Any = Silent()
    source: Any = OnePrompt()
    heldout = HeldOut([], sampling, runtime)
    controller = Controller(config, runtime, source, sampling, heldout, recorder, view, vocab_size=10)
    run = asyncio.create_task(controller.run())
    done = asyncio.create_task(meter.done.wait())
    await asyncio.wait([run, done], return_when=asyncio.FIRST_COMPLETED)
    if run.done():
        run.result()
    steps = controller.state.version
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    await controller.close()
    await runtime.close()
    recorder.close()
    return {**meter.result, "steps": steps}


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """``--rounds`` measurements at each number of replicas, in turn."""
    parser = argparse.ArgumentParser(prog="asyncrlhf bench control_plane", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", default="8,128,1000", help=f"each with {SLOTS} slots")
    parser.add_argument("--batches", type=float, default=4.0, help="measured at most, of half of what is in flight")
    parser.add_argument("--seconds", type=float, default=20.0, help="of CPU time that one measurement takes at most")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(list(arguments))
    counts = [int(count) for count in options.replicas.split(",")]
    rows: dict[str, list[dict[str, float]]] = {f"{count} replicas": [] for count in counts}
    for _ in range(options.rounds):
        for count in counts:
            with tempfile.TemporaryDirectory() as folder:
                found = run_virtual(_measured(count, options.batches, options.seconds, Path(folder)))
            rows[f"{count} replicas"].append(found)
            print(f"{count} replicas: {found}", flush=True)
    process = {name: spread([row["process_ms"] for row in found]) for name, found in rows.items()}
    loop = {name: spread([row["loop_ms"] for row in found]) for name, found in rows.items()}
    show("CPU milliseconds of one rollout, all threads of the process", process, "ms")
    show("CPU milliseconds of one rollout, the event loop's thread alone", loop, "ms")
    return write({"process_ms": process, "loop_ms": loop, "runs": rows}, options.out)


if __name__ == "__main__":
    run(sys.argv[1:])
