"""Reward, reference and critic workers of a Ray run as the controller sees them: they come back when they die."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from asyncrlhf.actors.annotator import AnnotatorActor, AnnotatorSpec, AnnotatorWorker
from asyncrlhf.actors.messages import placed
from asyncrlhf.cluster.handles import WorkerLostError
from asyncrlhf.cluster.ray_calls import RayPart, addressed, ask
from asyncrlhf.errors import ReplicaError
from asyncrlhf.readahead.owners import ChunkInfo, Prefilled
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import Annotation, Payload

Options = Mapping[str, Any]  # Ray's, of one actor: what it asks for and where it sits


class RayAnnotator(RayPart[AnnotatorWorker]):
    """Starts its worker anew when it dies, or when it has not answered for ``spec.answer_seconds``; not by Ray, whose
    retries would hide which call was the death of it. ``settings.max_restarts`` of the spec bounds that."""

    def __init__(self, spec: AnnotatorSpec, number: int, options: Options, start_seconds: float) -> None:
        self._spec = spec
        self._options = options
        self._deaths = 0  # since the last answer
        self._replaced: ReplicaError | None = None  # a death that no caller heard of
        name = f"{spec.kind}-{number}"
        super().__init__(name, self._start(name), start_seconds)

    def _start(self, name: str) -> Any:
        """A fresh actor."""
        return ray.remote(AnnotatorActor).options(**self._options).remote(self._spec, name)

    async def annotate(self, payloads: Sequence[Payload], ticket: Ticket | None = None) -> list[Annotation]:
        """The first death may have any cause: the call is made once more before its rollouts are blamed."""
        addresses, bundles = addressed(payloads)
        arrays: Any = None

        def call() -> Any:
            # The arrays' owner is this process, so they outlive the worker.
            nonlocal arrays
            annotations, arrays = self.actor.annotate.options(num_returns=2).remote(addresses, ticket, *bundles)
            return annotations

        try:
            annotations = await self._once("annotate", call)
        except WorkerLostError:
            raise
        except ReplicaError as error:
            if self._deaths > 1:
                raise
            annotations = await self._once("annotate", call)
            self._replaced = error
        return placed(annotations, arrays)

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        if self._replaced is not None:  # the chunks' beginnings are gone
            error, self._replaced = self._replaced, None
            raise error
        addresses, bundles = addressed([chunk.payload for chunk in chunks])
        answer: Prefilled = await self._once(
            "prefill", lambda: self.actor.prefill.remote(list(released), addresses, *bundles)
        )
        return answer

    async def _once(self, verb: str, call: Callable[[], Any]) -> Any:
        """Raises ReplicaError when the worker died of it and stands again, WorkerLostError when it does not."""
        try:
            answer = await ask(self._name, call(), self._spec.answer_seconds, verb)
        except ReplicaError as error:
            await self._revive(error)
            raise
        self._deaths = 0
        return answer

    async def _revive(self, error: ReplicaError) -> None:
        self._deaths += 1
        ray.kill(self.actor)
        if self._deaths > self._spec.settings.max_restarts:
            raise WorkerLostError(f"{error} It is not started again ({self._spec.kind}.max_restarts).") from error
        self.actor = self._start(self._name)
        try:
            await self.ready()
        except ReplicaError as failure:
            raise WorkerLostError(f"{failure} It had died before: {error}") from failure

    async def close(self) -> None:
        """End its process at once: a worker holds nothing that must be closed."""
        ray.kill(self.actor)
