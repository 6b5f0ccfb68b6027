"""A generator replica without threads: an engine, its weight receiver, and its rollouts in flight and finished."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from asyncrlhf.actors.messages import Collected, RolloutBundle
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import AdapterMerge, CacheMode, Engine, StepOutput, said_ids
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.readahead.owners import Chunk, ChunkInfo
from asyncrlhf.transport.audit import differing_tensors, tensor_digests
from asyncrlhf.transport.memory_file import host_identity
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.receiver import WeightReceiver
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.turns import EpisodeFacts, Turn
from asyncrlhf.types import (
    FloatArray,
    GenerationFailure,
    GenerationRequest,
    Payload,
    Rollout,
    RolloutInfo,
)

if TYPE_CHECKING:
    from asyncrlhf.engines.vllm.vllm_engine import VllmEngine
    from asyncrlhf.transport.relay import RelayReceiver


@dataclass(frozen=True)
class GeneratorSpec:
    """Everything that a replica needs to start on any machine."""

    name: str
    generator: GeneratorConfig
    model: ModelConfig
    runtime: str
    weights: WeightsConfig
    chunk_tokens: int = 0  # sampled tokens per chunk (fusion.granularity=chunk); 0: sent at the end
    stall_seconds: float = 600.0  # without progress, after which the run counts as stalled
    offloads: bool = False  # its weights leave the device while it sleeps
    beside_bytes: int = 0  # of its GPU, kept by a sleeping learner, or needed by one at work
    part_of_rest: float = 0.0  # of what a learner at work leaves of the GPU; 0: the learner sleeps meanwhile
    replicas: int = 1  # that the run starts with; all of them send their results to one controller
    routes: bool = False  # its rollouts report the experts of each token


class Outbox:
    """The results of a replica that the controller has not collected yet. The engine's thread fills it and another may
    empty it; ``changed`` is notified after each addition.

    Answers to requests with negative ids are private (an evaluation's, a probe's): only :meth:`take_private` returns
    them.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._rollouts: list[Rollout] = []
        self._failures: list[GenerationFailure] = []
        self._chunks: list[Chunk] = []
        self._ended: dict[int, float] = {}  # when each rollout got its last token
        self._private: dict[int, Rollout | GenerationFailure] = {}

    @property
    def has_results(self) -> bool:
        return bool(self._rollouts or self._failures)

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def put(self, results: Sequence[Rollout | GenerationFailure], now: float) -> None:
        """Add ``results``, which ended at the clock time ``now``."""
        with self.changed:
            for result in results:
                if result.rollout_id < 0:
                    self._private[result.rollout_id] = result
                elif isinstance(result, GenerationFailure):
                    self._failures.append(result)
                else:
                    self._rollouts.append(result)
                    self._ended[result.rollout_id] = now
            if results:
                self.changed.notify_all()

    def put_chunks(self, chunks: Sequence[Chunk]) -> None:
        with self.changed:
            self._chunks += chunks
            if chunks:
                self.changed.notify_all()

    def withdraw(self, rollout_ids: Sequence[int]) -> list[int]:
        """Remove the results of cancelled rollouts; returns their ids."""
        wanted = set(rollout_ids)
        with self.changed:
            found = [r.rollout_id for r in self._rollouts if r.rollout_id in wanted]
            found += [f.rollout_id for f in self._failures if f.rollout_id in wanted]
            self._rollouts = [r for r in self._rollouts if r.rollout_id not in wanted]
            self._failures = [f for f in self._failures if f.rollout_id not in wanted]
            self._chunks = [c for c in self._chunks if c.rollout_id not in wanted]
        return found

    def take(self, busy_seconds: float, tokens: int, now: float) -> tuple[Collected, RolloutBundle, list[Chunk]]:
        """All results but private ones: the facts, and the bundles for their payloads (:func:`located`)."""
        with self.changed:
            rollouts, self._rollouts = self._rollouts, []
            failures, self._failures = self._failures, []
            chunks, self._chunks = self._chunks, []
            ended, self._ended = self._ended, {}
        ages = [now - ended[r.rollout_id] for r in rollouts]
        infos = [ChunkInfo(c.rollout_id, c.start, len(c.token_ids), Payload(None, i)) for i, c in enumerate(chunks)]
        facts = Collected(describe(rollouts), failures, busy_seconds, tokens, ages, infos)
        return facts, RolloutBundle(rollouts), chunks

    def take_private(self, rollout_ids: Sequence[int]) -> list[Rollout] | None:
        """The rollouts, without those that could not be sampled; None until all of them have ended."""
        with self.changed:
            if not all(i in self._private for i in rollout_ids):
                return None
            results = [self._private.pop(i) for i in rollout_ids]
        return [r for r in results if isinstance(r, Rollout)]


def _told(rollout: Rollout, **facts: Any) -> Rollout:
    """The rollout with what its engine does not know. Its arrays are not checked a second time."""
    told = copy(rollout)
    vars(told).update(facts)
    return told


def describe(rollouts: Sequence[Rollout]) -> list[RolloutInfo]:
    """The facts that the controller keeps; :func:`located` sets the payload and the time."""
    return [
        RolloutInfo(
            rollout_id=r.rollout_id,
            group_id=r.group_id,
            generator_id=r.generator_id,
            prompt_length=len(r.prompt.token_ids),
            response_length=(sampled := int(np.count_nonzero(r.sampled))),
            min_version=int(r.policy_versions.min(initial=np.iinfo(np.int64).max, where=r.sampled)),
            max_version=int(r.policy_versions.max(initial=0)),
            finish_reason=r.finish_reason,
            generated_at=0.0,
            payload=Payload(None, i),
            epoch=r.epoch,
            tag=r.tag,
            observed_length=len(r.response_ids) - sampled,
            episode=_episode(r) if r.turns else None,
            logged=r.measured,
        )
        for i, r in enumerate(rollouts)
    ]


def _episode(rollout: Rollout) -> EpisodeFacts:
    turns = rollout.turns

    def oldest(turn: Turn) -> int:
        return int(rollout.policy_versions[turn.start : turn.end].min(initial=np.iinfo(np.int64).max))

    return EpisodeFacts(
        turns=len(turns),
        tool_seconds=sum(turn.seconds for turn in turns),
        tool_calls=sum(len(turn.tools) for turn in turns),
        tool_failures=sum(turn.failures for turn in turns),
        first_version=oldest(turns[0]),
        last_version=oldest(turns[-1]),
        forks=len(rollout.forks),
    )


def located(facts: Collected, rollouts: Any, chunks: Any, now: float) -> Collected:
    """``facts``, of which nothing else has a copy, with references to the rollouts and chunks, and times by the
    caller's clock ``now``."""
    for info, age in zip(facts.finished, facts.ages, strict=True):
        info.payload, info.generated_at = Payload(rollouts, info.payload.index), now - age
    begun = [replace(info, payload=Payload(chunks, info.payload.index)) for info in facts.chunks]
    return replace(facts, chunks=begun)


class GeneratorWorker:
    """One replica without threads: its owner calls :meth:`step` while :meth:`has_work` and adds the time to
    ``busy_seconds``. Results are in ``outbox``."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        decode: Callable[[Sequence[int]], str],
        receiver: WeightReceiver,
        merge: AdapterMerge | None = None,
        chunk_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
        direct: WeightsConfig | None = None,
        relays: bool = False,
    ) -> None:
        """``direct``: if given, the engine's workers receive the weights themselves, with these settings. ``relays``:
        they, and neighbouring replicas, from what this process or a neighbour's stages."""
        self.name = name
        self.direct, self.relays = direct, relays
        self.engine = engine
        self.receiver = receiver
        self.outbox = Outbox()
        self.tokens = 0
        self.busy_seconds = 0.0
        self._clock = clock
        self._decode = decode
        self._merge = merge  # when the learner sends an adapter
        self._requests: dict[int, GenerationRequest] = {}  # of rollouts in flight, by rollout id
        self._staged: tuple[int, Any] | None = None
        self._chunk_tokens = chunk_tokens  # 0: nothing is sent before the end
        self._sent: dict[int, int] = {}  # response tokens sent in chunks, of rollouts in flight
        self._workers_map = False  # whether the engine's workers have receivers that map a neighbour's memory
        self._timed = False  # the engine makes tokens by the clock and not by steps (the fake one)

    @property
    def running(self) -> int:
        """The number of sequences in the next step."""
        return min(len(self._requests), self.engine.slots)

    def worked(self, seconds: float) -> None:
        """Count the seconds of a step that advanced the run's clock."""
        self.busy_seconds += seconds

    def note(self) -> str:
        """A sentence for the user on how the engine works; empty if there is none."""
        return self.engine.note

    def has_work(self) -> bool:
        """Whether a step would make progress: the engine is awake and has sequences in flight."""
        return bool(self._requests) and not (self.engine.asleep or self.engine.torn)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._requests[request.rollout_id] = request
            if self._chunk_tokens and request.rollout_id >= 0:
                self._sent[request.rollout_id] = 0
        self.engine.submit(requests)

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        """Cancel rollouts; returns the ids of those that were not collected before."""
        gone = self.engine.cancel(rollout_ids)
        for rollout_id in gone:
            del self._requests[rollout_id]
            self._sent.pop(rollout_id, None)
        return gone + self.outbox.withdraw(rollout_ids)

    def step(self) -> StepOutput:
        output = self.engine.step(self._clock())
        self._timed = output.wake_at is not None
        self.tokens += output.tokens
        results: list[Rollout | GenerationFailure] = []
        for result in output.finished:
            request = self._requests.pop(result.rollout_id)
            self._sent.pop(result.rollout_id, None)
            if isinstance(result, Rollout):
                text = self._decode(said_ids(result, request.sampling).tolist())
                result = _told(result, response_text=text, generator_id=self.name, epoch=request.epoch, tag=request.tag)
            else:
                result = replace(result, epoch=request.epoch, tag=request.tag)
            results.append(result)
        self.outbox.put(results, self._clock())
        return output

    def send_chunks(self) -> None:
        """Put into the outbox the new tokens of each unfinished sequence that has ``chunk_tokens`` or more of them."""
        chunks = []
        for rollout_id, ids in self.engine.partial(self._sent, self._chunk_tokens).items() if self._sent else ():
            prompt, sent = self._requests[rollout_id].prompt_ids, self._sent[rollout_id]
            self._sent[rollout_id] = sent + len(ids)
            whole = np.concatenate([prompt, ids]) if sent == 0 else ids
            chunks.append(Chunk(rollout_id, 0 if sent == 0 else len(prompt) + sent, len(prompt), whole.tolist()))
        self.outbox.put_chunks(chunks)

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int) -> None:
        """Join the weight group of ``epoch``; the workers of a ``direct`` engine join instead, from ``rank`` on."""
        if self.joins_directly:
            self._vllm.join(self.direct, endpoint, rank, world_size, epoch, self.name)
        else:
            self.receiver.connect(endpoint, rank, world_size, epoch, self.name)

    @property
    def joins_directly(self) -> bool:
        """Whether the engine's workers are members of weight groups."""
        return self.direct is not None and not self.relays

    def receive(self, ticket: Ticket, read: Sequence[Any] | None = None) -> None:
        """Receive a version into staging memory; the workers of a ``direct`` engine receive it at the load instead.
        ``read``: given if others may be loading, at any time, what this replica offers: the memories that they read
        now. Then every load names its version's place."""
        if read is not None:
            self._relay.receive(ticket, read)
            return
        staged = ticket if self.joins_directly else self.receiver.receive(ticket)
        self._staged = (ticket.version, self.offer() if self.relays and self.direct is not None else staged)

    def offer(self) -> Ticket:
        """The ticket with which neighbours load the version received last, from this process's memory."""
        return self._relay.offer()

    @property
    def _relay(self) -> RelayReceiver:
        return cast("RelayReceiver", self.receiver)  # or, in the local runtime, its receiver, with the same methods

    def host(self) -> str:
        """A text that is the same for replicas that can map each other's memory."""
        return host_identity()

    @property
    def _vllm(self) -> VllmEngine:
        return cast("VllmEngine", self.engine)  # of a ``direct`` worker

    def load(self, version: int, cache: CacheMode, ticket: Ticket | None = None) -> None:
        """Load the received version between two tokens; with a ``ticket``, straight from the learner's memory. Raises
        WeightSyncError if that version was not received."""
        if ticket is not None and self.direct is not None:
            self._staged = (ticket.version, ticket)
        elif ticket is not None:
            self._staged = None  # views on the memory of a learner that may have ended
            buckets = self.receiver.stream(ticket)
            self._staged = (ticket.version, {name: tensor for views in buckets for name, tensor in views.items()})
        self._catch_up()
        if self._staged is None or self._staged[0] != version:
            held = None if self._staged is None else self._staged[0]
            raise WeightSyncError(f"{self.name} was asked to load version {version} but received {held}.")
        weights = self._staged[1]
        if self.direct is not None:
            seconds = self.direct.seconds_for(sum(weights.manifest.bucket_bytes))
            if self.relays and not self._workers_map:  # which needs no group
                self._vllm.join(self.direct, "", 1, 2, 0, self.name)
                self._workers_map = True
            return self._vllm.receive_weights(weights, cache, seconds)
        self.engine.load_weights(version, weights if self._merge is None else self._merge(weights), cache)
        self.receiver.loaded()

    def _catch_up(self) -> None:
        """Let a timed engine make the tokens that are due, with its present version."""
        if self._timed and self.has_work():
            self.step()

    def sleep(self, keep_weights: bool = True) -> None:
        """Stop sampling and free the device's memory; rollouts in flight continue after :meth:`wake`, or, without
        ``keep_weights``, after the next load."""
        self._catch_up()
        self.engine.sleep(keep_weights)

    def wake(self) -> None:
        self.engine.wake()

    def score(self, texts: Sequence[np.ndarray]) -> list[FloatArray]:
        return self.engine.score(texts)

    def digests(self) -> dict[str, str]:
        """Digests of the engine's weights, under the names that the learner sends; with a LoRA adapter those of the
        received one, and, if it is merged into the weights, of each that is not exactly base plus adapter."""
        if self.engine.adapts and self._staged is not None:
            return tensor_digests(self._staged[1])
        found = tensor_digests(held := self.engine.parameters())
        if self._merge is None or self._staged is None:
            return found
        wrong = differing_tensors(tensor_digests(self._merge(self._staged[1])), found)
        sent = tensor_digests(self._staged[1], next(iter(held.values())).dtype)
        return sent | {name: found.get(name, "") for name in wrong}

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()
