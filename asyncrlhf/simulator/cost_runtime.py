"""A runtime whose parts only advance virtual time: simulates a run with the real loops and predicted costs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

from asyncrlhf.actors.messages import Collected
from asyncrlhf.actors.worker import GeneratorSpec
from asyncrlhf.cluster.handles import Hear
from asyncrlhf.cluster.local_runtime import LocalGenerator, LocalRuntime, Workers
from asyncrlhf.cluster.placement import Specs
from asyncrlhf.records.write.rollout_rows import RolloutRow
from asyncrlhf.simulator.cost_parts import CostAnnotator, CostGenerator, CostLearner
from asyncrlhf.simulator.cost_world import World
from asyncrlhf.types import Payload


class CostReplica(LocalGenerator):
    """A replica as in a process of its own: results wait to be sent with others, and a message takes time."""

    def __init__(self, world: World, spec: GeneratorSpec, worker: CostGenerator, told: Hear) -> None:
        super().__init__(spec, worker, told)  # type: ignore[arg-type]
        self._world, self._collected_at = world, -math.inf
        world.wake[spec.name] = self._changed.notify

    async def collect(self) -> Collected:
        box, loop, costs = self.worker.outbox, asyncio.get_running_loop(), self._world.costs
        await self._changed.wait_for(lambda: box.has_results or self._ended())
        until = self._collected_at + self._world.conditions.linger
        timer = loop.call_at(max(until, loop.time()), self._changed.notify)
        await self._changed.wait_for(lambda: not self.worker.has_work() or loop.time() >= until or self._ended())
        timer.cancel()
        collected = await super().collect()
        self._collected_at = loop.time()
        await self._world.message(len(collected.finished))
        await asyncio.sleep(costs.collect)
        return collected


class CostRuntime(LocalRuntime):
    """The local runtime with parts that only cost time. Records hold no texts and no tokens."""

    def __init__(self, specs: Specs, sharing: Collection[str], world: World) -> None:
        workers = Workers(
            learner=lambda spec: CostLearner(world, spec),
            annotator=lambda spec, name: CostAnnotator(world, spec),
        )
        super().__init__(specs, sharing, workers)
        self.maps = world.conditions.maps
        self._world = world

    def _generator(self, spec: GeneratorSpec) -> LocalGenerator:
        worker = CostGenerator(self._world, spec, asyncio.get_running_loop().time)
        return CostReplica(self._world, spec, worker, self.told)

    def write_part(self, target: Path, rows: Sequence[RolloutRow], payloads: Sequence[Payload | None]) -> Future[None]:
        return super().write_part(target, rows, [None] * len(rows))
