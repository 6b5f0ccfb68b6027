"""What the controller asks of generators, reward workers and the learner, whichever runtime hosts them."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from asyncrlhf.actors.messages import Collected, Offer, TrainItem, WorkItem
from asyncrlhf.errors import ReplicaError
from asyncrlhf.learner.backend import StepResult
from asyncrlhf.records.recorder import RolloutRow
from asyncrlhf.rewards.chunked_messages import ChunkInfo, Prefilled
from asyncrlhf.types import FloatArray, Payload, RewardResult, Rollout, ServiceResult


class GeneratorHandle(Protocol):
    """A generator replica. Every method raises ReplicaError when the replica is gone."""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> int: ...

    async def submit(self, items: Sequence[WorkItem]) -> None: ...

    async def collect(self) -> Collected:
        """Waits until something finished or a short while passed."""
        ...

    async def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        """Those that were still in flight and now will never be collected."""
        ...

    async def generate(self, items: Sequence[WorkItem]) -> list[Rollout]:
        """Samples outside the ledger (evaluation): negative rollout ids, answered here and not by ``collect``."""
        ...

    async def receive(self, ticket: Any) -> None:
        """Take a version's weights into staging while sampling goes on."""
        ...

    async def load(self, version: int, cache: Literal["keep", "recompute"]) -> float:
        """Load what was received between two tokens; seconds that the engine stood still."""
        ...

    async def sleep(self) -> None:
        """Sample nothing until :meth:`wake` and leave the device to the learner; what is in flight stays."""
        ...

    async def wake(self) -> None: ...

    async def score(self, texts: Sequence[np.ndarray]) -> list[FloatArray]: ...

    async def digests(self) -> dict[str, str]:
        """A checksum of every tensor that the engine holds, by name."""
        ...

    async def close(self) -> None: ...


class WorkerLostError(ReplicaError):
    """A part died and will not be started again."""


class ReaderHandle(Protocol):
    """A worker that may read ahead."""

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        """Forget ``released`` and read chunks of sequences under way. Raises ReplicaError when the worker died of it
        and stands again, without what it had read, and WorkerLostError when it does not."""
        ...


class RewardHandle(ReaderHandle, Protocol):
    async def score(self, payloads: Sequence[Payload]) -> list[RewardResult]:
        """Raises ReplicaError when the worker died of it and stands again, WorkerLostError when it does not."""
        ...

    async def close(self) -> None: ...


class ReferenceHandle(ReaderHandle, Protocol):
    async def complete(self, payloads: Sequence[Payload]) -> list[ServiceResult]:
        """Where each rollout lies with its reference log-probs. Raises ReplicaError when the worker died of it and
        stands again, WorkerLostError when it does not."""
        ...

    async def close(self) -> None: ...


class CriticHandle(Protocol):
    async def value(self, payloads: Sequence[Payload], ticket: Any) -> list[ServiceResult]:
        """Where each rollout lies with the values of the critic behind ``ticket``. Raises as ``ReferenceHandle``."""
        ...

    async def close(self) -> None: ...


class LearnerHandle(Protocol):
    """The learner group as one part; its ranks act together."""

    async def train(self, items: Sequence[TrainItem]) -> StepResult: ...

    def snapshot(self, probe: Sequence[np.ndarray] | None) -> Awaitable[Offer]:
        """Copy the present weights aside for publishing. What the learner is asked for after this call finds the copy
        begun, whether the offer was awaited or not. ``probe``: texts that the offer is to score, for the audit."""
        ...

    async def ticket(self) -> Any:
        """An offer of the newest snapshot to the present weight group."""
        ...

    async def critic_ticket(self) -> Any:
        """The critic of the newest snapshot, for a critic service's workers; its attribute ``version`` names it."""
        ...

    async def transfer(self, ticket: Any) -> Any:
        """Send the snapshot to all connected receivers; TransferStats."""
        ...

    async def release(self, version: int) -> None:
        """No replica needs ``version`` any more: where live weights are streamed, their update goes on."""
        ...

    async def digests(self, dtype: str) -> dict[str, str]:
        """Checksums of the tensors in the newest version sent, in an engine's dtype."""
        ...

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def close(self) -> None: ...


class Runtime(Protocol):
    """Starts the parts and wires their transport; the controller sees nothing below this line."""

    @property
    def generators(self) -> list[GeneratorHandle]: ...

    @property
    def rewards(self) -> list[RewardHandle]: ...

    @property
    def references(self) -> list[ReferenceHandle]:
        """Empty without ``reference.where=service``."""
        ...

    @property
    def critics(self) -> list[CriticHandle]:
        """Empty without ``critic.where=service``."""
        ...

    @property
    def learner(self) -> LearnerHandle: ...

    @property
    def sharing(self) -> Collection[str]:
        """Names of the generators on the learner's devices, which take turns with it; empty without such."""
        ...

    async def start(self) -> None: ...

    async def connect(self, receivers: Sequence[GeneratorHandle]) -> None:
        """Form a new epoch of the weight group out of the learner and these generators."""
        ...

    async def restart(self, dead: GeneratorHandle) -> GeneratorHandle:
        """A fresh replica in a dead one's place, under the same name, holding no weights yet."""
        ...

    async def add_generator(self, present: Collection[str]) -> GeneratorHandle | None:
        """One replica more, holding no weights yet, where ``max_replicas`` lets a kind of replica grow and the machines
        have room; else None. ``present`` names those that the run counts on. Raises ReplicaError when it cannot start.
        """
        ...

    async def fetch(self, payloads: Sequence[Payload]) -> list[Rollout]:
        """The rollouts behind references."""
        ...

    def write_part(self, target: Path, rows: Sequence[RolloutRow], payloads: Sequence[Payload | None]) -> Future[None]:
        """Write a Parquet file of record rows, each with text and arrays of the rollout behind its payload. Returns at
        once, and the arrays never pass the controller's process."""
        ...

    def store(self, rollouts: Sequence[Rollout]) -> list[Payload]:
        """References to rollouts read back from a checkpoint."""
        ...

    async def close(self) -> None: ...
