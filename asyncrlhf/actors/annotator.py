"""The Ray actor around one reward, reference or critic worker, and what it asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from asyncrlhf.actors.messages import Address, ArrayBundle, resolved
from asyncrlhf.actors.part import PartActor
from asyncrlhf.readahead.owners import Chunk, Prefilled
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import Annotation, Rollout

ANSWER_SECONDS = 450.0  # what the default of stall_timeout_seconds gives


class AnnotatorWorker(Protocol):
    """Says something of finished rollouts: rewards, reference log-probs or values."""

    def annotate(
        self, rollouts: Sequence[Rollout], ticket: Ticket | None = None
    ) -> tuple[list[Annotation], ArrayBundle | None]:
        """One annotation a rollout, in order, and the bundle that its arrays lie in, where it computes any.

        ``ticket``: of the weights that are to answer, for a worker whose weights change (the critic).
        """
        ...

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget the rollouts ``released``, then read ``chunks`` of others ahead of their end."""
        ...


class WorkerSettings(Protocol):
    """``workers``: how many there are; ``threads``: CPU threads of one, 0 for torch's default; ``max_restarts``: deaths
    between two answers after which a worker is not started again."""

    @property
    def workers(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def max_restarts(self) -> int: ...


class AnnotatorSpec(Protocol):
    """Everything a worker needs to start on any machine. ``answer_seconds``: how long one call of it may take."""

    kind: ClassVar[str]  # reward, reference or critic: the name of its settings, too

    @property
    def answer_seconds(self) -> float: ...

    @property
    def settings(self) -> WorkerSettings: ...

    def build(self, name: str) -> AnnotatorWorker: ...


def build_annotator(spec: AnnotatorSpec, name: str) -> AnnotatorWorker:
    return spec.build(name)


class AnnotatorActor(PartActor):
    """Builds the worker in its own process. Rollouts and chunks arrive in bundles, resolved from the object store."""

    def __init__(self, spec: AnnotatorSpec, name: str) -> None:
        if spec.settings.threads:
            torch.set_num_threads(spec.settings.threads)
        self._worker: AnnotatorWorker = spec.build(name)

    def annotate(
        self, addresses: Sequence[Address], ticket: Ticket | None, *bundles: Any
    ) -> tuple[list[Annotation], ArrayBundle | None]:
        return self._worker.annotate(resolved(addresses, bundles), ticket)

    def prefill(self, released: Sequence[int], addresses: Sequence[Address], *bundles: Any) -> Prefilled:
        return self._worker.prefill(released, resolved(addresses, bundles))
