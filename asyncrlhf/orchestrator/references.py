"""The reference service (``reference.where=service``): what a run starts, its queue, and what a resumed run lacks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrlhf.actors.reference import ReferenceSpec
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.config import RunConfig
from asyncrlhf.orchestrator.handles import ReferenceHandle, Runtime
from asyncrlhf.orchestrator.service import Service, Waiting
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.types import Payload, ReferenceResult, Rollout


def reference_spec(config: RunConfig) -> ReferenceSpec | None:
    """What the workers are started with; None where the learner asks its own model, or the algorithm none at all."""
    if not config.reference_served:
        return None
    return ReferenceSpec(config.reference, config.model, config.generator.temperature, config.learner.mixed_precision)


def reference_notes(config: RunConfig) -> list[str]:
    """What the user should know of a service that was asked for."""
    if config.reference.where == "learner" or config.reference_served:
        return []
    return [f"No reference worker is started: algorithm={config.algorithm.name} needs no reference policy."]


def fingerprint(config: RunConfig) -> dict[str, Any] | None:
    """What decides over the log-probs that a checkpoint holds; None where it holds none."""
    spec = reference_spec(config)
    return None if spec is None else spec.fingerprint


class References(Service[ReferenceHandle, ReferenceResult]):
    """Each rollout as soon as it ends, beside its reward. What waits is spread over the idle workers; a call holds at
    most ``reference.token_budget`` tokens."""

    title = "reference worker"

    def __init__(self, state: RunState, assembly: Assembly, workers: list[ReferenceHandle]) -> None:
        super().__init__(state, assembly, workers)
        self._budget = state.config.reference.token_budget

    def arrived(self, waiting: Waiting) -> None:
        """A rollout left its generator; the caller wakes the workers."""
        self._ready.append(waiting)

    def _mine(self, worker: ReferenceHandle) -> list[Waiting]:
        """The oldest that are still wanted: a sibling's or the reward's failure may have ended them meanwhile."""
        while self._ready and not self._assembly.awaits(self._ready[0].info):
            self._ready.popleft()
        wanted = [waiting for waiting in self._ready if self._assembly.awaits(waiting.info)]
        idle = max(1, len(self._workers) - self._calls)
        room = min(self._budget, math.ceil(sum(map(_tokens, wanted)) / idle))
        batch: list[Waiting] = []
        for waiting in wanted:
            room -= _tokens(waiting)
            if batch and room < 0:
                break
            batch.append(waiting)
        return batch

    def _full(self, batch: Sequence[Waiting]) -> bool:
        """More are waiting than fit, or what there is fills the call."""
        return len(batch) < len(self._ready) or sum(map(_tokens, batch)) >= self._budget

    async def _call(self, worker: ReferenceHandle, payloads: Sequence[Payload]) -> list[ReferenceResult]:
        return await worker.complete(payloads)

    def _accept(self, waiting: Waiting, result: ReferenceResult) -> None:
        self._assembly.referenced(waiting.info, result)

    def _failure(self, rollout_id: int, cause: str) -> ReferenceResult:
        return ReferenceResult(rollout_id, None, error=cause)


def _tokens(waiting: Waiting) -> int:
    return waiting.info.prompt_length + waiting.info.response_length


async def completed(
    rollouts: Mapping[int, Rollout], computed_by: Mapping[str, Any] | None, config: RunConfig, runtime: Runtime
) -> dict[int, Rollout]:
    """A checkpoint's finished rollouts, with what this run's learner expects of the reference.

    ``computed_by``: the fingerprint in the checkpoint. Log-probs of another model, temperature or precision are
    computed anew, as are those that are missing. Raises AsyncRLHFError when that fails for one.
    """
    wanted = fingerprint(config)
    if wanted is None:
        return {i: replace(rollout, ref_logprobs=None) for i, rollout in rollouts.items()}
    fits = computed_by == wanted
    lacking = [r for r in rollouts.values() if r.ref_logprobs is None or not fits]
    if not lacking:
        return dict(rollouts)
    results = await runtime.references[0].complete(runtime.store(lacking))
    failed = next((r for r in results if r.payload is None), None)
    if failed is not None:
        raise AsyncRLHFError(f"Rollout {failed.rollout_id} of the checkpoint cannot be taken up: {failed.error}")
    fresh = await runtime.fetch([r.payload for r in results if r.payload is not None])
    return {**rollouts, **{r.rollout_id: r for r in fresh}}
