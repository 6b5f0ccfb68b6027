"""The Ray actor of a generator replica: the thread that samples, and the calls that reach it between two steps."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch

from asyncrlhf.actors.build_generator import build_worker
from asyncrlhf.actors.messages import Address, resolved
from asyncrlhf.actors.part import PartActor
from asyncrlhf.actors.worker import GeneratorSpec, GeneratorWorker
from asyncrlhf.errors import ReplicaError
from asyncrlhf.records.write.spans import Lane, SpanBatch
from asyncrlhf.types import Rollout

T = TypeVar("T")

# On shared cores the generator has lower priority than the learner: a waiting learner loses time, while the generator
# can run ahead within the staleness bound. If generation is the slower side, the learner is idle anyway.
YIELD = 4


class GeneratorActor(PartActor):
    """One thread owns the engine and samples; calls run in it between two steps, except those in ``BESIDE``.

    ``collect`` and ``answers`` wait in threads of their own, so sampling never waits for them. The results of a step
    can be collected at its end, while the next step runs.
    """

    BESIDE = frozenset({"connect", "receive"})  # the worker's methods that run beside the engine's steps
    POLL_SECONDS = 0.5
    COLLECT_SECONDS = 10.0  # the longest wait of a collect for results: an empty answer costs both sides
    # Between two answers with results: a message costs both sides about a millisecond. A lone result is sent at once.
    RESULT_SECONDS = 0.03
    # The same per replica of the run: the controller takes their answers one by one, at most 125 a second.
    SHARE_SECONDS = 0.008
    LINGER_SECONDS = 0.003  # for results that finish at the same moment
    SPAN_SECONDS = 0.5  # between two answers that include the replica's spans
    CHUNK_SECONDS = 0.1  # between two collections of chunks: a hint may wait, and a message costs both sides

    def __init__(self, spec: GeneratorSpec) -> None:
        if spec.generator.gpus == 0:
            os.nice(YIELD)
        self._worker: GeneratorWorker
        self._lane = Lane(spec.name)
        self._told_at = -math.inf
        self._stepped_at: float | None = None  # end of the last step, if more sequences are under way
        self._timed = False  # the engine makes tokens by the clock, and has no iterations (the fake one)
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._chunks = spec.chunk_tokens > 0
        # A working replica answers several times before the run counts as stalled.
        self._look_seconds = min(self.COLLECT_SECONDS, spec.stall_seconds / 5)
        self._result_seconds = min(self.result_seconds(spec.replicas), self._look_seconds)
        self._collected_at = -math.inf  # when results were last sent
        self._chunks_due = 0.0
        self._died: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._between_steps(lambda: self._build(spec))

    @classmethod
    def result_seconds(cls, replicas: int) -> float:
        """Seconds between two answers with results of one of ``replicas``, while it has more work."""
        return max(cls.RESULT_SECONDS, replicas * cls.SHARE_SECONDS)

    def _build(self, spec: GeneratorSpec) -> None:
        """Runs in the engine's thread: OpenMP has a team for each thread that calls it, and with two of them libgomp
        counts more threads than cores and no longer spins between kernels, which cost vLLM a quarter of its speed."""
        if spec.generator.threads:
            torch.set_num_threads(spec.generator.threads)
        with self._lane.during("load"):
            self._worker = build_worker(spec)

    def _run(self) -> None:
        self._execute(None)  # the call that builds the worker
        try:
            wait: float | None = None
            while self._execute(wait):
                wait = self._advance() if self._worker.has_work() else None
                if wait is None:
                    self._count_pause()
                    self._lane.enter("wait")
        except BaseException as error:
            self._died = error
            raise
        finally:
            with self._worker.outbox.changed:
                self._worker.outbox.changed.notify_all()

    def _execute(self, wait: float | None) -> bool:
        """Run the commands in the inbox, waiting up to ``wait`` seconds (None: without limit) for the first."""
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
        """One step of the engine; returns the seconds to wait before the next."""
        self._lane.enter("decode")
        sequences = self._worker.running
        started = time.monotonic() if self._stepped_at is None else self._stepped_at  # time between two steps, too
        output = self._worker.step()
        now = self._stepped_at = time.monotonic()
        busy = now - started
        self._worker.busy_seconds += busy
        self._timed = self._timed or output.wake_at is not None
        iterations = (0, 0) if self._timed else (1, sequences)
        self._lane.count(len(output.finished), output.tokens, *iterations, busy)
        if self._chunks and now >= self._chunks_due:
            self._worker.send_chunks()
            self._chunks_due = now + self.CHUNK_SECONDS
        return 0.0 if output.wake_at is None else max(0.0, output.wake_at - now)

    def _count_pause(self) -> None:
        """Count the time since the last step, in which a timed engine had sequences under way, and no more of it."""
        if self._stepped_at is not None:
            busy, self._stepped_at = time.monotonic() - self._stepped_at, None
            self._worker.busy_seconds += busy
            self._lane.count(0, 0, 0, 0, busy)

    def _between_steps(self, action: Callable[[], T]) -> T:
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

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        run = super().call
        if method in self.BESIDE and not (method == "connect" and self._worker.joins_directly):
            return run(method, *arguments, **keywords)
        if method == "load":
            return self._between_steps(lambda: self._load(*arguments))
        return self._between_steps(lambda: run(method, *arguments, **keywords))

    def turns(self, addresses: Sequence[Address], *bundles: Any) -> None:
        """Submit the turns of episodes, whose requests arrive in bundles."""
        self.call("submit", resolved(addresses, bundles))

    def _load(self, version: int, *arguments: Any) -> None:
        self._count_pause()
        with self._lane.during("load", version):
            self._worker.load(version, *arguments)
        if self._worker.has_work():
            self._stepped_at = time.monotonic()

    def collect(self) -> tuple[Any, ...]:
        """The facts and the payload, which stays in the object store; with ``chunk_tokens`` also the chunks."""
        asked, worker, box = time.monotonic(), self._worker, self._worker.outbox
        with box.changed:
            box.changed.wait_for(
                lambda: box.has_results or box.has_chunks or self._died is not None, self._look_seconds
            )
            if box.has_results:  # the last of a batch must not wait: nothing will join them
                box.changed.wait_for(
                    lambda: not worker.has_work() or self._died is not None, self._linger(time.monotonic())
                )
        self._raise_if_dead()
        facts, rollouts, chunks = box.take(worker.busy_seconds, worker.tokens, time.monotonic())
        if facts.finished or facts.failed:
            self._collected_at = time.monotonic()
        if time.monotonic() - self._told_at >= self.SPAN_SECONDS:
            facts, self._told_at = replace(facts, spans=self._lane.take(asked)), time.monotonic()
        return (facts, rollouts, chunks) if self._chunks else (facts, rollouts)

    def _linger(self, now: float) -> float:
        """Seconds that a finished rollout waits to be sent with others; its score is delayed as long."""
        return max(self.LINGER_SECONDS, self._collected_at + self._result_seconds - now)

    def answers(self, rollout_ids: Sequence[int]) -> tuple[list[Rollout] | None, float]:
        """Private answers, without rollouts that could not be sampled; None until all are there. Also the number of
        tokens that the replica has made."""
        box, deadline = self._worker.outbox, time.monotonic() + self._look_seconds
        with box.changed:
            while (done := box.take_private(rollout_ids)) is None and self._died is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                box.changed.wait(left)
        self._raise_if_dead()
        return done, float(self._worker.tokens)

    def close(self) -> list[SpanBatch]:
        """Runs in the engine's thread, with which the engine's processes end."""
        closing = super().close

        def end() -> None:
            self._commands.put(None)
            closing()

        try:
            self._between_steps(end)
        except ReplicaError:  # the thread died before
            closing()
        self._thread.join(timeout=5)
        return [self._lane.take()]
