"""Watches a run from its first await to its last: reports what each part waits for, replaces parts that hang, and ends
the run only if that does not help.

    after                       what happens
    --------------------------  -----------------------------------------------------------------------------------
    a third of the limit in     the part is pinged and has another third to answer; a
    one call                    part that does not is frozen: generators, reward, reference and critic workers are
                                replaced like dead ones, a learner's ranks are restarted or the run ends under its name
    the limit without progress  a message says what each part waits for
    twice the limit             parts that live but have been in the same call all the time are replaced; StallError
                                if there is none

The limit is ``stall_timeout_seconds``. Progress is an answer that advances a rollout or a version, and any token that a
generator makes, also for an evaluation: a slow part is never replaced. Starts have a limit of their own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrlhf.cluster.calls import START, Call, Calls
from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.errors import ReplicaError, StallError
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from asyncrlhf.orchestrator.replicas.weight_sync import WeightPublisher
from asyncrlhf.orchestrator.rollouts.annotate import Annotator
from asyncrlhf.orchestrator.state import Replica, RunState

LOOKS = 20  # in the time of the limit
# Of the limit: the time in one call before a part is pinged, and the time that it then has to answer. The last third is
# for the replacement, so that a frozen part costs less than the limit.
PATIENCE = 1 / 3


@dataclass(eq=False)
class Supervisor:
    """``doing``: the run's activity before the learner begins. ``beside``: sentences about other work in progress."""

    state: RunState
    runtime: Runtime
    publisher: WeightPublisher
    annotators: Sequence[Annotator]
    beside: Callable[[], Sequence[str]]
    calls: Calls = field(default_factory=Calls)
    learn: LearnLoop | None = None
    doing: str = "starts"
    more: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)  # loops to run beside its own
    _beats: dict[str, tuple[float, float]] = field(default_factory=dict)  # by generator: its beat, and since when
    _asked: dict[str, float] = field(default_factory=dict)  # by part: time of its last ping
    _checks: set[asyncio.Task[None]] = field(default_factory=set)
    _said: float = -1.0  # the last progress before the reported stall
    _looked: float = 0.0
    _stood: float = -math.inf  # when this process was last found to have stood still itself (Ctrl-Z, a busy machine)

    @property
    def limit(self) -> float:
        return self.state.config.stall_timeout_seconds

    @property
    def patience(self) -> float:
        """Seconds in one call before a ping, and seconds for its answer."""
        return self.limit * PATIENCE

    @property
    def still(self) -> float:
        """Seconds since the last progress; 0 before the first."""
        return self.state.now() - self.state.last_progress if self.state.last_progress >= 0 else 0.0

    async def watch(self) -> None:
        """Check in a loop; raises StallError if the run stands still and no part is left to replace."""
        loops = [asyncio.create_task(loop) for loop in (self._keep_looking(), *(more() for more in self.more))]
        try:
            await asyncio.gather(*loops)
        finally:
            for task in (*loops, *self._checks):
                task.cancel()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self.limit / LOOKS)
            self._look()

    def _look(self) -> None:
        self._feel_beats()
        now = self.state.now()
        starting = {call.name for call in self.calls if call.verb == START}
        if self._late():
            self._stood = now
        if starting or now - self._looked > self.patience:
            self.state.last_progress = now
        self._looked = now
        for name in self._long_asked() - starting:
            self._ask(name)
        if self.still <= self.limit:
            return
        self._say()
        if self.state.stopping:
            raise StallError(f"The run did not end: {self._blame()}")
        if self.still > 2 * self.limit and not self._replace_standing():
            raise StallError(f"No progress for {self.still:.0f} s: {self._blame()} {' '.join(self.sentences())}")

    def _late(self) -> bool:
        """Whether this process has stood still since the last look: other processes' answers may not be read yet."""
        return self.state.now() - self._looked > 4 * self.limit / LOOKS

    def _feel_beats(self) -> None:
        """Count new tokens of any generator as progress, also those of an evaluation."""
        now = self.state.now()
        for replica in self.state.replicas:
            beat = replica.handle.beat
            if self._beats.get(replica.name, (None,))[0] != beat:
                self._beats[replica.name] = beat, now
                self.state.last_progress = now

    def _long_asked(self) -> set[str]:
        """Parts in a call for over a third of the limit that have not been pinged meanwhile."""
        now = self.state.now()
        held = {call.name for call in self.calls if now - call.since > self.patience}
        if self.still > self.patience:
            held |= {replica.name for replica in self.state.replicas if replica.alive and replica.in_flight}
        return {name for name in held if now - self._asked.get(name, -self.limit) > self.patience}

    def _ask(self, name: str) -> None:
        part = next((part for part in self.runtime.parts() if part.name == name), None)
        if part is None:  # not one of our parts, such as the object store
            return
        self._asked[name] = self.state.now()
        check = asyncio.create_task(self._check(part), name=f"sign of life of {name}")
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)

    async def _check(self, part: Any) -> None:
        replica = next((r for r in self.state.replicas if r.handle is part), None)
        calls, actor, asked = self.calls.of(part.name), getattr(part, "actor", None), self.state.now()
        try:
            await part.ping(self.patience)
        except ReplicaError:
            if actor is not getattr(part, "actor", None) or (replica is not None and replica.handle is not part):
                return  # replaced meanwhile
            if self._late() or asked - self._stood < self.patience:
                # Its time passed while this process stood still, or just after that: if the whole machine was stopped,
                # the part wakes as well. The next look asks again.
                return
            if self.still > self.patience:
                self._say()
            why = f"did not respond for {self.patience:.3g} s{self._of(part.name)}.{self._of_blocked(part.name)}"
            self._end(part.name, replica, calls, why)

    def _end(self, name: str, replica: Replica | None, calls: Sequence[Call], why: str) -> None:
        """End the calls to a part as if it had died."""
        verdict = f"{name} {why}"
        if replica is not None:
            self.state.died(replica, ReplicaError(verdict))
        elif name in {worker.name for worker in self._annotating()}:
            self.state.message(f"{verdict} Replacing it.")
        for call in calls:
            call.end(verdict)

    def _replace_standing(self) -> bool:
        """Replace the parts that live but make no progress; returns False if there is none."""
        now, found = self.state.now(), False
        busy = self.learn is not None and (self.learn.training or self.learn.turns.training)
        turns = self.runtime.sharing if busy else ()  # asleep meanwhile
        for replica in [r for r in self.state.replicas if r.alive and r.in_flight and r.name not in turns]:
            since = self._beats[replica.name][1]
            if now - since > self.limit:
                found = True
                why = f"generated no token for {now - since:.0f} s with {_in_flight(sorted(replica.in_flight))}."
                self._end(replica.name, replica, self.calls.of(replica.name), why)
        for name in {worker.name for worker in self._annotating()}:
            standing = [call for call in self.calls.of(name) if now - call.since > self.limit]
            found = found or bool(standing)
            if standing:
                self._end(name, None, standing, f"is alive but did not answer{self._of(name)}.")
        return found

    def _say(self) -> None:
        """Report the stall to the user, once for each stall."""
        if self._said != self.state.last_progress:
            self._said = self.state.last_progress
            self.state.message(f"No progress for {self.still:.0f} s. {' '.join(self.sentences())}")

    def _blame(self) -> str:
        """A sentence that names the part whose answer has been awaited for longest."""
        now = self.state.now()
        asked = [call for call in self.calls if call.verb != "ping" and now - call.since > self.patience]
        if not asked:
            held = self.learn.bookkeeping.holds_up() if self.learn is not None else ""
            return f"{held}, is under way; its disk may hang." if held else "every part answers, and none has work."
        name = min(asked, key=lambda call: call.since).name
        return f"{name} has not answered{self._of(name)}."

    def _of(self, name: str) -> str:
        """The oldest call to the part: its verb, its age in seconds, and its rollout ids; empty if there is none."""
        calls = [call for call in self.calls.of(name) if call.verb != "ping"]
        if not calls:
            return ""
        oldest = min(calls, key=lambda call: (not call.ids, call.since))
        ids = list(oldest.ids) or [i for annotator in self.annotators for i in sorted(annotator.in_hand.get(name, ()))]
        return f", asked for {oldest.verb} {self.state.now() - oldest.since:.0f} s ago{_some(ids)}"

    def sentences(self) -> list[str]:
        """One sentence for each part: what it waits for, and since when."""
        return [*self._of_learner(), *self._of_parts(), *self.beside(), *self._of_queues()]

    def _of_learner(self) -> Iterator[str]:
        state, learn = self.state, self.learn
        if learn is None:
            yield f"The run {self.doing}."
            return
        since = f"{state.now() - learn.since:.0f} s ago"
        if state.version >= state.config.steps or state.stopping:
            yield f"The run {self.doing}; the learner ended step {state.version} {since}."
        elif learn.training:
            held = learn.bookkeeping.holds_up()
            beside = f", beside {held}" if held else ""
            yield f"The learner is in its step {state.version}, begun {since}{beside}."
        else:
            batch = f"the batch of step {state.version}, requested {since}"
            yield f"The learner waits for {learn.bookkeeping.holds_up() or batch}."
        yield f"The buffer holds {state.buffer.held} rollouts."

    def _of_parts(self) -> Iterator[str]:
        now, replicas = self.state.now(), {replica.name for replica in self.state.replicas}
        for replica in self.state.replicas:
            name, held = replica.name, sorted(replica.in_flight)
            status = "draining" if replica.draining else f"at version {replica.version}"
            status = status if replica.alive else "dead and being replaced"
            since = now - self._beats.get(name, (0.0, now))[1]
            moved = f"; its last token came {since:.0f} s ago" if held else ""
            yield f"{name} is {status} with {_in_flight(held)}{moved}{self._of(name)}."
        for name in dict.fromkeys(call.name for call in self.calls if call.name not in replicas):
            if asked := self._of(name):
                yield f"{name} is at work{asked}."

    def _of_queues(self) -> Iterator[str]:
        state = self.state
        for annotator in self.annotators:
            if queued := annotator.queued:
                yield f"{len(queued)} rollouts wait for a {annotator.title}{_some(queued)}."
        if self.publisher.busy:
            yield f"The publisher waits for {self.publisher.waiting_for or 'a replica'}."
        if playing := state.episodes.playing:
            first = playing[0]
            since = f"{first} at {state.episodes.at[first]} for {state.now() - state.episodes.since[first]:.0f} s"
            yield f"{len(playing)} episodes wait for {self._environment}{_some(playing)}, the longest, {since}."
        if state.requeue:
            yield f"{len(state.requeue)} rollouts wait to be issued again{_some(list(state.requeue))}."

    @property
    def _environment(self) -> str:
        settings = self.state.config.episode
        if settings.agent:
            return f"episode.agent={settings.agent}"
        return f"episode.environment={settings.environment}" if settings.environment else "a tool of episode.tools"

    def _of_blocked(self, name: str) -> str:
        """What may keep a worker that plays episodes from answering; empty for other parts."""
        played = [i for i in self.state.episodes.playing if self.state.episodes.at[i] == name]
        if not played:
            return ""
        return f" Its episodes{_some(played)} were waiting for {self._environment}, which may block its event loop."

    def save(self) -> None:
        """Ask for a checkpoint out of turn, where the learner is at its steps."""
        if self.learn is not None:
            self.learn.bookkeeping.asked = True

    def status(self) -> dict[str, Any]:
        """The run's present state for ``asyncrlhf status``, in JSON types."""
        state = self.state
        restarts = {part.name: getattr(part, "restarts", 0) for part in self._annotating()}
        restarts |= {replica.name: replica.restarts for replica in state.replicas}
        return {
            "doing": self.doing,
            "step": state.version,
            "steps": state.config.steps,
            "published_version": state.published_version,
            "buffer": state.buffer.held,
            "in_flight": sum(len(replica.in_flight) for replica in state.replicas),
            "waiting_to_be_issued_again": len(state.requeue),
            "seconds_without_movement": round(self.still, 1),
            "restarts": {name: count for name, count in restarts.items() if count},
            "waits": self.sentences(),
        }

    def _annotating(self) -> list[Any]:
        return [*(worker for annotator in self.annotators for worker in annotator.workers), *self.runtime.episodes]


def _in_flight(ids: list[int]) -> str:
    return f"{len(ids)} rollouts in flight{_some(ids)}"


def _some(ids: list[int]) -> str:
    return f" (ids {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''})" if ids else ""
