"""Parts that only advance virtual time: a generator, a learner and annotators."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncrlhf.actors.annotator import AnnotatorSpec
from asyncrlhf.actors.learner import LearnerSpec
from asyncrlhf.actors.messages import Offer, annotated
from asyncrlhf.actors.worker import GeneratorSpec, Outbox
from asyncrlhf.engines.engine import CacheMode, StepOutput
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.simulator.cost_world import World
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import Annotation, GenerationRequest, Rollout, WeightManifest

TOLERANCE = 1e-9  # seconds and iterations


class CostGenerator:
    """A replica as a processor-sharing queue: a heap of the iterations in which sequences end. Between two ends the
    number of running sequences is constant, so the next end is computed and tokens are not simulated."""

    def __init__(self, world: World, spec: GeneratorSpec, clock: Callable[[], float]) -> None:
        self.name, self.clock, self.outbox = spec.name, clock, Outbox()
        self.tokens, self.busy_seconds, self.version = 0, 0.0, -1
        self._world, self._slots = world, spec.generator.slots
        self._limit = spec.generator.max_completion_length
        self._factor = world.conditions.slow.get(spec.name, 1.0)
        self.working = False  # on a core, sampling
        self._arriving: dict[int, GenerationRequest] = {}  # by id: in a message under way
        self._waiting: deque[GenerationRequest] = deque()
        self._ends: list[tuple[float, int]] = []  # heap of (iteration, rollout id)
        self._held: dict[int, tuple[GenerationRequest, float, int]] = {}  # by id: request, first iteration, length
        self._lengths = 0.0  # of prompts less first iterations, added up: with the iterations the sum of all contexts
        self._iteration, self._at, self._debt = 0.0, clock(), 0.0
        self._versions: list[tuple[float, int]] = []  # (iteration, version) of each load
        self._asleep = self._loading = False
        world.generators[spec.name] = self

    @property
    def running(self) -> int:
        return len(self._ends)

    def has_work(self) -> bool:
        return bool(self._ends) and not (self._asleep or self._loading)

    async def submit(self, items: Sequence[GenerationRequest]) -> None:
        self._arriving |= {item.rollout_id: item for item in items}
        await self._world.message(len(items))
        await asyncio.sleep(self._world.costs.submit)
        self.catch_up()
        self._waiting.extend(item for item in items if self._arriving.pop(item.rollout_id, None))
        self._fill()

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        self.catch_up()
        gone = set(rollout_ids)
        waiting = [*self._waiting, *self._arriving.values()]
        held = [i.rollout_id for i in waiting if i.rollout_id in gone] + [i for i in self._held if i in gone]
        self._waiting = deque(item for item in self._waiting if item.rollout_id not in gone)
        self._arriving = {i: item for i, item in self._arriving.items() if i not in gone}
        for rollout_id in gone & self._held.keys():
            request, first, _ = self._held.pop(rollout_id)
            self._lengths -= len(request.prompt_ids) - first
        self._ends = [entry for entry in self._ends if entry[1] not in gone]
        heapq.heapify(self._ends)
        self._fill()
        self._world.at_work(self, self.has_work())
        return held + self.outbox.withdraw(rollout_ids)

    def worked(self, seconds: float) -> None:
        """Does nothing: :meth:`catch_up` counts the seconds."""

    def step(self) -> StepOutput:
        before = self.tokens
        self._world.at_work(self, True)
        done = self.catch_up()
        self._world.at_work(self, self.has_work())
        return StepOutput(list(done), self.tokens - before, wake_at=self._next_end() if self._ends else self.clock())

    def _seconds(self, iterations: float) -> float:
        """Seconds of each of the next ``iterations``, at their mean context."""
        running = len(self._ends)
        context = (self._lengths + running * (self._iteration + iterations / 2)) / running
        iteration = self._world.costs.decode(running / self._world.conditions.cohort, context)
        return iteration * self._factor * self._world.slowdown

    def _next_end(self) -> float:
        left = self._ends[0][0] - self._iteration
        return self._at + self._debt + left * self._seconds(left)

    def catch_up(self) -> list[Rollout]:
        """Advance the replica to the present; returns the rollouts that ended."""
        now, done = self.clock(), list[Rollout]()
        while not (self._loading or self._asleep):
            spent = max(0.0, min(now - self._at, self._debt))  # prefills come before the next token
            self._debt, self._at = self._debt - spent, self._at + spent
            self.busy_seconds += spent
            if not self._ends or self._debt > 0:
                break
            left = self._ends[0][0] - self._iteration
            seconds = self._seconds(left)
            if self._at + left * seconds > now + TOLERANCE:
                if self._at < now:
                    self._iteration += (now - self._at) / seconds
                    self.busy_seconds += now - self._at
                break
            self._at, self._iteration = self._at + left * seconds, self._ends[0][0]
            self.busy_seconds += left * seconds
            while self._ends and self._ends[0][0] <= self._iteration + TOLERANCE:
                done.append(self._finish(heapq.heappop(self._ends)[1]))
            self._fill()
        self._at = max(self._at, now)
        return done

    def _finish(self, rollout_id: int) -> Rollout:
        request, first, length = self._held.pop(rollout_id)
        self._lengths -= len(request.prompt_ids) - first
        self.tokens += length
        rollout = Rollout(
            rollout_id,
            request.group_id,
            request.prompt,
            np.zeros(length, np.int64),
            np.zeros(length, np.float32),
            self._stamps(first, length),
            "length" if length == self._limit else "stop",
            generator_id=self.name,
        )
        self.outbox.put([rollout], self._at)
        return rollout

    def _stamps(self, first: float, length: int) -> np.ndarray:
        """[length] the version that sampled each token."""
        stamps = np.zeros(length, np.int64)
        for since, version in self._versions:
            stamps[max(0, round(since - first)) :] = version
        return stamps

    def _fill(self) -> None:
        """Give free slots to waiting requests; siblings share one prefill."""
        groups = set()
        while self._waiting and len(self._ends) < self._slots:
            request = self._waiting.popleft()
            limit = min(self._limit, request.sampling.max_completion_length)
            length = min(self._world.lengths.length(request.seed), limit)
            self._held[request.rollout_id] = (request, self._iteration, length)
            self._lengths += len(request.prompt_ids) - self._iteration
            heapq.heappush(self._ends, (self._iteration + length, request.rollout_id))
            if request.group_id not in groups:
                groups.add(request.group_id)
                self._debt += self._world.costs.prefill(len(request.prompt_ids)) * self._factor

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int) -> None:
        """Does nothing: no weights are sent."""

    async def receive(self, ticket: Any) -> None:
        """No more than a message: the learner's transfer takes the time."""
        await self._world.message()

    async def load(self, version: int, cache: CacheMode, ticket: Any = None) -> None:
        await self._world.message()
        self.catch_up()
        self._loading = True
        self._world.at_work(self, False)
        await self._world.compute(self._world.costs.load * self._factor)
        self.catch_up()
        self._loading = False
        if cache == "recompute" and self._ends:
            context = round(self._lengths + len(self._ends) * self._iteration)
            self._debt += self._world.costs.prefill(context) * self._factor
        self.version = version
        oldest = min((first for _, first, _ in self._held.values()), default=self._iteration)
        kept = [i for i, (since, _) in enumerate(self._versions) if since <= oldest][-1:]
        self._versions = [*self._versions[kept[0] if kept else 0 :], (self._iteration, version)]

    def sleep(self, keep_weights: bool = True) -> None:
        self.catch_up()
        self._asleep = True
        self._world.at_work(self, False)

    def wake(self) -> None:
        self._asleep, self._at = False, self.clock()


class CostLearner:
    """A learner whose steps take the costs' seconds, from the batch's real token counts."""

    def __init__(self, world: World, spec: LearnerSpec) -> None:
        self.version = 0
        self._world = world

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        """Does nothing: no weights are sent."""

    async def snapshot(self, probe: Any) -> Offer:
        await self._world.message()
        await asyncio.sleep(self._world.costs.snapshot)
        return Offer(self._world.costs.snapshot)

    def sleep(self) -> int:
        return 0

    def wake(self) -> None:
        """Nothing was taken away."""

    async def ticket(self) -> Any:
        await self._world.message()
        return Ticket(self.version, 0, WeightManifest((), ()))

    async def transfer(self, ticket: Any) -> None:
        await self._world.message()
        await asyncio.sleep(self._world.costs.transfer)

    async def train(self, chosen: Sequence[Any], *bundles: Any, **recorded: Any) -> StepResult:
        world, conditions = self._world, self._world.conditions
        lengths = [len(r.prompt.token_ids) + len(r.response_ids) for bundle in bundles for r in bundle]
        seconds = world.costs.train(lengths)
        if conditions.hiccups and world.random.random() < conditions.hiccups * seconds / 3600:
            seconds += conditions.hiccup_seconds
        # The seconds of a step include the controller's work for it; other parts on its core have to wait for that.
        await asyncio.gather(world.train(seconds), world.message())
        self.version += 1
        return StepResult({"loss": 0.0, "sequences": float(len(lengths)), "tokens": float(sum(lengths))})


class CostAnnotator:
    """A reward, reference or critic worker; rewards are 0 or 1 at random."""

    def __init__(self, world: World, spec: AnnotatorSpec) -> None:
        self._world, self._kind = world, spec.kind

    async def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], Any]:
        tokens = sum(len(r.prompt.token_ids) + len(r.response_ids) for r in rollouts)
        world, costs = self._world, self._world.costs
        await world.message(len(rollouts))
        await asyncio.sleep(costs.submit)
        await world.compute(costs.score(self._kind, len(rollouts), tokens))
        await asyncio.sleep(costs.collect)
        if self._kind == "reward":
            return [Annotation(r.rollout_id, float(self._world.random.random() < 0.5)) for r in rollouts], []
        name = "ref_logprobs" if self._kind == "reference" else "values"
        answers = [np.zeros(len(r.response_ids), np.float32) for r in rollouts]
        return annotated(name, rollouts, answers, None if ticket is None else ticket.version)
