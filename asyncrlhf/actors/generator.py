"""The Ray actor of a generator replica: the thread that samples, and the calls that reach it between two steps."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from asyncrlhf.actors.messages import Collected, RolloutBundle, WorkItem
from asyncrlhf.actors.where import Where, where
from asyncrlhf.actors.worker import GeneratorSpec, GeneratorWorker, build_worker, describe
from asyncrlhf.errors import ReplicaError
from asyncrlhf.rewards.chunked_messages import Chunk, ChunkBundle, describe_chunks
from asyncrlhf.transport.base import Ticket
from asyncrlhf.types import FloatArray, GenerationFailure, Rollout

__all__ = ["GeneratorActor", "GeneratorSpec", "GeneratorWorker", "build_worker", "describe"]

T = TypeVar("T")

# On cores that it shares with the learner a generator gives way: a learner that waits is time lost for good, while the
# generator only runs ahead as far as staleness lets it. Where generation is the slower side the learner is idle anyway.
YIELD = 4


class GeneratorActor:
    """The Ray actor: one thread owns the engine and samples; calls reach it between two steps.

    ``collect``, ``receive`` and ``generate`` wait in threads of their own, so sampling never waits for them.
    """

    POLL_SECONDS = 0.5
    LINGER_SECONDS = 0.03  # what finishes within it is collected together: a message a rollout would cost more than it
    # With chunks what is left to compute at the end is little, and the wait for company would be most of the latency.
    BRIEF_LINGER_SECONDS = 0.003
    CHUNK_SECONDS = 0.1  # between two looks for chunks: a hint may wait, and a message costs both sides

    def __init__(self, spec: GeneratorSpec) -> None:
        if spec.generator.gpus == 0:
            os.nice(YIELD)
        self._worker: GeneratorWorker
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._results = threading.Condition()
        self._chunks = spec.chunk_tokens > 0
        self._ended: dict[int, float] = {}  # when each finished rollout got its last token
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
        if output.finished:
            with self._results:
                self._results.notify_all()
        now = time.monotonic()
        self._ended.update((result.rollout_id, now) for result in output.finished)
        pause = 0.0 if output.wake_at is None else max(0.0, output.wake_at - now)
        self._busy += now - started + pause
        return pause

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
        return self._call(lambda: self._worker.cancel(rollout_ids))

    def collect(self) -> tuple[Any, ...]:
        """The facts and the payload, which stays in the object store; with ``chunk_tokens`` the chunks as a third."""
        with self._results:
            if not self._worker.has_results():
                looks_for_chunks = self._chunks and self._worker.has_work()
                self._results.wait(self.CHUNK_SECONDS if looks_for_chunks else self.POLL_SECONDS)
        if self._worker.has_results() and self._worker.has_work():
            time.sleep(self.BRIEF_LINGER_SECONDS if self._chunks else self.LINGER_SECONDS)
        self._raise_if_dead()
        rollouts, failures, chunks, ended = self._call(self._take)
        now = time.monotonic()
        ages = [now - ended.get(r.rollout_id, now) for r in rollouts]
        facts = Collected(describe(rollouts), failures, self._busy, self._worker.tokens, ages, describe_chunks(chunks))
        payload = RolloutBundle(rollouts)
        return (facts, payload, ChunkBundle(chunks)) if self._chunks else (facts, payload)

    def _take(self) -> tuple[list[Rollout], list[GenerationFailure], list[Chunk], dict[int, float]]:
        rollouts, failures = self._worker.take()
        ended, self._ended = self._ended, {}
        return rollouts, failures, self._worker.take_chunks() if self._chunks else [], ended

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
