"""The reference service (``reference.where=service``): what a run starts, its queue, and what a resumed run lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrlhf.cluster.handles import ReferenceHandle, Runtime
from asyncrlhf.cluster.parts import reference_spec
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.service import Waiting
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.orchestrator.token_service import TokenService, completed_by
from asyncrlhf.types import Rollout, ServiceResult


def fingerprint(config: RunConfig) -> dict[str, Any] | None:
    """What decides over the log-probs that a checkpoint holds; None where it holds none."""
    spec = reference_spec(config)
    return None if spec is None else spec.fingerprint


class References(TokenService[ReferenceHandle]):
    """Each rollout as soon as it ends, beside its reward, with ``fusion.granularity=chunk`` read ahead of that.
    ``onward``: who gets it with its log-probs."""

    title = "reference worker"

    def __init__(
        self,
        state: RunState,
        assembly: Assembly,
        workers: list[ReferenceHandle],
        onward: TokenService[Any] | None = None,
    ) -> None:
        chunks = None
        if state.config.reference_reads_ahead:
            totals, message = state.reference_prefill, assembly.message
            chunks = state.reading_ahead("The reference model", workers, lambda g: g.referenced, totals, message)
        super().__init__(state, assembly, workers, state.config.reference.token_budget, chunks)
        self._onward = onward

    async def _call(self, worker: ReferenceHandle, batch: Sequence[Waiting]) -> list[ServiceResult]:
        return await worker.complete([w.info.payload for w in batch])

    def _accept(self, waiting: Waiting, result: ServiceResult) -> None:
        self._assembly.referenced(waiting.info, result)
        if self._onward is not None and result.payload is not None:
            self._onward.arrived(replace(waiting, info=replace(waiting.info, payload=result.payload)))


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
    return await completed_by(runtime.references[0].complete, rollouts, lacking, runtime)
