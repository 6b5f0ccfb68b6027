"""The critic service: which version of the critic scores which rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.cluster.handles import LONG_SECONDS, AnnotatorHandle, Runtime
from asyncrlhf.orchestrator.rollouts.annotate import Annotator
from asyncrlhf.orchestrator.rollouts.assembly import Assembly
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.types import Annotation, RolloutInfo


class CriticVersions:
    """Tickets of the critics that workers may load, by version.

    A free run keeps the newest, which scores rollouts sampled by its own or an older version. In the scheduled modes
    the critic of the same version that sampled a rollout scores it, which is the same in every run; so a version is
    kept while rollouts of it are unfinished or still to be admitted.
    """

    def __init__(self, state: RunState, runtime: Runtime) -> None:
        self._state = state
        self._runtime = runtime
        self._tickets: dict[int, Any] = {}

    async def hand_over(self) -> None:
        """Store the critic of the learner's newest snapshot."""
        if not self._state.config.critic_served:
            return
        ticket = await self._runtime.learner.call(LONG_SECONDS, LearnerWorker.critic_ticket)
        self._tickets[ticket.version] = ticket
        oldest = ticket.version
        if self._state.scheduled:
            oldest = min([oldest, self._state.published_version, *self._state.groups.versions])
        self._tickets = {version: kept for version, kept in self._tickets.items() if version >= oldest}
        self._state.progressed()

    def forget(self) -> None:
        """The learner is lost and its critics with it: workers wait for the next snapshot."""
        self._tickets = {}

    @property
    def known(self) -> bool:
        """Whether any critic is available."""
        return bool(self._tickets)

    def answers(self, info: RolloutInfo) -> int | None:
        """The version of the critic that scores this rollout; None if it is not published yet."""
        if self._state.scheduled:
            return info.max_version if info.max_version in self._tickets else None
        newest = max(self._tickets, default=-1)
        return newest if newest >= info.max_version else None

    def ticket(self, info: RolloutInfo) -> Any:
        """The ticket of the rollout's critic; the newest for a rollout that was dropped, whose version may be gone."""
        version = self.answers(info)
        return self._tickets[max(self._tickets) if version is None else version]


class Critics(Annotator):
    """The critic service (``critic.workers``): the critic of its version scores a rollout; a call has one
    version."""

    kind = "critic"

    def __init__(
        self, state: RunState, assembly: Assembly, workers: list[AnnotatorHandle], versions: CriticVersions
    ) -> None:
        super().__init__(state, assembly, workers, state.config.critic.token_budget)
        self._versions = versions

    def _wanted(self, worker: AnnotatorHandle) -> Iterator[RolloutInfo]:
        chosen: int | None = None
        for info in super()._wanted(worker):
            version = self._versions.answers(info)
            chosen = version if chosen is None else chosen
            if version is not None and version == chosen:
                yield info

    async def _call(self, worker: AnnotatorHandle, batch: Sequence[RolloutInfo]) -> list[Annotation]:
        await self._state.queue.wait_for(lambda: self._versions.known)  # a lost learner is on its way back
        return await worker.annotate([w.payload for w in batch], self._versions.ticket(batch[0]))
