"""What simulated parts share: the costs and lengths of their work, the conditions, the cores, and who is at work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncrlhf.cluster.clock import Signal

TOLERANCE = 1e-9  # CPU seconds


class Replica(Protocol):
    """A simulated replica as the others see it."""

    working: bool  # on a core, sampling

    def catch_up(self) -> object:
        """Do the work that the time since the last call allows."""
        ...


class Costs(Protocol):
    """Seconds of everything that takes time in a run, as ``planner.costs.CostModel`` and ``planner.tables.Fitted``
    compute them. Lengths are tokens of prompt and response."""

    @property
    def snapshot(self) -> float: ...

    @property
    def transfer(self) -> float: ...

    @property
    def load(self) -> float: ...

    @property
    def submit(self) -> float: ...

    @property
    def collect(self) -> float: ...

    @property
    def call(self) -> float:
        """CPU seconds of the controller and the called part for one call."""
        ...

    @property
    def message(self) -> float:
        """CPU seconds of the controller for one rollout in one call."""
        ...

    def decode(self, running: float, context: float) -> float:
        """One iteration of a replica with ``running`` sequences of mean length ``context``."""
        ...

    def prefill(self, tokens: int) -> float: ...

    def train(self, lengths: Sequence[int]) -> float: ...

    def score(self, kind: str, rollouts: int, tokens: int) -> float:
        """``kind``: reward, reference or critic."""
        ...


class Lengths(Protocol):
    """Response lengths in tokens; ``planner.shapes.Workload``."""

    def length(self, seed: int) -> int:
        """The length of the request with this seed, which no admission policy changes."""
        ...


@dataclass(frozen=True)
class Cores:
    """The cores of one machine.

    Args:
        shared: number of cores that the parts share; less than whole ones if other processes need some of them.
        learner: threads of the learner among them; 0: it has cores of its own.
        cold: CPU seconds that each second of waiting for a core adds, because its caches have other threads' data then.
    """

    shared: float
    learner: int = 0
    cold: float = 0.0


@dataclass(frozen=True)
class Conditions:
    """Disturbances of a run.

    Args:
        slow: factor on the seconds of single replicas, by name.
        hiccups: stops of the learner per hour, of ``hiccup_seconds`` each.
        interference: factors on the seconds of (learner, generators) while the other side works too.
        cohort: number of equal replicas that each simulated one represents.
        cores: the cores that all parts share; None: each part has its own.
        linger: seconds between two answers of a replica with results, while it has more work.
        maps: replicas load from the learner's memory, without transfers.
    """

    slow: dict[str, float] = field(default_factory=dict)
    hiccups: float = 0.0
    hiccup_seconds: float = 0.2
    interference: tuple[float, float] = (1.0, 1.0)
    cohort: float = 1
    cores: Cores | None = None
    linger: float = 0.0
    maps: bool = False


class SharedCores:
    """Processor sharing. The speed of all threads is constant between two calls of ``before``, which is called before
    each change of it; ``after`` is called afterwards."""

    def __init__(self, cores: Cores, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._cores, self._cold, self._before, self._after = cores.shared, cores.cold, before, after
        self._threads = 0
        self._changed = Signal()

    @property
    def share(self) -> float:
        """CPU seconds that each thread gets per second."""
        return min(1.0, self._cores / max(1, self._threads))

    @property
    def warm_share(self) -> float:
        """Of them those that a thread without pauses would need for the same work; at least half."""
        return max(self.share / 2, self.share - self._cold * (1.0 - self.share))

    def add(self, threads: int) -> None:
        """So many more threads work from now on; negative: fewer."""
        same = max(self._threads, self._threads + threads) <= self._cores
        if not same:
            self._before()
        self._threads += threads
        if not same:
            self._changed.notify()
            self._after()

    async def compute(self, seconds: float, threads: int = 1) -> None:
        """Take ``seconds`` of CPU time in each of ``threads`` threads."""
        loop = asyncio.get_running_loop()
        self.add(threads)
        try:
            while seconds > TOLERANCE:
                began, share = loop.time(), self.share
                timer = loop.call_at(began + seconds / share, self._changed.notify)
                await self._changed.wait_past(self._changed.count)
                timer.cancel()
                seconds -= (loop.time() - began) * share
        finally:
            self.add(-threads)


class World:
    """The state that the parts share: costs, lengths, conditions, and who is at work."""

    def __init__(self, costs: Costs, lengths: Lengths, conditions: Conditions, seed: int) -> None:
        self.costs, self.lengths, self.conditions = costs, lengths, conditions
        self.random = random.Random(seed)
        self.training = False
        self.generators: dict[str, Replica] = {}
        self.wake: dict[str, Callable[[], None]] = {}  # by replica: look again when the next sequence ends
        given = conditions.cores
        self._cores = None if given is None else SharedCores(given, self._catch_up, self._wake)
        self._controller = asyncio.Lock()

    def _catch_up(self) -> None:
        for generator in self.generators.values():
            generator.catch_up()

    def _wake(self) -> None:
        for wake in self.wake.values():
            wake()

    @property
    def slowdown(self) -> float:
        """The factor on a replica's seconds from what else works at present."""
        beside = self.conditions.interference[1] if self.training else 1.0
        return beside / (1.0 if self._cores is None else self._cores.warm_share)

    def at_work(self, replica: Replica, working: bool) -> None:
        """The replica begins or ends to use a core."""
        if working != replica.working:
            if self._cores is not None:
                self._cores.add(1 if working else -1)
            replica.working = working

    async def compute(self, seconds: float) -> None:
        """A thread that takes ``seconds`` of a core."""
        await (asyncio.sleep(seconds) if self._cores is None else self._cores.compute(seconds))

    async def message(self, rollouts: int = 0) -> None:
        """The controller's work for one call with so many rollouts; it does one thing at a time."""
        if seconds := self.costs.call + rollouts * self.costs.message:
            async with self._controller:
                await self.compute(seconds)

    async def train(self, seconds: float) -> None:
        """A learner step, which may change the speed of replicas on the same machine."""
        if self.conditions.interference[1] != 1.0:
            self._catch_up()
        self.training = True
        if any(generator.working for generator in self.generators.values()):
            seconds *= self.conditions.interference[0]
        given = self.conditions.cores
        if self._cores is not None and given is not None and given.learner:
            await self._cores.compute(seconds, given.learner)
        else:
            await asyncio.sleep(seconds)
        if self.conditions.interference[1] != 1.0:
            self._catch_up()
        self.training = False
        if self.conditions.interference[1] != 1.0:
            self._wake()
