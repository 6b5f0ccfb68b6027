"""A seeded schedule of faults, injected wherever the controller awaits a part of the local runtime."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrlhf.actors.episodes import EpisodeSpec
from asyncrlhf.cluster.calls import START, under_way
from asyncrlhf.cluster.handles import (
    LONG_SECONDS,
    AnnotatorHandle,
    EpisodesHandle,
    GeneratorHandle,
    WorkerLostError,
    within,
)
from asyncrlhf.cluster.local_runtime import (
    LocalAnnotator,
    LocalEpisodes,
    LocalGenerator,
    LocalLearner,
    LocalRuntime,
    fetch_local,
)
from asyncrlhf.cluster.ray_calls import a_rank
from asyncrlhf.errors import ReplicaError
from asyncrlhf.records.write.rollout_rows import write_part
from asyncrlhf.transport.protocol import LostReceiversError
from asyncrlhf.types import Payload, Rollout

PASSES = 60_000  # awaits of one session after which it counts as spinning
SLOW_SECONDS = 6.0  # thirty times what a call takes on the average
START_SECONDS = 20.0  # that a process may take to start
LATE_SECONDS = (0.5, 3.0, 7.0, 15.0, 30.0)  # below and above the time limits of a simulated run

# What a fault does to the call that it meets. Those of the second line leave it without an end.
PASSING = ("kill", "slow", "late", "raise", "freeze a while", "lose receiver", "duplicate", "disorder")
ENDLESS = ("hang", "unanswered", "freeze")
KINDS = (*PASSING, *ENDLESS)
MESSAGES = ("begin", "sampled", "call off")  # to a worker that plays episodes


def suits(kind: str, verb: str) -> bool:
    """Whether a fault of the kind can meet a call of the verb."""
    if verb in ("restart", "fetch", "write_part"):
        return kind in ("raise",) if verb == "write_part" else kind in ("raise", "slow", "late", "hang")
    if verb == "connect":
        return kind in ("raise", "slow", "late", "hang", "lose receiver")
    if verb in ("submit", *MESSAGES):  # nothing waits for its answer, and a message to a living part arrives
        return kind in ("kill", "slow", "raise", "freeze a while", "freeze")
    allowed = {"lose receiver": ("transfer",), "duplicate": ("collect",), "disorder": ("collect", "annotate")}
    return verb in allowed.get(kind, (verb,))


class PlannedError(Exception):
    """What a part of the run raises of its own accord."""


class SpinError(BaseException):
    """The loops go round without end."""


@dataclass(frozen=True)
class Fault:
    number: int
    kind: str
    part: str
    verb: str
    at: float

    def __str__(self) -> str:
        return f"fault {self.number} ({self.kind} in {self.verb} of {self.part})"


@dataclass
class Faults:
    """One session's. ``kinds`` and ``verbs`` are those allowed, ``rate`` the chance of one at each await, ``most`` how
    many there may be. ``crash`` is called at await number ``crash_at``."""

    rng: random.Random
    kinds: Sequence[str] = KINDS
    parts: Sequence[str] = ()  # beginnings of names; empty: all
    rate: float = 0.0
    most: int = 0
    crash_at: int = -1
    crash: Callable[[], None] = lambda: None
    tell: Callable[[str], None] = lambda text: None
    told_passes: bool = False
    fired: list[Fault] = field(default_factory=list)
    passes: int = 0
    under_way: int = 0  # calls that wait for an end of their own, or for a delay

    def draw(self, part: str, verb: str) -> Fault | None:
        """The fault that meets this call."""
        self.passes += 1
        now = asyncio.get_running_loop().time()
        if self.told_passes:
            self.tell(f"{part} {verb}")
        if self.passes == self.crash_at:
            self.crash()
        if self.passes > PASSES:
            raise SpinError(f"{PASSES} calls of parts, the last of {part}: {verb}")
        struck = self.rng.random() < self.rate and len(self.fired) < self.most
        if not struck or (self.parts and not part.startswith(tuple(self.parts))):
            return None
        able = [k for k in self.kinds if suits(k, verb)]
        if not able:
            return None
        fault = Fault(len(self.fired), self.rng.choice(able), part, verb, now)
        self.fired.append(fault)
        self.tell(f"{fault}")
        return fault

    async def around(self, part: Any, verb: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """The answer of ``call``, as the fault leaves it. ``part`` has a name and may be a :class:`Mortal`."""
        mortal = part if isinstance(part, Mortal) else Mortal()
        if verb == "collect":  # which waits for nothing but work
            return await self._met(part, mortal, verb, call)
        self.under_way += 1
        try:
            return await self._met(part, mortal, verb, call)
        finally:
            self.under_way -= 1

    async def _met(self, part: Any, mortal: Mortal, verb: str, call: Callable[[], Awaitable[Any]]) -> Any:
        await mortal.thawed()
        fault = self.draw(part.name, verb)
        kind = "" if fault is None else fault.kind
        if kind == "raise":
            raise PlannedError(str(fault))
        if kind == "kill":
            mortal.die(str(fault))
            raise ReplicaError(f"{part.name} died: {fault}")
        if kind == "lose receiver":
            lost = self.rng.choice(part.runtime.generators).name
            raise LostReceiversError("the transfer failed", {lost: f"gave no answer ({fault})"})
        if kind in ("hang", "slow"):
            self.under_way += 1
            try:
                await (for_ever() if kind == "hang" else asyncio.sleep(SLOW_SECONDS))
            finally:
                self.under_way -= 1
        if kind.startswith("freeze"):
            mortal.freeze()
            if kind == "freeze a while":
                asyncio.get_running_loop().call_later(self.rng.choice(LATE_SECONDS), mortal.thaw)
        await mortal.thawed()
        answer = await call()
        if kind in ("unanswered", "late") or mortal._thaw is not None:
            mortal.carried += 1
            self.under_way += 1
            try:
                if kind == "unanswered":
                    await for_ever()
                if kind == "late":
                    await asyncio.sleep(self.rng.choice(LATE_SECONDS))
                await mortal.thawed()
            finally:
                mortal.carried -= 1
                self.under_way -= 1
        return self._changed(kind, answer)

    def _changed(self, kind: str, answer: Any) -> Any:
        if kind == "disorder" and isinstance(answer, tuple):  # annotations, and where their arrays lie
            self.rng.shuffle(answer[0])
        elif kind == "disorder":
            self.rng.shuffle(answer.finished)
        elif kind == "duplicate":
            again = [replace(info) for info in answer.finished]
            answer = replace(answer, finished=[*answer.finished, *again])
        return answer


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


class Mortal:
    """What may die and freeze."""

    name: str
    _thaw: asyncio.Event | None = None
    carried = 0  # answers that are held back on their way
    worker: Any

    def die(self, cause: str) -> None: ...

    def freeze(self) -> None:
        if self._thaw is None:
            self._thaw = asyncio.Event()
            if hasattr(getattr(self, "worker", None), "frozen"):
                self.worker.frozen = True

    def thaw(self) -> None:
        if self._thaw is not None:
            self._thaw.set()
            self._thaw = None
            if hasattr(getattr(self, "worker", None), "frozen"):
                self.worker.frozen = False

    async def ping(self, seconds: float) -> None:
        """A frozen process gives no sign of life."""
        await within(seconds, self.name, "ping", self.thawed())
        await super().ping(seconds)  # type: ignore[misc]

    async def thawed(self) -> None:
        """Wait while the part is frozen; raises ReplicaError when it was ended meanwhile."""
        while self._thaw is not None:
            await self._thaw.wait()
            self.still_there()

    def still_there(self) -> None: ...


class FaultyGenerator(Mortal, LocalGenerator):
    """A replica as Ray hosts it: work is sent and not awaited, and what that raised comes out of ``collect``."""

    def __init__(self, faults: Faults, runtime: LocalRuntime, spec: Any, worker: Any, told: Any) -> None:
        self.faults, self.runtime = faults, runtime
        self._submitting: set[asyncio.Task[None]] = set()
        self._again: list[Any] = []
        self._error: BaseException | None = None
        super().__init__(spec, worker, told)

    def die(self, cause: str) -> None:
        self.kill(cause)

    def kill(self, cause: str = "killed") -> None:
        super().kill(cause)
        self.thaw()

    def still_there(self) -> None:
        self._check()

    def thaw(self) -> None:
        super().thaw()
        self._changed.notify()

    async def call(self, seconds: float, method: Any, /, *args: Any, **kwargs: Any) -> Any:
        verb = method.__name__

        async def real() -> Any:
            return await LocalGenerator.call(self, seconds, method, *args, **kwargs)

        return await within(seconds, self.name, verb, self.faults.around(self, verb, real))

    async def submit(self, items: Any) -> None:
        task = asyncio.create_task(self._deliver(items), name=f"message to {self.name}")
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)

    async def _deliver(self, items: Any) -> None:
        try:
            await LocalGenerator.submit(self, items)
        except ReplicaError:
            pass  # it is dead, as collect says
        except PlannedError as error:
            self._error = error
            self._changed.notify()

    def _ended(self) -> bool:
        return self._error is not None or super()._ended()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        super()._check()

    async def collect(self) -> Any:
        return await self.faults.around(self, "collect", lambda: LocalGenerator.collect(self))

    async def generate(self, items: Any) -> list[Rollout]:
        return await self.faults.around(self, "generate", lambda: LocalGenerator.generate(self, items))

    async def close(self) -> None:
        self.thaw()
        for task in list(self._submitting):
            task.cancel()
        await asyncio.gather(*self._submitting, return_exceptions=True)
        await super().close()


class FaultyAnnotator(Mortal, LocalAnnotator):
    """A worker that is started again when it dies or does not answer, up to its ``max_restarts``, as on Ray."""

    def __init__(self, faults: Faults, spec: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.faults, self._spec, self._deaths = faults, spec, 0

    async def call(self, seconds: float, method: Any, /, *args: Any, **kwargs: Any) -> Any:
        verb = method.__name__

        async def real() -> Any:
            return await LocalAnnotator.call(self, seconds, method, *args, **kwargs)

        try:
            answer = await within(seconds, self.name, verb, self.faults.around(self, verb, real))
        except ReplicaError as error:
            self._deaths += 1
            self.thaw()
            if self._deaths > self._spec.max_restarts:
                raise WorkerLostError(f"{error} It is not started again (max_restarts).") from error
            raise
        self._deaths = 0
        return answer


class FaultyEpisodes(Mortal, LocalEpisodes):
    """A worker as Ray hosts it: messages are sent and not awaited, and what one raised comes out of ``collect``."""

    def __init__(self, faults: Faults, runtime: LocalRuntime, spec: EpisodeSpec, name: str, build: Any) -> None:
        super().__init__(name, build, runtime.told)
        self.faults, self.runtime, self._spec = faults, runtime, spec
        self.messages: list[Callable[[], None]] = []  # that wait until it thaws
        self._error: PlannedError | None = None
        self._deaths = 0

    @property
    def holds(self) -> set[int]:
        """Episodes that are under way here, or of which its next news will tell."""
        worker = self.worker
        told = [*worker._wanted, *worker._finished, *worker._failed]
        return worker._tasks.keys() | {one.rollout_id for one in told}

    @property
    def ended(self) -> bool:
        return self._killed.is_set() or self._error is not None

    def die(self, cause: str) -> None:
        self.kill()
        self.thaw()

    def still_there(self) -> None:
        if self._error is not None:
            raise self._error
        if self._killed.is_set():
            raise ReplicaError(f"{self.name} is dead")

    def thaw(self) -> None:
        super().thaw()
        messages, self.messages = self.messages, []
        for message in messages:
            self._arrive(message)

    def begin(self, items: Any) -> None:
        self._send("begin", lambda: LocalEpisodes.begin(self, items))

    def sampled(self, turns: Any) -> None:
        self._send("sampled", lambda: LocalEpisodes.sampled(self, turns))

    def cancel(self, rollout_ids: Any) -> None:
        self._send("call off", lambda: LocalEpisodes.cancel(self, rollout_ids))

    def _send(self, verb: str, message: Callable[[], None]) -> None:
        fault = self.faults.draw(self.name, verb)
        kind = "" if fault is None else fault.kind
        if kind == "raise":
            self._error = PlannedError(str(fault))
            self._killed.set()
        if kind == "kill":
            self.die(str(fault))
        if kind.startswith("freeze"):
            self.freeze()
            if kind == "freeze a while":
                asyncio.get_running_loop().call_later(self.faults.rng.choice(LATE_SECONDS), self.thaw)
        if self._thaw is not None:
            self.messages.append(message)
        else:
            self._arrive(message)

    def _arrive(self, message: Callable[[], None]) -> None:
        if not self.ended:
            message()

    async def collect(self) -> Any:
        return await within(LONG_SECONDS, self.name, "collect", self.faults.around(self, "collect", self._look))

    async def _look(self) -> Any:
        """It answers after a while, with news or without, as on Ray."""
        self.still_there()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._spec.stall_seconds / 5):  # wait_for may swallow a cancellation
                await self.worker.changed.wait()
        self.still_there()
        return self._news()

    def kill(self) -> None:
        super().kill()
        self.worker.changed.set()  # a collect that waits for news hears of it

    async def restart(self, error: ReplicaError, counts: bool = True) -> None:
        self.die("ended")
        self._deaths += counts
        if self._deaths > self._spec.max_restarts:
            raise WorkerLostError(f"{error} It is not started again (max_restarts).") from error

        async def real() -> None:
            self._error = None
            await LocalEpisodes.restart(self, error)

        try:
            async with asyncio.timeout(START_SECONDS) as limit:
                with under_way(self.name, START, (), limit):
                    await self.faults.around(Place(self.name, self.runtime), "restart", real)
        except (PlannedError, TimeoutError) as failure:
            raise WorkerLostError(f"{self.name} could not start: {failure} It had died before: {error}") from failure


class FaultyLearner(Mortal, LocalLearner):
    """A rank as on Ray: whatever ends a call without an answer is its death, and with it the group's."""

    def __init__(self, faults: Faults, runtime: LocalRuntime, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.faults, self.runtime = faults, runtime

    def die(self, cause: str) -> None:
        self.kill(cause)
        self.thaw()

    def still_there(self) -> None:
        self._check()

    async def _around(self, verb: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self._check()
        return await self.faults.around(self, verb, call)

    async def call(self, seconds: float, method: Any, /, *args: Any, **kwargs: Any) -> Any:
        verb = method.__name__

        async def real() -> Any:
            return await LocalLearner.call(self, seconds, method, *args, **kwargs)

        with a_rank():
            return await within(seconds, self.name, verb, self._around(verb, real))

    def snapshot(self, probe: Any) -> Awaitable[Any]:
        offer = super().snapshot(probe)  # ordered at once
        return asyncio.ensure_future(self._offered(offer))

    async def _offered(self, offer: Awaitable[Any]) -> Any:
        with a_rank():
            return await within(LONG_SECONDS, self.name, "snapshot", self._around("snapshot", lambda: offer))


@dataclass
class Place:
    """Stands for a part where the runtime itself is asked."""

    name: str
    runtime: Any = None


class FaultyRuntime(LocalRuntime):
    """The local runtime, whose every part and every own call may fail."""

    def __init__(self, faults: Faults, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.faults = faults

    def _learner(self) -> LocalLearner:
        spec = self._specs.learner
        return FaultyLearner(self.faults, self, spec, self._workers.learner(spec), self.told)

    async def restart_learner(self) -> None:
        """Its start may fail, which says so as on Ray."""
        dead: Any = self.learner
        dead.die("started again")

        async def real() -> None:
            self.learner = self._learner()

        try:
            await self.faults.around(Place(dead.name, self), "restart", real)
        except PlannedError as error:
            raise ReplicaError(f"{dead.name} could not start: {error}") from error

    def _annotators(self, spec: Any) -> list[AnnotatorHandle]:
        made: Any = super()._annotators(spec)
        return [FaultyAnnotator(self.faults, spec, m.name, m.worker, spec.answer_seconds, self.told) for m in made]

    def _episodes(self, spec: EpisodeSpec | None) -> list[EpisodesHandle]:
        made: Any = super()._episodes(spec)
        return [FaultyEpisodes(self.faults, self, spec, m.name, m._build) for m in made]  # type: ignore[arg-type]

    def _generator(self, spec: Any) -> LocalGenerator:
        worker = self._workers.generator(spec, asyncio.get_running_loop().time)
        return FaultyGenerator(self.faults, self, spec, worker, self.told)

    async def connect(self, receivers: Sequence[GeneratorHandle], workers: int = 0) -> int:
        """The learner's rank 0 forms the group, and is who hangs."""
        place = Place("weight group", self)
        formed = self.faults.around(place, "connect", lambda: LocalRuntime.connect(self, receivers, workers))
        with a_rank():
            return await within(LONG_SECONDS, self.learner.name, "connect", formed)

    async def restart(self, dead: GeneratorHandle) -> GeneratorHandle:
        """A restart that fails says so as on Ray, by a ReplicaError."""

        async def real() -> GeneratorHandle:
            return await LocalRuntime.restart(self, dead)

        try:
            return await self.faults.around(Place(dead.name, self), "restart", real)
        except PlannedError as error:
            raise ReplicaError(f"{dead.name} could not start: {error}") from error

    async def fetch(self, payloads: Sequence[Payload]) -> list[Rollout]:
        async def real() -> list[Rollout]:
            return fetch_local(payloads)

        place = Place("the object store", self)
        return await within(LONG_SECONDS, place.name, "fetch", self.faults.around(place, "fetch", real))

    def write_part(self, target: Path, rows: Any, payloads: Any) -> Future[None]:
        """In place: with a thread beside the loop no run would be the same again."""
        written: Future[None] = Future()
        fault = self.faults.draw("record writer", "write_part")
        if fault is not None:
            written.set_exception(OSError(28, f"No space left on device: {fault}"))
        else:
            write_part(target, rows, [None if p is None else p.ref[p.index] for p in payloads])
            written.set_result(None)
        return written
