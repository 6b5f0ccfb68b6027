"""A generator replica: an engine, the weights it waits for, and the thread that samples when Ray hosts it."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from asyncrlhf.actors.messages import Collected, RolloutBundle, WorkItem
from asyncrlhf.data.config import ModelConfig
from asyncrlhf.data.pretrained import load_model, load_tokenizer
from asyncrlhf.engines.base import Engine, StepOutput
from asyncrlhf.engines.build import build_engine
from asyncrlhf.engines.config import GeneratorConfig
from asyncrlhf.errors import ReplicaError, WeightSyncError
from asyncrlhf.transport.audit import tensor_digests
from asyncrlhf.transport.base import Ticket, WeightReceiver
from asyncrlhf.transport.build import build_receiver
from asyncrlhf.transport.config import WeightsConfig
from asyncrlhf.types import (
    FloatArray,
    Generation,
    GenerationFailure,
    GenerationRequest,
    IntArray,
    Payload,
    Prompt,
    Rollout,
    RolloutInfo,
)

T = TypeVar("T")

# On cores that it shares with the learner a generator gives way: a learner that waits is time lost for good, while the
# generator only runs ahead as far as staleness lets it. Where generation is the slower side the learner is idle anyway.
YIELD = 4


@dataclass(frozen=True)
class GeneratorSpec:
    """Everything a replica needs to start on any machine."""

    name: str
    generator: GeneratorConfig
    model: ModelConfig
    runtime: str
    weights: WeightsConfig


class GeneratorWorker:
    """One replica without threads: whoever owns it calls :meth:`step` while :meth:`has_work`.

    Requests with negative ids are evaluations: they are answered through :meth:`take_private`, never collected.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        decode: Callable[[Sequence[int]], str],
        receiver: WeightReceiver,
        prompts: dict[int, tuple[int, Prompt]],
    ) -> None:
        self.name = name
        self.engine = engine
        self.receiver = receiver
        self.tokens = 0
        self._decode = decode
        self._prompts = prompts  # of what is in flight, by rollout id: group id and prompt
        self._finished: list[Rollout] = []
        self._failed: list[GenerationFailure] = []
        self._private: dict[int, Rollout | GenerationFailure] = {}
        self._staged: tuple[int, Any] | None = None
        self._timed = False  # the engine makes tokens by the clock and not by steps (the fake one)

    def has_work(self) -> bool:
        return bool(self._prompts)

    def has_results(self) -> bool:
        return bool(self._finished or self._failed)

    def submit(self, items: Sequence[WorkItem]) -> None:
        for item in items:
            self._prompts[item.request.rollout_id] = (item.request.group_id, item.prompt)
        self.engine.submit([item.request for item in items])

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        gone = self.engine.cancel(rollout_ids)
        for rollout_id in gone:
            del self._prompts[rollout_id]
        wanted = set(rollout_ids)
        uncollected = [r.rollout_id for r in self._finished if r.rollout_id in wanted]
        uncollected += [f.rollout_id for f in self._failed if f.rollout_id in wanted]
        self._finished = [r for r in self._finished if r.rollout_id not in wanted]
        self._failed = [f for f in self._failed if f.rollout_id not in wanted]
        return gone + uncollected

    def step(self, now: float) -> StepOutput:
        output = self.engine.step(now)
        self._timed = output.wake_at is not None
        self.tokens += output.tokens
        for result in output.finished:
            group_id, prompt = self._prompts.pop(result.rollout_id)
            self._file(result if isinstance(result, GenerationFailure) else self._rollout(result, group_id, prompt))
        return output

    def _file(self, result: Rollout | GenerationFailure) -> None:
        if result.rollout_id < 0:
            self._private[result.rollout_id] = result
        elif isinstance(result, GenerationFailure):
            self._failed.append(result)
        else:
            self._finished.append(result)

    def _rollout(self, result: Generation, group_id: int, prompt: Prompt) -> Rollout:
        return Rollout(
            rollout_id=result.rollout_id,
            group_id=group_id,
            prompt=prompt,
            response_ids=result.response_ids,
            behavior_logprobs=result.behavior_logprobs,
            policy_versions=result.policy_versions,
            finish_reason=result.finish_reason,
            response_text=self._decode(result.response_ids.tolist()),
            generator_id=self.name,
        )

    def take(self) -> tuple[list[Rollout], list[GenerationFailure]]:
        """What finished since the last call."""
        taken = self._finished, self._failed
        self._finished, self._failed = [], []
        return taken

    def take_private(self, rollout_ids: Sequence[int]) -> list[Rollout] | None:
        """The evaluation's rollouts once none is under way, without those that could not be sampled; else None."""
        if not all(i in self._private for i in rollout_ids):
            return None
        results = [self._private.pop(i) for i in rollout_ids]
        return [r for r in results if isinstance(r, Rollout)]

    def receive(self, ticket: Ticket) -> None:
        self._staged = (ticket.version, self.receiver.receive(ticket))

    def load(self, version: int, cache: Literal["keep", "recompute"], now: float) -> None:
        if self._timed and self.has_work():
            self.step(now)  # what was made by now was made by the old version
        if self._staged is None or self._staged[0] != version:
            held = None if self._staged is None else self._staged[0]
            raise WeightSyncError(f"{self.name} was asked to load version {version} but received {held}.")
        self.engine.load_weights(version, self._staged[1], cache)

    def score(self, texts: Sequence[np.ndarray]) -> list[FloatArray]:
        return self.engine.score(texts)

    def digests(self) -> dict[str, str]:
        return tensor_digests(self.engine.parameters())

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()


def build_worker(spec: GeneratorSpec) -> GeneratorWorker:
    """Load the model and the engine; the caller has set the process's thread count."""
    tokenizer = load_tokenizer(spec.model)
    device = "cuda" if spec.generator.gpus > 0 else "cpu"
    prompts: dict[int, tuple[int, Prompt]] = {}

    def answer_ids(request: GenerationRequest) -> IntArray | None:
        answer = prompts[request.rollout_id][1].answer
        if answer is None:
            return None
        return np.array(tokenizer.encode(answer, add_special_tokens=False), dtype=np.int64)

    engine = build_engine(
        spec.generator,
        spec.model,
        load_model=lambda model: load_model(model, device),
        vocab_size=len(tokenizer),
        answer_ids=answer_ids,
    )

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return GeneratorWorker(spec.name, engine, decode, build_receiver(spec.weights, spec.runtime, device), prompts)


def describe(rollouts: Sequence[Rollout]) -> list[RolloutInfo]:
    """The facts that the controller keeps; the caller sets the payload and the time."""
    return [
        RolloutInfo(
            rollout_id=r.rollout_id,
            group_id=r.group_id,
            generator_id=r.generator_id,
            prompt_length=len(r.prompt.token_ids),
            response_length=len(r.response_ids),
            min_version=int(r.policy_versions.min(initial=np.iinfo(np.int64).max)),
            max_version=int(r.policy_versions.max(initial=0)),
            finish_reason=r.finish_reason,
            generated_at=0.0,
            payload=Payload(None, i),
        )
        for i, r in enumerate(rollouts)
    ]


class GeneratorActor:
    """The Ray actor: one thread owns the engine and samples; calls reach it between two steps.

    ``collect``, ``receive`` and ``generate`` wait in threads of their own, so sampling never waits for them.
    """

    POLL_SECONDS = 0.5
    LINGER_SECONDS = 0.03  # what finishes within it is collected together: a message a rollout would cost more than it

    def __init__(self, spec: GeneratorSpec) -> None:
        if spec.generator.threads:
            torch.set_num_threads(spec.generator.threads)
        if spec.generator.gpus == 0:
            os.nice(YIELD)
        self._worker = build_worker(spec)
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._results = threading.Condition()
        self._busy = 0.0
        self._died: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
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

    def submit(self, items: Sequence[WorkItem]) -> None:
        self._call(lambda: self._worker.submit(items))

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        return self._call(lambda: self._worker.cancel(rollout_ids))

    def collect(self) -> tuple[Collected, RolloutBundle]:
        """Two return values: the facts, and the payload that stays in the object store."""
        with self._results:
            if not self._worker.has_results():
                self._results.wait(self.POLL_SECONDS)
        if self._worker.has_results() and self._worker.has_work():
            time.sleep(self.LINGER_SECONDS)
        self._raise_if_dead()
        rollouts, failures = self._call(self._worker.take)
        return Collected(describe(rollouts), failures, self._busy, self._worker.tokens), RolloutBundle(rollouts)

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

    def score(self, texts: Sequence[np.ndarray]) -> list[FloatArray]:
        return self._call(lambda: self._worker.score(texts))

    def digests(self) -> dict[str, str]:
        return self._call(self._worker.digests)

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(timeout=5)
        self._worker.close()
