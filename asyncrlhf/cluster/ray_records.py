"""The record writer of a Ray run: an actor on the controller's machine, which is restarted after its death and when
it does not respond. Ray then repeats the calls it has not answered: each writes one file, whole or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrlhf.actors.messages import Alike
from asyncrlhf.actors.part import RecordActor
from asyncrlhf.cluster.handles import RECORD_WRITER, within
from asyncrlhf.cluster.ray_calls import ask_to_start, of_memory, translated
from asyncrlhf.cluster.ray_handles import PING, actor_class, addressed
from asyncrlhf.errors import ReplicaError
from asyncrlhf.records.write.rollout_rows import RolloutRow
from asyncrlhf.types import Payload

RESTARTS = 3  # of one run


class RayRecords:
    """Starts the actor with the first file. ``seconds``: limit of its silence and of its start."""

    def __init__(self, seconds: float, start_seconds: float) -> None:
        self.actor: Any = None
        self._process: Future[int] = Future()  # the actor's, once it has answered
        self._wrote = 0  # the process that wrote the last file
        self._seconds, self._start_seconds = seconds, start_seconds
        self._unanswered: set[Future[None]] = set()
        self._looking = asyncio.Lock()

    def begin(self) -> None:
        """Start the actor now: on a node that Ray drains it would not start any more."""
        self._there()

    def write_part(self, target: Path, rows: Sequence[RolloutRow], payloads: Sequence[Payload | None]) -> Future[None]:
        """As :meth:`~asyncrlhf.cluster.handles.Runtime.write_part`."""
        found, references = addressed([Payload(p.ref, p.index) for p in payloads if p is not None])
        order = iter(found)
        places = tuple(None if p is None else next(order) for p in payloads)
        return self._answer(self._there().write.remote(str(target.resolve()), Alike(rows), places, *references))

    def save_rollouts(self, target: Path, payloads: Sequence[Payload]) -> Future[None]:
        """As :meth:`~asyncrlhf.cluster.handles.Runtime.save_rollouts`."""
        addresses, references = addressed(payloads)
        return self._answer(self._there().save.remote(str(target.resolve()), addresses, *references))

    async def written(self, files: Sequence[Future[None]], tell: Callable[[str], None]) -> None:
        """Wait for the files, and replace the actor if it freezes meanwhile; ``tell`` is then told so, and of a death
        after which Ray has started it again."""
        waiting = [asyncio.wrap_future(file) for file in files]
        while (await asyncio.wait(waiting, timeout=self._seconds))[1]:
            if self.actor is not None:
                async with self._looking:  # of several that wait, one replaces it
                    await self._look(tell)
        for file in waiting:
            file.exception()  # marks it as seen for asyncio; the recorder raises it
        self._renew(tell)

    def _renew(self, tell: Callable[[str], None]) -> None:
        known = self._process.result() if self._process.done() and self._process.exception() is None else 0
        if self._wrote and known != self._wrote:
            if known:
                tell(f"{RECORD_WRITER.capitalize()} died and was started again.{of_memory(RECORD_WRITER)}")
            self._process = Future()
            self._process.set_result(self._wrote)

    async def _look(self, tell: Callable[[str], None]) -> None:
        """Ping the actor; without an answer, end its process and wait until Ray has started another."""
        try:
            alive = self.actor.ping.options(concurrency_group=PING, max_task_retries=0).remote()
            return await within(self._seconds, RECORD_WRITER, PING, alive)
        except ReplicaError:
            tell(f"{RECORD_WRITER.capitalize()} did not respond for {self._seconds:.3g} s. Replacing it.")
            self._kill()
        except RayActorError:
            pass  # it died, and Ray starts it again
        self._wrote = 0
        with suppress(ReplicaError):  # not again: then the calls fail, too
            self._process = self._asked()
            await ask_to_start(RECORD_WRITER, asyncio.wrap_future(self._process), self._start_seconds)

    def _kill(self) -> None:
        """End the process that does not answer. Ray alone would first give it 5 s to end itself."""
        if self._process.done() and self._process.exception() is None:
            with suppress(OSError):
                return os.kill(self._process.result(), signal.SIGKILL)
        ray.kill(self.actor, no_restart=False)

    def _asked(self) -> Future[int]:
        answer: Future[int] = self.actor.ping.options(concurrency_group=PING).remote().future()
        return answer

    def close(self) -> None:
        """End the actor. Files not yet written fail, so that no thread waits for a Ray that has ended."""
        if self.actor is not None:
            ray.kill(self.actor)
        for answer in list(self._unanswered):
            with suppress(InvalidStateError):  # it came just now
                answer.set_exception(ReplicaError(f"{RECORD_WRITER} ended before it wrote a file."))

    def _there(self) -> Any:
        if self.actor is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            kind = actor_class(RecordActor, num_cpus=0, max_restarts=RESTARTS, max_task_retries=RESTARTS)
            self.actor = kind.options(scheduling_strategy=here).remote()
            self._process = self._asked()
        return self.actor

    def _answer(self, reference: Any) -> Future[None]:
        """The answer to a call of the actor, whose death is told as that of the record writer."""
        answer: Future[None] = Future()
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)

        def pass_on(found: Future[int]) -> None:
            error = found.exception()
            if error is None:
                self._wrote = found.result()
            if isinstance(error, RayError):
                error = translated(RECORD_WRITER, error)
            with suppress(InvalidStateError):  # the run is over
                answer.set_result(None) if error is None else answer.set_exception(error)

        reference.future().add_done_callback(pass_on)
        return answer
