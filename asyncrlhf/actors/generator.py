"""The Ray actor of a generator replica: the thread that samples, and the calls that reach it between two steps."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from asyncrlhf.actors.messages import Collected, RolloutBundle, WorkItem
from asyncrlhf.actors.where import Where, where
from asyncrlhf.actors.worker import GeneratorSpec, GeneratorWorker, build_worker, describe
from asyncrlhf.errors import ReplicaError
from asyncrlhf.rewards.chunked_messages import Chunk, ChunkBundle, describe_chunks
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import FloatArray, GenerationFailure, Rollout

__all__ = ["GeneratorActor", "GeneratorSpec", "GeneratorWorker", "build_worker", "describe"]

T = TypeVar("T")

# On cores that it shares with the learner a generator gives way: a learner that waits is time lost for good, while the
# generator only runs ahead as far as staleness lets it. Where generation is the slower side the learner is idle anyway.
YIELD = 4


@dataclass
class _Outbox:
    """What the engine's thread has handed out and nobody collected yet."""

    rollouts: list[Rollout] = field(default_factory=list)
    failures: list[GenerationFailure] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)  # when each rollout got its last token

    @property
    def has_results(self) -> bool:
        return bool(self.rollouts or self.failures)

    def withdraw(self, rollout_ids: Sequence[int]) -> list[int]:
        """Take out what is not wanted any more; returns which of it was there."""
        wanted = set(rollout_ids)
        found = [r.rollout_id for r in [*self.rollouts, *self.failures] if r.rollout_id in wanted]
        self.rollouts = [r for r in self.rollouts if r.rollout_id not in wanted]
        self.failures = [f for f in self.failures if f.rollout_id not in wanted]
        self.chunks = [c for c in self.chunks if c.rollout_id not in wanted]
        return found


class GeneratorActor:
    """The Ray actor: one thread owns the engine and samples; calls reach it between two steps.

    ``collect``, ``receive`` and ``generate`` wait in threads of their own, so sampling never waits for them. What a
    step has finished is handed out at its end: whoever collects it does not wait for the step after.
    """

    POLL_SECONDS = 0.5
    COLLECT_SECONDS = 10.0  # how long a collect waits for news at most: an answer without any costs both sides
    # Between two answers with results: a message costs both sides some milliseconds. What finishes alone goes at once.
    RESULT_SECONDS = 0.03
    LINGER_SECONDS = 0.003  # for what finishes at the same moment
    CHUNK_SECONDS = 0.1  # between two looks for chunks: a hint may wait, and a message costs both sides

    def __init__(self, spec: GeneratorSpec) -> None:
        if spec.generator.gpus == 0:
            os.nice(YIELD)
        self._worker: GeneratorWorker
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._results = threading.Condition()
        self._chunks = spec.chunk_tokens > 0
        self._outbox = _Outbox()  # changed under _results alone
        self._ended: dict[int, float] = {}  # of what is not handed out yet; the engine's thread alone knows it
        self._collected_at = -math.inf  # when results were last handed on
        self._chunks_due = 0.0
        self._busy = 0.0
        self._died: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._call(lambda: self._build(spec))

    def _build(self, spec: GeneratorSpec) -> None:
        """In the engine's thread: OpenMP has a team for each thread that calls it, and with two of them libgomp counts
        more threads than cores and no longer spins between kernels, which cost vLLM a quarter of its speed."""
        if spec.generator.threads:
            torch.set_num_threads(spec.generator.threads)
        self._worker = build_worker(spec)

    def _run(self) -> None:
        try:
            self._execute(None)  # the call that builds the worker
            wait: float | None = None
            while self._execute(wait):
                wait = self._advance() if self._worker.has_work() else None
                self._hand_out()
        except BaseException as error:
            self._died = error
            raise
        finally:
            with self._results:
                self._results.notify_all()

    def _execute(self, wait: float | None) -> bool:
        """Run the commands that lie in the inbox, waiting up to ``wait`` seconds (None: for ever) for the first."""
        block = wait is None or wait > 0
        while True:
            try:
                command = self._commands.get(block, wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            action, future = command
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)
            block, wait = False, 0

    def _advance(self) -> float:
        started = time.monotonic()
        output = self._worker.step(started)
        now = time.monotonic()
        self._ended.update((result.rollout_id, now) for result in output.finished)
        if output.finished:
            with self._results:
                self._results.notify_all()  # those that wait for private answers
        pause = 0.0 if output.wake_at is None else max(0.0, output.wake_at - now)
        self._busy += now - started + pause
        return pause

    def _hand_out(self) -> None:
        """Between two steps, and after commands that made the engine finish something."""
        now = time.monotonic()
        looks_for_chunks = self._chunks and now >= self._chunks_due
        if not (looks_for_chunks or self._worker.has_results()):
            return
        chunks: list[Chunk] = []
        if looks_for_chunks:
            chunks = self._worker.take_chunks()
            self._chunks_due = now + self.CHUNK_SECONDS
        rollouts, failures = self._worker.take()
        ended, self._ended = self._ended, {}
        with self._results:
            self._outbox.ended |= ended
            self._outbox.rollouts += rollouts
            self._outbox.failures += failures
            self._outbox.chunks += chunks
            if self._outbox.has_results or chunks:
                self._results.notify_all()

    def _call(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the engine's thread, between two steps."""
        self._raise_if_dead()
        future: Future[T] = Future()
        self._commands.put((action, future))
        while True:
            try:
                return future.result(timeout=self.POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
                self._raise_if_dead()

    def _raise_if_dead(self) -> None:
        if self._died is not None:
            raise ReplicaError(f"the engine of {self._worker.name} died: {self._died!r}")

    def ready(self) -> str:
        return self._worker.name

    def where(self) -> Where:
        return where()

    def submit(self, items: Sequence[WorkItem]) -> None:
        self._call(lambda: self._worker.submit(items))

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        def from_both() -> list[int]:
            gone = self._worker.cancel(rollout_ids)
            with self._results:
                return gone + self._outbox.withdraw(rollout_ids)

        return self._call(from_both)

    def collect(self) -> tuple[Any, ...]:
        """The facts and the payload, which stays in the object store; with ``chunk_tokens`` the chunks as a third."""
        with self._results:
            self._results.wait_for(
                lambda: self._outbox.has_results or self._outbox.chunks or self._died is not None, self.COLLECT_SECONDS
            )
            company = self._outbox.has_results and self._worker.has_work()
        time.sleep(self._linger(time.monotonic()) if company else 0.0)
        self._raise_if_dead()
        with self._results:
            box, self._outbox = self._outbox, _Outbox()
            if box.has_results:
                self._collected_at = time.monotonic()
        now = time.monotonic()
        ages = [now - box.ended.get(r.rollout_id, now) for r in box.rollouts]
        begun = describe_chunks(box.chunks)
        facts = Collected(describe(box.rollouts), box.failures, self._busy, self._worker.tokens, ages, begun)
        payload = RolloutBundle(box.rollouts)
        return (facts, payload, ChunkBundle(box.chunks)) if self._chunks else (facts, payload)

    def _linger(self, now: float) -> float:
        """How long what is finished waits for others: a score waits with it."""
        return max(self.LINGER_SECONDS, self._collected_at + self.RESULT_SECONDS - now)

    def generate(self, items: Sequence[WorkItem]) -> list[Rollout]:
        ids = [item.request.rollout_id for item in items]
        self._call(lambda: self._worker.submit(items))
        while (done := self._call(lambda: self._worker.take_private(ids))) is None:
            with self._results:
                self._results.wait(self.POLL_SECONDS / 10)
            self._raise_if_dead()
        return done

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int) -> None:
        self._worker.receiver.connect(endpoint, rank, world_size, epoch, self._worker.name)

    def receive(self, ticket: Ticket) -> None:
        self._worker.receive(ticket)

    def load(self, version: int, cache: Literal["keep", "recompute"]) -> float:
        def timed() -> float:
            started = time.monotonic()
            self._worker.load(version, cache, started)
            return time.monotonic() - started

        return self._call(timed)

    def sleep(self) -> None:
        """Stop between two steps, until :meth:`wake`; every other call still answers."""
        self._call(lambda: self._worker.sleep(time.monotonic()))

    def wake(self) -> None:
        self._call(self._worker.wake)

    def score(self, texts: Sequence[np.ndarray]) -> list[FloatArray]:
        return self._call(lambda: self._worker.score(texts))

    def digests(self) -> dict[str, str]:
        return self._call(self._worker.digests)

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(timeout=5)
        self._worker.close()
