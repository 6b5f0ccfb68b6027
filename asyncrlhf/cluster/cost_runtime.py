"""A runtime whose parts only advance virtual time: simulates a run with the real loops and predicted costs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

from asyncrlhf.cluster.cost_parts import CostAnnotator, CostGenerator, CostLearner, World
from asyncrlhf.cluster.handles import GeneratorHandle
from asyncrlhf.cluster.local_runtime import LocalRuntime, Workers
from asyncrlhf.cluster.placement import Specs
from asyncrlhf.records.rollout_rows import RolloutRow
from asyncrlhf.types import Payload


class CostRuntime(LocalRuntime):
    """The local runtime with parts that only cost time. Records hold no texts and no tokens."""

    def __init__(self, specs: Specs, sharing: Collection[str], world: World) -> None:
        workers = Workers(
            generator=lambda spec, clock: CostGenerator(world, spec, clock),
            learner=lambda spec: CostLearner(world, spec),
            annotator=lambda spec, name: CostAnnotator(world, spec),
        )
        super().__init__(specs, sharing, workers)
        self._world = world
        self._faults: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        if self._world.conditions.failures:
            self._faults = asyncio.create_task(self._fail(), name="failures")

    async def _fail(self) -> None:
        """Kill replicas at random times."""
        rate = self._world.conditions.failures * len(self.generators) / 3600
        while True:
            await asyncio.sleep(self._world.random.expovariate(rate))
            self._world.random.choice(self.generators).kill("a simulated failure")  # type: ignore[attr-defined]

    async def restart(self, dead: GeneratorHandle) -> GeneratorHandle:
        await asyncio.sleep(self._world.conditions.restart_seconds)
        return await super().restart(dead)

    def write_part(self, target: Path, rows: Sequence[RolloutRow], payloads: Sequence[Payload | None]) -> Future[None]:
        return super().write_part(target, rows, [None] * len(rows))

    async def close(self) -> None:
        if self._faults is not None:
            self._faults.cancel()
        await super().close()
