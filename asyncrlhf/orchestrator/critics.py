"""The critic service (``critic.where=service``): what a run starts, which version answers whom, and its queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.cluster.handles import CriticHandle, Runtime
from asyncrlhf.cluster.remote import LONG_SECONDS
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.service import Waiting
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.orchestrator.token_service import TokenService, completed_by
from asyncrlhf.types import Rollout, RolloutInfo, ServiceResult


class CriticVersions:
    """The critics that workers can be given: tickets, by version.

    A free run keeps the newest, which answers whoever is no younger. In the scheduled modes the critic of the very
    version that sampled a rollout answers it, which is the same in every run; so a version is kept for as long as
    rollouts of it are in the making or to come.
    """

    def __init__(self, state: RunState, runtime: Runtime) -> None:
        self._state = state
        self._runtime = runtime
        self._tickets: dict[int, Any] = {}

    async def hand_over(self) -> None:
        """Take the critic of the learner's newest snapshot."""
        if not self._state.config.critic_served:
            return
        ticket = await self._runtime.learner.call(LONG_SECONDS, LearnerWorker.critic_ticket)
        self._tickets[ticket.version] = ticket
        oldest = ticket.version
        if self._state.scheduled:
            oldest = min([oldest, self._state.published_version, *self._state.unfinished_versions()])
        self._tickets = {version: kept for version, kept in self._tickets.items() if version >= oldest}
        self._state.progressed()

    def answers(self, info: RolloutInfo) -> int | None:
        """The version whose critic answers this rollout; None while it is still to come."""
        if self._state.scheduled:
            return info.max_version if info.max_version in self._tickets else None
        newest = max(self._tickets, default=-1)
        return newest if newest >= info.max_version else None

    def ticket(self, info: RolloutInfo) -> Any:
        """The newest for a rollout that nobody waits for any more."""
        version = self.answers(info)
        return self._tickets[max(self._tickets) if version is None else version]


class Critics(TokenService[CriticHandle]):
    """Each rollout as soon as it ends and the critic of its version is there, beside its reward; where there is a
    reference service, after that. All of a call are answered by one version."""

    title = "critic worker"

    def __init__(
        self, state: RunState, assembly: Assembly, workers: list[CriticHandle], versions: CriticVersions
    ) -> None:
        super().__init__(state, assembly, workers, state.config.critic.token_budget)
        self._versions = versions

    def _askable(self, wanted: list[Waiting]) -> list[Waiting]:
        able = [(self._versions.answers(waiting.info), waiting) for waiting in wanted]
        first = next((version for version, _ in able if version is not None), None)
        return [waiting for version, waiting in able if version is not None and version == first]

    async def _call(self, worker: CriticHandle, batch: Sequence[Waiting]) -> list[ServiceResult]:
        return await worker.value([w.info.payload for w in batch], self._versions.ticket(batch[0].info))

    def _accept(self, waiting: Waiting, result: ServiceResult) -> None:
        self._assembly.valued(waiting.info, result)


async def valued(rollouts: Mapping[int, Rollout], config: RunConfig, runtime: Runtime) -> dict[int, Rollout]:
    """A checkpoint's finished rollouts with what this run's learner expects of the critic: values that they have are
    kept, those that lack them get them from the critic of the checkpoint. Call it before anything is published.

    Raises AsyncRLHFError when that fails for one.
    """
    if not config.critic_served:
        return {i: replace(rollout, values=None, critic_version=None) for i, rollout in rollouts.items()}
    lacking = [r for r in rollouts.values() if r.values is None]
    if not lacking:
        return dict(rollouts)
    await runtime.learner.snapshot(None)
    ticket = await runtime.learner.call(LONG_SECONDS, LearnerWorker.critic_ticket)
    return await completed_by(lambda asked: runtime.critics[0].value(asked, ticket), rollouts, lacking, runtime)
