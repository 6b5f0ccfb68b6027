"""The log-prob audits of a run: when, over which texts, and what engines that differ mean."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.messages import Offer
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.handles import LONG_SECONDS, Runtime
from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.models.checkpoint_folder import load_shape, longest_span
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.transport.audit import compare, differing_tensors, floating_dtype, judge, probe_tokens
from asyncrlhf.types import FloatArray, IntArray

PROBE_TEXTS, PROBE_LENGTH = 4, 16


class Audits:
    """Compares the log-probs that engines and learner give the same texts, which the learner passes together."""

    def __init__(self, state: RunState, runtime: Runtime, vocab_size: int) -> None:
        self._state, self._runtime, self._vocab_size = state, runtime, vocab_size
        kinds = replica_kinds(state.config.generator)
        self._audited = {kind.prefix for kind in kinds if kind.config.engine != "fake"}  # a fake engine has no weights
        self._seconds = state.config.weights.timeout_seconds
        self._notes: set[str] = set()  # that the user has seen
        self.mismatch_kl = 0.0  # of the last audit

    @cached_property
    def texts(self) -> list[IntArray]:
        """The last one exceeds every window of the model, if the run's own sequences can."""
        config = self._state.config
        longest = config.task.max_prompt_length + config.generator.max_completion_length
        reach = longest_span(load_shape(config.model)) + PROBE_LENGTH
        lengths = [PROBE_LENGTH] * (PROBE_TEXTS - 1) + [max(PROBE_LENGTH, reach if reach <= longest else 0)]
        return [probe_tokens(self._vocab_size, length, seed) for seed, length in enumerate(lengths)]

    def due(self, number: int) -> list[IntArray] | None:
        """The texts to score with publish ``number``, or None."""
        every = self._state.config.weights.audit_every
        due = bool(self._audited) and (number == 0 or (every > 0 and number % every == 0))
        return self.texts if due else None

    async def make(self, members: Sequence[Replica], version: int, offer: Offer) -> None:
        """Audit the live ``members``; stop the run if they differ from the learner by more than rounding, as
        half-updated weights do. Does nothing if no audit is due."""
        if offer.probe_logprobs is None:
            return
        self._say(offer.note)
        audited = [r for r in members if r.alive and r.name.rpartition("-")[0] in self._audited]
        found = await asyncio.gather(*(self._compare(replica, version, offer.probe_logprobs) for replica in audited))
        self.mismatch_kl = max((kl for kl in found if kl is not None), key=abs, default=self.mismatch_kl)

    async def _compare(self, replica: Replica, version: int, expected: list[FloatArray]) -> float | None:
        """The replica's mismatch_kl, or None if it died."""
        tolerance = self._state.config.audit_tolerance
        asked = replica.handle.call(self._seconds, GeneratorWorker.score, self.texts)
        if (scored := await self._state.heard(replica, asked)) is None:
            return None
        result = compare(expected, scored)
        if result.mean_abs > tolerance.suspicious:
            theirs = await self._state.heard(replica, replica.handle.call(LONG_SECONDS, GeneratorWorker.digests))
            if theirs is None:
                return None
            ours = await self._runtime.learner.call(LONG_SECONDS, LearnerWorker.digests, floating_dtype(theirs))
            judge(result, tolerance, differing_tensors(ours, theirs), replica.name, version)
        self._say(await self._state.heard(replica, replica.handle.call(self._seconds, GeneratorWorker.note)) or "")
        return result.mismatch_kl

    def _say(self, note: str) -> None:
        """Show the user a part's note, once for all parts that have it."""
        if note and note not in self._notes:
            self._notes.add(note)
            self._state.message(note)
