"""Publishing: sends a snapshot to every replica while the learner trains on, has it loaded as configured, audits it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncrlhf.actors.messages import Offer
from asyncrlhf.errors import ReplicaError, WeightSyncError
from asyncrlhf.orchestrator.handles import Runtime
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.transport.audit import compare, probe_tokens
from asyncrlhf.transport.base import LostReceiversError
from asyncrlhf.types import FloatArray

PROBE_TEXTS, PROBE_LENGTH = 4, 16


class WeightPublisher:
    """One publish at a time. ``busy`` from the snapshot until every live replica has loaded it."""

    def __init__(
        self,
        state: RunState,
        runtime: Runtime,
        vocab_size: int,
        on_dead: Callable[[Replica, ReplicaError], None],
    ) -> None:
        self._state = state
        self._runtime = runtime
        self._on_dead = on_dead
        self._task: asyncio.Task[None] | None = None
        self._members: list[Replica] | None = None
        self._publishes = 0
        self._probe = [probe_tokens(vocab_size, PROBE_LENGTH, seed) for seed in range(PROBE_TEXTS)]
        self._lock = asyncio.Lock()
        self.last_seconds = 0.0
        self.mismatch_kl = 0.0
        self.waiting_for = ""

    @property
    def busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def next_probe(self) -> list[np.ndarray] | None:
        """The probe texts when the coming publish is to be audited."""
        every = self._state.config.weights.audit_every
        due = self._publishes == 0 or (every > 0 and self._publishes % every == 0)
        audited = self._state.config.generator.engine != "fake"
        return self._probe if due and audited else None

    def start(self, version: int, offer: Offer) -> None:
        """Publish in the background; the caller made sure that nothing else is under way."""
        assert not self.busy, "a publish is still under way"
        self.raise_if_failed()
        self._publishes += 1
        self._task = asyncio.create_task(self._publish(version, offer), name=f"publish v{version}")
        self._task.add_done_callback(lambda _: self._state.changed.notify())

    def raise_if_failed(self) -> None:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            error = self._task.exception()
            if error is not None:
                raise error

    async def idle(self) -> None:
        """Wait until the publish under way is loaded everywhere; raises what made it fail."""
        await self._state.changed.wait_for(lambda: not self.busy)
        self.raise_if_failed()

    async def close(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _publish(self, version: int, offer: Offer) -> None:
        started = self._state.now()
        async with self._lock:
            members = [r for r in self._state.replicas if r.alive]
            await self._send(members)
            members = [r for r in members if r.alive]
            await asyncio.gather(*(self._load(replica, version) for replica in members))
            self._state.published_version = version
            if offer.probe_logprobs is not None:
                await self._audit(members, version, offer.probe_logprobs)
        self.last_seconds = self._state.now() - started
        self._state.progressed()

    async def _send(self, members: list[Replica]) -> int:
        """Transfer the newest snapshot to all members and return its version; a member that dies on the way leaves the
        group, and the rest is sent to anew."""
        while True:
            if self._members != members:
                self.waiting_for = "the weight group to form"
                await self._runtime.connect([r.handle for r in members])
                self._members = list(members)
            ticket = await self._runtime.learner.ticket()
            self.waiting_for = f"weights to reach {', '.join(r.name for r in members)}"
            results = await asyncio.gather(
                self._runtime.learner.transfer(ticket),
                *(self._receive(replica, ticket) for replica in members),
                return_exceptions=True,
            )
            failures = [r for r in results if isinstance(r, BaseException)]
            self._bury_lost(members, failures)
            survivors = [r for r in members if r.alive]
            if not failures and survivors == members:
                self.waiting_for = ""
                return int(ticket.version)
            fatal = [f for f in failures if not isinstance(f, WeightSyncError)]
            if fatal:
                raise fatal[0]
            if survivors == members or not survivors:
                raise failures[0] if failures else WeightSyncError("every generator died during a weight transfer.")
            members[:] = survivors

    def _bury_lost(self, members: list[Replica], failures: list[BaseException]) -> None:
        """A receiver that let the time-out pass is as good as dead, whether its process lives or not."""
        lost = {name: why for f in failures if isinstance(f, LostReceiversError) for name, why in f.receivers.items()}
        for replica in members:
            if replica.name in lost:
                self._on_dead(replica, ReplicaError(f"{replica.name} {lost[replica.name]} during a weight transfer"))
        if lost:
            self._members = None

    async def _receive(self, replica: Replica, ticket: Any) -> None:
        try:
            await replica.handle.receive(ticket)
        except ReplicaError as error:
            self._on_dead(replica, error)

    async def _load(self, replica: Replica, version: int) -> None:
        """Load as ``async.on_weight_update`` says; only now does the gate count the replica at this version."""
        mode = "drain" if self._state.scheduled else self._state.config.async_.on_weight_update
        if mode == "drain":
            # A scheduled batch must be generated whole by its version: wait for its admission as well as for its end.
            drained = self._schedule_done if self._state.scheduled else lambda: not replica.in_flight
            self.waiting_for = f"{replica.name} to finish its rollouts before it loads version {version}"
            replica.draining = not self._state.scheduled
            await self._state.changed.wait_for(lambda: not replica.alive or drained())
            self.waiting_for = ""
        try:
            if replica.alive:
                await replica.handle.load(version, "recompute" if mode == "interrupt" else "keep")
                replica.version = version
        except ReplicaError as error:
            self._on_dead(replica, error)
        finally:
            replica.draining = False
        self._state.progressed()

    def _schedule_done(self) -> bool:
        state = self._state
        held = min((r.version for r in state.replicas if r.alive), default=-1)
        nothing_due = held < 0 or state.gate.room(held) < state.config.num_generations
        return nothing_due and not state.requeue and not any(r.in_flight for r in state.replicas)

    async def rejoin(self, replica: Replica) -> None:
        """Bring a restarted replica to the version that the others hold, from the learner's present snapshot."""
        await self._state.changed.wait_for(lambda: not self.busy)
        async with self._lock:
            members = [r for r in self._state.replicas if r.alive or r is replica]
            replica.alive = True
            version = await self._send(members)
            await replica.handle.load(version, "keep")
            replica.version = version
        self._state.progressed()

    async def _audit(self, members: list[Replica], version: int, expected: list[FloatArray]) -> None:
        """The engine's log-probs of the probe texts must be the learner's: half-updated weights stop the run."""
        tolerance = self._state.config.audit_tolerance
        for replica in [r for r in members if r.alive]:
            result = compare(expected, await replica.handle.score(self._probe))
            self.mismatch_kl = result.mismatch_kl
            if result.mean_abs <= tolerance:
                continue
            theirs, ours = await replica.handle.digests(), await self._runtime.learner.digests()
            differing = sorted(name for name in ours if theirs.get(name) != ours[name])
            named = f"; tensors that differ: {', '.join(differing[:5])}" if differing else ""
            raise WeightSyncError(
                f"the log-prob audit of {replica.name} at version {version} found a mean difference of "
                f"{result.mean_abs:.3g} (largest {result.max_abs:.3g}), allowed {tolerance:.3g}{named}."
            )
