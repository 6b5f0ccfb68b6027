"""The parts of a Ray run as the controller sees them: one handle per actor (or group of ranks)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, Generic

import numpy as np
import ray
from ray.exceptions import RayError

from asyncrlhf.actors.annotator import AnnotatorActor, AnnotatorSpec, AnnotatorWorker
from asyncrlhf.actors.generator import GeneratorActor
from asyncrlhf.actors.learner import LearnerActor, LearnerSpec, LearnerWorker
from asyncrlhf.actors.messages import Address, Alike, Collected, Offer, Told, placed
from asyncrlhf.actors.where import Where
from asyncrlhf.actors.worker import GeneratorSpec, GeneratorWorker, located
from asyncrlhf.cluster.handles import LONG_SECONDS, Hear, P, R, W, WorkerLostError, ignore, within
from asyncrlhf.cluster.ray_calls import START_SECONDS, a_rank, ask, ask_to_start, first, together
from asyncrlhf.data.checkpoint_manifest import Seals
from asyncrlhf.data.packing import share_out
from asyncrlhf.errors import ReplicaError
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.readahead.owners import ChunkInfo, Prefilled
from asyncrlhf.records.write.spans import SpanBatch
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import Annotation, GenerationRequest, Payload, Rollout, RolloutInfo

Options = Mapping[str, Any]  # Ray's, of one actor: what it asks for and where it sits
CLOSE_SECONDS = 5.0
PING = "ping"  # a thread of each actor's own for this, so that work does not delay the ping's answer


def actor_class(kind: type, **options: Any) -> Any:
    """``kind`` as a class of actors with these options of Ray's."""
    return ray.remote(concurrency_groups={PING: 1}, **options)(kind)  # type: ignore[call-overload]


class RayPart(Generic[W]):
    """A worker of class ``W`` in a Ray actor, which derives from :class:`~asyncrlhf.actors.part.PartActor`."""

    def __init__(self, name: str, actor: Any, start_seconds: float = START_SECONDS) -> None:
        self.name = name
        self.actor = actor
        self.told: Hear = ignore
        self._start_seconds = start_seconds

    def hear(self, batches: Sequence[SpanBatch], sent: float) -> None:
        """Pass on the spans of an answer that has just arrived, to a request sent at ``sent``."""
        now = asyncio.get_running_loop().time()
        for batch in batches:
            self.told(batch, sent, now)

    async def ready(self) -> None:
        """Wait until the worker is built. Raises ReplicaError if that fails or takes too long."""
        await ask_to_start(self.name, self.actor.ready.remote(), self._start_seconds)

    async def where(self) -> Where:
        """Where Ray placed the actor."""
        return await ask(self.name, self.actor.where.remote(), self._start_seconds, "where")

    async def call(
        self, seconds: float, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """As :class:`~asyncrlhf.cluster.handles.Remote`; Ray replaces object references by the objects."""
        verb = method.__name__
        return await ask(self.name, self.send(verb, *args, **kwargs), seconds, verb)

    async def ping(self, seconds: float) -> None:
        """As :class:`~asyncrlhf.cluster.handles.Remote`."""
        await ask(self.name, self.actor.ping.options(concurrency_group=PING).remote(), seconds, PING)

    def send(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Send a call without awaiting its answer; returns the reference to the answer."""
        return self.actor.call.remote(verb, *args, **kwargs)

    async def close(self) -> None:
        """Close the worker, then end its process in any case."""
        sent = asyncio.get_running_loop().time()
        with suppress(ReplicaError, RayError):  # it is gone already, hangs, or failed to close
            self.hear(await within(CLOSE_SECONDS, self.name, "close", self.actor.close.remote()), sent)
        ray.kill(self.actor)


def addressed(payloads: Sequence[Payload]) -> tuple[tuple[Address, ...], list[Any]]:
    """The address of each rollout or chunk among the distinct object references behind ``payloads``, and these. Long
    arguments of a call are tuples: Ray serializes each element of a list by itself, and a tuple as a whole."""
    places: dict[Any, int] = {}

    def place(payload: Payload) -> tuple[int, int]:
        return places.setdefault(payload.ref, len(places)), payload.index

    addresses = tuple((place(p), *(place(annotation) for annotation in p.annotations)) for p in payloads)
    return addresses, list(places)


class RayGenerator(RayPart[GeneratorWorker]):
    def __init__(
        self, spec: GeneratorSpec, options: Options | None = None, start_seconds: float = START_SECONDS
    ) -> None:
        own = {"num_cpus": spec.generator.threads, "num_gpus": spec.generator.gpus} if options is None else options
        actor = actor_class(GeneratorActor, max_concurrency=8, **own).remote(spec)
        super().__init__(spec.name, actor, start_seconds)
        self.spec, self.slots = spec, spec.generator.slots
        self.beat = 0.0  # tokens, as of its last word
        self._submitted: list[Any] = []

    async def submit(self, items: Sequence[GenerationRequest]) -> None:
        """Waits for no answer: a replica that hangs must not delay the others. ``collect`` raises its errors."""
        self._submitted.append(self.send("submit", Alike(items)))

    async def collect(self) -> Collected:
        """The payload is a return value of its own: this process owns it, so that it outlives the replica."""
        submitted, self._submitted = self._submitted, []
        values, sent = 3 if self.spec.chunk_tokens else 2, asyncio.get_running_loop().time()
        facts, rollouts, *chunks = self.actor.collect.options(num_returns=values).remote()
        collected: Collected = await ask(self.name, facts, LONG_SECONDS, "collect")
        for reference in submitted:
            await ask(self.name, reference, LONG_SECONDS, "submit")
        self.beat = float(collected.tokens)
        if collected.spans is not None:
            self.hear([collected.spans], sent)
        return located(collected, rollouts, next(iter(chunks), None), asyncio.get_running_loop().time())

    async def submit_turns(self, turns: Sequence[Payload]) -> None:
        addresses, bundles = addressed(turns)
        self._submitted.append(self.actor.turns.remote(addresses, *bundles))

    async def generate(self, items: Sequence[GenerationRequest]) -> list[Rollout]:
        ids = [item.rollout_id for item in items]
        submitted = self.call(LONG_SECONDS, GeneratorWorker.submit, items)
        return await within(LONG_SECONDS, self.name, "generate", self._answers(submitted, ids), ids)

    async def generate_turn(self, rollout_id: int, turn: Payload) -> list[Rollout]:
        addresses, bundles = addressed([turn])
        submitted = ask(self.name, self.actor.turns.remote(addresses, *bundles), LONG_SECONDS, "submit")
        return await within(LONG_SECONDS, self.name, "generate", self._answers(submitted, [rollout_id]), [rollout_id])

    async def _answers(self, submitted: Awaitable[None], ids: Sequence[int]) -> list[Rollout]:
        """Ask repeatedly, so that the replica's progress (``beat``) is known."""
        await submitted
        while True:
            found, self.beat = await ask(self.name, self.actor.answers.remote(ids), LONG_SECONDS, "answers")
            if found is not None:
                return found


class RayRank(RayPart[LearnerWorker]):
    """One rank of the learner. It runs several calls at a time and may begin them in any order, so that each call
    carries the number of snapshots requested before it. Its death raises LearnerLostError."""

    def __init__(self, spec: LearnerSpec, rank: int, options: Options, start_seconds: float) -> None:
        actor = actor_class(LearnerActor, max_concurrency=5, **options).remote(spec, rank, spec.learner.ranks)
        super().__init__(f"learner-{rank}", actor, start_seconds)
        self._snapshots = 0

    def send(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        sent = super().send(verb, *args, snapshots=self._snapshots, **kwargs)
        self._snapshots += verb == "snapshot"
        return sent

    async def call(
        self, seconds: float, method: Callable[Concatenate[LearnerWorker, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        with a_rank():
            return await super().call(seconds, method, *args, **kwargs)

    async def snapshot(self, asked: Any) -> Offer:
        """The offer of the rank for a snapshot that :meth:`send` requested."""
        with a_rank():
            offer: Offer = await ask(self.name, asked, LONG_SECONDS, "snapshot")
            return offer

    def train(self, *arguments: Any, **keywords: Any) -> Awaitable[StepResult]:
        """The rank's part in a step; the call is sent before this returns."""
        sent = asyncio.get_running_loop().time()
        return self._trained(self.actor.step.remote(*arguments, snapshots=self._snapshots, **keywords), sent)

    async def _trained(self, asked: Any, sent: float) -> StepResult:
        with a_rank():
            told: Told[StepResult] = await ask(self.name, asked, LONG_SECONDS, "train")
        self.hear(told.spans, sent)
        return told.answer


class RayLearner:
    """All ranks take part in every step; only rank 0 sends weights and answers calls that need one answer."""

    def __init__(self, spec: LearnerSpec, options: Sequence[Options], start_seconds: float) -> None:
        """``options``: of each rank."""
        self.ranks = [RayRank(spec, rank, own, start_seconds) for rank, own in enumerate(options)]
        self.name, self._spec = self.ranks[0].name, spec
        self._sharded, self._shares = spec.learner.sharded, spec.learner.shares
        self._start_seconds = start_seconds
        self._host = ""

    async def ready(self) -> None:
        """Raises ReplicaError naming a rank that does not start."""
        seconds = self._start_seconds
        address: str = await ask_to_start(self.name, self.ranks[0].actor.rendezvous.remote(), seconds)
        self._host = address.rpartition(":")[0]
        await asyncio.gather(*(ask_to_start(r.name, r.actor.setup.remote(address), seconds) for r in self.ranks))

    async def listen(self) -> str:
        """The endpoint at which receivers join the weight group."""
        return await self.call(self._start_seconds, LearnerWorker.listen, self._host)

    async def keep_to(self, cores: Sequence[Collection[int]]) -> None:
        """Bind each rank to its cores."""
        bound = zip(self.ranks, cores, strict=True)
        await asyncio.gather(*(rank.call(self._start_seconds, LearnerWorker.keep_to, own) for rank, own in bound))

    async def blind(self, folder: Path) -> list[str]:
        """Addresses of the ranks' machines on which the folder does not exist."""
        seen = await self.every(self._start_seconds, LearnerWorker.sees, str(folder.resolve()))
        places = await asyncio.gather(*(rank.where() for rank in self.ranks))
        return sorted({place.address for place, sees in zip(places, seen, strict=True) if not sees})

    async def call(
        self, seconds: float, method: Callable[Concatenate[LearnerWorker, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """As :class:`~asyncrlhf.cluster.handles.Remote`, of rank 0."""
        return await self.ranks[0].call(seconds, method, *args, **kwargs)

    async def ping(self, seconds: float) -> None:
        """Raises ReplicaError naming a rank that does not respond."""
        await asyncio.gather(*(rank.ping(seconds) for rank in self.ranks))

    async def every(
        self, seconds: float, method: Callable[Concatenate[LearnerWorker, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        return await together([rank.call(seconds, method, *args, **kwargs) for rank in self.ranks])

    async def train(self, rollouts: Sequence[RolloutInfo]) -> StepResult:
        """Each rank is sent only its share of the batch; ranks that split one share over its tokens get the same."""
        groups, tokens = np.array([r.group_id for r in rollouts]), np.array([r.tokens for r in rollouts])
        shares = [_chosen([rollouts[i] for i in own]) for own in share_out(groups, tokens, self._shares)]
        size = len(self.ranks) // self._shares
        # Sent before anything is awaited: a snapshot that is requested later must come after the step.
        steps = []
        for number, rank in enumerate(self.ranks):
            chosen, references = shares[number // size]
            steps.append(rank.train(chosen, *references, **self._spec.recorded(rollouts)))
        return await first(steps)

    def snapshot(self, probe: Sequence[np.ndarray] | None) -> Awaitable[Offer]:
        """Rank 0's offer; if the ranks hold shards, all of them take part."""
        asked = [(rank, rank.send("snapshot", probe)) for rank in (self.ranks if self._sharded else self.ranks[:1])]
        return first([rank.snapshot(reference) for rank, reference in asked])

    async def save(self, folder: Path) -> None:
        await self.every(LONG_SECONDS, LearnerWorker.save, folder.resolve())

    async def saved(self) -> Seals:
        """Each rank has hashed the files that it wrote."""
        ranks = await self.every(LONG_SECONDS, LearnerWorker.saved)
        return {name: facts for own in ranks for name, facts in own.items()}

    async def load(self, folder: Path) -> None:
        await self.every(LONG_SECONDS, LearnerWorker.load, folder.resolve())

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self.ranks))


def _chosen(rollouts: Sequence[RolloutInfo]) -> tuple[tuple[tuple[Address, float, float, int], ...], list[Any]]:
    """The argument ``chosen`` of ``LearnerWorker.train``, whose addresses refer to the bundles returned with it."""
    addresses, references = addressed([r.payload for r in rollouts])
    found = zip(addresses, rollouts, strict=True)
    return tuple((address, r.reward, r.weight, r.masked_before_version) for address, r in found), references


class RestartedPart(RayPart[W]):
    """A part whose process is replaced when it dies or freezes, at most ``max_restarts`` times without success in
    between: a subclass then sets ``_deaths`` to 0."""

    # Called with the worker's name before a restart: waits for its node and devices, and returns the options anew.
    renew: Callable[[str], Awaitable[Options]] | None = None

    def __init__(self, name: str, options: Options, start_seconds: float, max_restarts: int) -> None:
        self._options, self._max_restarts = options, max_restarts
        self._deaths = self.restarts = 0
        super().__init__(name, self._start(name), start_seconds)

    def _start(self, name: str) -> Any:
        """A new actor with ``_options``."""
        raise NotImplementedError

    async def _revive(self, error: ReplicaError, counts: bool = True) -> None:
        """Replace the process after ``error``. Raises WorkerLostError if it has died too often, or cannot be started;
        a death that does not count (``counts``) is none of those."""
        self._deaths += counts
        ray.kill(self.actor)
        if self._deaths > self._max_restarts:
            raise WorkerLostError(f"{error} It is not started again (max_restarts).") from error
        self.restarts += 1
        try:
            self._options = await self.renew(self.name) if self.renew else self._options
            self.actor = self._start(self.name)
            await self.ready()
        except ReplicaError as failure:
            raise WorkerLostError(f"{failure} It had died before: {error}") from failure


class RayAnnotator(RestartedPart[AnnotatorWorker]):
    """Restarts its worker also when it has not answered for ``spec.answer_seconds``. Ray's own retries would hide which
    call killed it. ``survived``: called with its name and its death when its call is repeated."""

    survived: Callable[[str, ReplicaError], None] = staticmethod(lambda name, error: None)

    def __init__(self, spec: AnnotatorSpec, number: int, options: Options, start_seconds: float) -> None:
        self._spec = spec
        self._asked = 0  # calls under way
        self._replaced: ReplicaError | None = None  # a death that no caller heard of
        self._mourned: Any = None  # the last actor whose death was told; it may have held several calls
        super().__init__(f"{spec.kind}-{number}", options, start_seconds, spec.max_restarts)

    def _start(self, name: str) -> Any:
        return actor_class(AnnotatorActor, **self._options).remote(self._spec, name)

    async def annotate(self, payloads: Sequence[Payload], ticket: Ticket | None = None) -> list[Annotation]:
        """The first death may have any cause: the call is repeated once before its rollouts are blamed."""
        addresses, bundles = addressed(payloads)
        arrays, sent, asked = None, asyncio.get_running_loop().time(), self.actor

        def call() -> Any:
            # The arrays' owner is this process, so they outlive the worker.
            nonlocal arrays
            told, arrays = self.actor.annotate.options(num_returns=2).remote(addresses, ticket, *bundles)
            return told

        try:
            told: Told[list[Annotation]] = await self._once("annotate", call)
        except WorkerLostError:
            raise
        except ReplicaError as error:
            if self._deaths > 1:
                raise
            if asked is not self._mourned:
                self._mourned = asked
                self.survived(self.name, error)
            sent = asyncio.get_running_loop().time()
            told = await self._once("annotate", call)
            self._replaced = error
        self.hear(told.spans, sent)
        return placed(told.answer, arrays)

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        if self._replaced is not None:  # the chunks' beginnings are gone
            error, self._replaced = self._replaced, None
            raise error
        addresses, bundles = addressed([chunk.payload for chunk in chunks])
        return await self._once("prefill", lambda: self.actor.prefill.remote(list(released), addresses, *bundles))

    async def _once(self, verb: str, call: Callable[[], Any]) -> Any:
        """Raises ReplicaError if the worker died in the call and was restarted, WorkerLostError if it was not."""
        self._asked += 1
        asked = self.actor
        try:
            answer = await ask(self.name, call(), self._spec.answer_seconds, verb)
        except ReplicaError as error:
            if asked is self.actor:  # or another call, which it held too, has replaced it
                await self._revive(error)
            raise
        finally:
            self._asked -= 1
        self._deaths = 0
        return answer

    async def close(self) -> None:
        """End its process at once if it is busy: a worker holds nothing that must be closed."""
        if self._asked:
            ray.kill(self.actor)
        else:
            await super().close()
