"""The annotators that hold a model: the reference worker and the critic worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from asyncrlhf.actors.annotator import ANSWER_SECONDS
from asyncrlhf.actors.messages import ArrayBundle, annotated
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.learner.deterministic import deterministic
from asyncrlhf.learner.model.forward import use_float32_head
from asyncrlhf.learner.settings.learner_config import CriticConfig, ReferenceConfig
from asyncrlhf.learner.step.companions import ServedCritic
from asyncrlhf.models.pretrained import load_policy
from asyncrlhf.models.teacher import load_reference
from asyncrlhf.readahead.owners import Chunk, Prefilled
from asyncrlhf.readahead.readers import ReadingReference
from asyncrlhf.transport.build_transport import build_receiver
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import Annotation, FloatArray, Rollout


@dataclass(frozen=True)
class ReferenceSpec:
    """``policy``: the checkpoint that trains, and the reference where ``settings`` name no other. ``precision``:
    ``learner.mixed_precision``, which goes with ``float32_head`` and ``deterministic``, the learner's."""

    settings: ReferenceConfig
    policy: ModelConfig
    temperature: float
    precision: str
    float32_head: bool = False
    cache_tokens: int = 0  # for chunks (fusion.granularity=chunk); 0: it reads whole rollouts
    answer_seconds: float = ANSWER_SECONDS
    max_restarts: int = 0
    deterministic: bool = False

    kind: ClassVar[str] = "reference"

    def build(self, name: str) -> ReferenceWorker | TeachersWorker:
        return TeachersWorker(self) if self.settings.teachers else ReferenceWorker(self)

    def of(self, path: str) -> ReferenceSpec:
        """The spec of a worker with one of several teachers."""
        return replace(self, settings=replace(self.settings, path=path, teachers={}))

    @property
    def model(self) -> ModelConfig:
        """Of a spec with one reference."""
        return self.policy.other(self.settings.path)

    @property
    def fingerprint(self) -> dict[str, str | float]:
        """The settings that determine the log-probs: if they differ, a resumed run recomputes them."""
        dtype = self.precision + ", float32 head" * self.float32_head
        dtype = dtype if self.settings.dtype == "auto" else self.settings.dtype
        teachers = (f"{name}: {t.path} ({t.weight:g})" for name, t in sorted(self.settings.each.items()))
        return {"model": ", ".join(teachers) or self.model.path, "temperature": self.temperature, "dtype": dtype}


class ReferenceWorker(ReadingReference):
    """The frozen initial model, or another checkpoint: never a resumed policy, and without a LoRA adapter."""

    def __init__(self, spec: ReferenceSpec) -> None:
        own = spec.settings
        device = "cuda" if own.gpus > 0 else "cpu"
        dtype = torch.float32 if own.dtype == "auto" else getattr(torch, own.dtype)
        model = load_reference(spec.policy, spec.model, device, dtype)
        if spec.float32_head and own.dtype == "auto":
            use_float32_head(model)
        self._deterministic = partial(deterministic, spec.deterministic)
        super().__init__(
            model,
            temperature=spec.temperature,
            precision=spec.precision if own.dtype == "auto" else "none",
            token_budget=own.token_budget,
            cache_tokens=spec.cache_tokens,
        )

    def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], ArrayBundle]:
        """The reference log-probs [L] of each rollout, or the reason for a missing one."""
        return annotated("ref_logprobs", rollouts, self.answer(rollouts))

    def answer(self, rollouts: Sequence[Rollout]) -> list[FloatArray | str]:
        with self._deterministic():
            return super().answer(rollouts)

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        with self._deterministic():
            return super().prefill(released, chunks)


class TeachersWorker:
    """Several references. A rollout's log-probs are those of the teacher that its row names, or of all in a mixture."""

    def __init__(self, spec: ReferenceSpec) -> None:
        teachers = spec.settings.each
        total = sum(teacher.weight for teacher in teachers.values())
        self._shares = {name: teacher.weight / total for name, teacher in teachers.items() if teacher.weight}
        self._workers = {name: ReferenceWorker(spec.of(teacher.path)) for name, teacher in teachers.items()}

    def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], ArrayBundle]:
        """As of one reference."""
        shares = [self._shares_of(rollout) for rollout in rollouts]
        found = {}
        for name, worker in self._workers.items():
            asked = [rollout for rollout, own in zip(rollouts, shares, strict=True) if name in own]
            found[name] = iter(worker.answer(asked) if asked else ())
            if worker.readings is not None:
                worker.readings.release(rollout.rollout_id for rollout in rollouts)  # also what it was not asked for
        answers = (
            _mixture(rollout, [(share, next(found[name])) for name, share in own.items()])
            if own
            else f"Its row has teacher={rollout.prompt.metadata['teacher']!r}; allowed: {', '.join(self._workers)}."
            for rollout, own in zip(rollouts, shares, strict=True)
        )
        return annotated("ref_logprobs", rollouts, answers)

    def _shares_of(self, rollout: Rollout) -> dict[str, float]:
        """Each teacher's share; none if the row names one that there is not."""
        named = rollout.prompt.metadata.get("teacher")
        if named is None:
            return self._shares
        return {named: 1.0} if isinstance(named, str) and named in self._workers else {}

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Which teacher a rollout's row names is known at its end; until then all read."""
        answers = [worker.prefill(released, chunks) for worker in self._workers.values()]
        return Prefilled(any(a.taken for a in answers), sorted({i for a in answers for i in a.evicted}))


def _mixture(rollout: Rollout, parts: Sequence[tuple[float, FloatArray | str]]) -> FloatArray | str:
    """[L] log of the sum of share times probability, 0 on observed tokens; or the first reason for a missing part."""
    logs: list[FloatArray] = []
    for share, part in parts:
        if isinstance(part, str):
            return part
        logs.append(part + np.log(np.float32(share)))
    mixed = logs[0] if len(logs) == 1 else np.logaddexp.reduce(logs)
    return np.where(rollout.sampled, mixed, np.float32(0)).astype(np.float32)


@dataclass(frozen=True)
class CriticSpec:
    """``precision``: ``learner.mixed_precision``; ``deterministic``: the learner's."""

    settings: CriticConfig
    model: ModelConfig
    precision: str
    runtime: str
    weights: WeightsConfig
    answer_seconds: float = ANSWER_SECONDS
    max_restarts: int = 0
    deterministic: bool = False

    kind: ClassVar[str] = "critic"

    def build(self, name: str) -> CriticWorker:
        return CriticWorker(self, name)


class CriticWorker:
    """A copy of the learner's critic. Each call carries the ticket of the version to use, so that versions change only
    between calls and a restarted worker needs no other state."""

    def __init__(self, spec: CriticSpec, name: str) -> None:
        own = spec.settings
        self._deterministic = partial(deterministic, spec.deterministic)
        device = "cuda" if own.gpus > 0 else "cpu"
        self._critic = ServedCritic(
            load_policy(spec.model, device, dtype=torch.float32),
            precision=spec.precision,
            token_budget=own.token_budget,
        )
        self._receiver = build_receiver(spec.weights.beside_the_policy(spec.runtime), spec.runtime, device)
        self._receiver.connect("", 1, 2, 0, name)

    def annotate(
        self, rollouts: Sequence[Rollout], ticket: Ticket | None = None
    ) -> tuple[list[Annotation], ArrayBundle]:
        """The values [L] of each rollout by the critic of ``ticket``, or the reason why it has none.

        Raises WeightSyncError if the version is not available: the learner that held it is lost.
        """
        assert ticket is not None, "a critic is asked by version"
        if self._critic.version != ticket.version:
            self._critic.load(ticket.version, self._receiver.receive(ticket))
        with self._deterministic():
            return annotated("values", rollouts, self._critic.answer(rollouts), ticket.version)

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Does nothing: the critic version that will score a rollout is not known before its end."""
        return Prefilled(False)
