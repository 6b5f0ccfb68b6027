"""The state that the controller's loops share: versions, replicas, unfinished groups, and signals to wake the loops."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from asyncrlhf.buffer.admission import Gate
from asyncrlhf.buffer.ledger import Ledger
from asyncrlhf.buffer.replay import ReplayBuffer
from asyncrlhf.cluster.clock import Signal
from asyncrlhf.cluster.handles import GeneratorHandle
from asyncrlhf.config.conversion import to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.adaptive import AdaptiveBound
from asyncrlhf.orchestrator.episode_table import EpisodeTable
from asyncrlhf.orchestrator.pace import Pace
from asyncrlhf.readahead.owners import ReadTotals
from asyncrlhf.records.write.journal import Journal
from asyncrlhf.types import Annotation, BatchFault, Prompt, RolloutInfo

R = TypeVar("R")

EXPECT_SECONDS = 1.0  # for which a replica keeps a slot for the first turn of an episode


@dataclass
class Replica:
    """One generator as the controller sees it. ``version``: the policy version that it holds (-1: none yet)."""

    handle: GeneratorHandle
    version: int = -1
    asked: int = -1  # the newest version that it was asked to load; no token of it is newer
    in_flight: set[int] = field(default_factory=set)
    expected: dict[int, float] = field(default_factory=dict)  # episodes whose first turn it has a slot for, since when
    ahead: int = 0  # of them, those without one: it samples others until they come
    draining: bool = False
    leaving: bool = False  # its node goes soon
    alive: bool = True
    restarts: int = 0
    cause: str = ""  # of its last death
    busy_seconds: float = 0.0  # of replicas that took its place before, too
    tokens: int = 0
    pace: Pace = field(default_factory=Pace)

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def takes_work(self) -> bool:
        return self.alive and not (self.draining or self.leaving) and self.version >= 0

    @property
    def free_slots(self) -> int:
        """Slots less rollouts in flight or expected; negative if rollouts wait in the replica's queue."""
        return self.handle.slots - len(self.in_flight) - max(0, len(self.expected) - self.ahead)

    def has_slot(self, rollout_id: int) -> bool:
        """Whether a slot is free, or kept for this episode."""
        kept = rollout_id in self.expected and (not self.ahead or len(self.in_flight) < self.handle.slots)
        return kept or self.free_slots > 0

    def begin(self, rollout_id: int, now: float, version_lag: int) -> None:
        """The rollout is given to the replica, whose weights are ``version_lag`` behind the learner's."""
        self.in_flight.add(rollout_id)
        self.pace.begin(rollout_id, now, version_lag)

    def end(self, rollout_id: int, now: float, *, finished: bool) -> None:
        """The rollout left the replica; ``finished=False``: it failed or was cancelled. A second call does nothing."""
        self.in_flight.discard(rollout_id)
        self.pace.end(rollout_id, now, finished=finished)


@dataclass
class GroupInProgress:
    """The siblings of one prompt until all of them are scored, failed or dropped."""

    group_id: int
    prompt: Prompt
    admitted_at: float
    scheduled_step: int | None
    version: int  # the oldest version that any sibling can have begun with
    unfinished: set[int]
    unscored: set[int]
    scored: list[RolloutInfo] = field(default_factory=list)
    epoch: int = 0  # of its last issue: results of earlier ones are not accepted
    newest: int = -1  # version of a token of a sibling that has left its replica
    # Answers of each kind of worker (reward, reference, critic) and their times, by rollout id, until all have come.
    annotations: dict[str, dict[int, tuple[Annotation, float]]] = field(default_factory=lambda: defaultdict(dict))


class Groups(dict[int, GroupInProgress]):
    """Unfinished groups by id. ``versions`` counts them by ``GroupInProgress.version``, which never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: Counter[int] = Counter()

    def __setitem__(self, group_id: int, group: GroupInProgress) -> None:
        assert group_id not in self, f"group {group_id} is in the making already"
        super().__setitem__(group_id, group)
        self.versions[group.version] += 1

    def clear(self) -> None:
        super().clear()
        self.versions.clear()

    def __delitem__(self, group_id: int) -> None:
        version = self[group_id].version
        super().__delitem__(group_id)
        self.versions[version] -= 1
        if not self.versions[version]:
            del self.versions[version]


@dataclass
class RunState:
    """Owned by the controller and passed to every loop; no loop keeps other state that must survive.

    Each loop waits for one signal: ``room`` (the dispatcher: places at the gate, in the buffer or on a replica),
    ``batch`` (the learner: groups in the buffer), ``queue`` (the services: rollouts for their workers), ``emptied`` (a
    publish that drains: a replica without rollouts). ``changed`` is for rare events, such as a step, a publish or a
    death, and wakes the others too.
    """

    config: RunConfig
    ledger: Ledger
    gate: Gate
    buffer: ReplayBuffer
    message: Callable[[str], None] = lambda text: None  # for the user
    published: Callable[[int], None] = lambda version: None  # called after each complete publish, outside the loop
    journal: Journal = field(default_factory=Journal)
    replicas: list[Replica] = field(default_factory=list)
    groups: Groups = field(default_factory=Groups)
    requeue: deque[int] = field(default_factory=deque)  # rollout ids to be sampled again, or an episode's next turn
    episodes: EpisodeTable = field(default_factory=EpisodeTable)
    dead: asyncio.Queue[Replica] = field(default_factory=asyncio.Queue)  # to be started again
    version: int = 0
    saved_version: int = 0  # of the newest checkpoint; 0 also without one
    taken_version: int = 0  # the same, or of the checkpoint that is being written
    epoch: int = 0  # times that the learner died and ``version`` went back to a checkpoint's
    published_version: int = -1
    next_group_id: int = 0
    elapsed: float = 0.0  # seconds of the run up to the last step, earlier sessions of a resumed run included
    stopping: bool = False
    resting: bool = False  # nothing begins until a checkpoint is written
    rests: int = 0  # number of such checkpoints; earlier measurements of the replicas' pace are discarded
    last_progress: float = -1.0  # of the clock; negative before the first
    room: Signal = field(default_factory=Signal)
    batch: Signal = field(default_factory=Signal)
    queue: Signal = field(default_factory=Signal)
    emptied: Signal = field(default_factory=Signal)
    changed: Signal = field(init=False)
    touched: dict[str, Replica] = field(default_factory=dict)  # by name, replicas that the dispatcher must check again
    prefill: ReadTotals = field(default_factory=ReadTotals)  # by the reward model
    reference_prefill: ReadTotals = field(default_factory=ReadTotals)
    reward_batch_faults: int = 0  # calls of rewards that failed whole, since the last step
    faults_told: set[tuple[str, str]] = field(default_factory=set)  # parts of the reward, kinds of their faults
    adaptive: AdaptiveBound = field(init=False)

    def __post_init__(self) -> None:
        self.adaptive = AdaptiveBound(self.config.async_)
        self.ledger.note = self.journal.note
        self.changed = Signal(self.room, self.batch, self.queue, self.emptied)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings as checkpoints store them."""
        return to_plain(self.config)

    @property
    def scheduled(self) -> bool:
        """Whether the mode fixes beforehand in which step each group trains."""
        return self.config.async_.fixed_lag is not None

    @property
    def bound(self) -> int:
        """The staleness bound in force; ``config.async_.bound`` is its maximum."""
        return self.adaptive.bound

    def follow(self) -> None:
        """Tell gate and buffer the learner's version and the bound in force."""
        self.buffer.set_bound(self.bound)
        asked = self.config.buffer.admission_bound(self.bound)
        self.gate.follow(self.version, self.buffer.replayed_by(self.version), asked)

    def now(self) -> float:
        """Seconds of the run's clock."""
        return asyncio.get_running_loop().time()

    def progressed(self, *concerned: Signal) -> None:
        """Record progress for the stall watch and notify the signals ``concerned``, or all loops if none is given."""
        self.last_progress = self.now()
        for signal in concerned or (self.changed,):
            signal.notify()

    def forget_late(self) -> None:
        """Keep no slot any longer for episodes whose environment takes long to begin."""
        for replica in self.replicas:
            held, now = replica.expected, self.now()
            while held and now - held[oldest := next(iter(held))] > EXPECT_SECONDS:
                del held[oldest]
                self.touched[replica.name] = replica

    def expect_no_more(self, rollout_id: int) -> None:
        """The first turn of an episode has come, or never will."""
        last = self.episodes.last.get(rollout_id)
        for replica in self.replicas:
            if replica.name == last:
                replica.expected.pop(rollout_id, None)

    def touch(self, replica: Replica, *concerned: Signal) -> None:
        """Mark the replica as changed for the dispatcher, and notify the signals ``concerned`` too."""
        self.touched[replica.name] = replica
        self.progressed(self.room, *concerned)

    def died(self, replica: Replica, error: ReplicaError) -> None:
        """Report a death. Any loop may, any number of times: the first report removes the replica and requeues its
        rollouts, before any other loop runs."""
        if replica.alive:
            self.bury(replica, error)

    def survived(self, worker: str, error: ReplicaError) -> None:
        """Report the death of a worker whose call is repeated."""
        self.journal.note("died", replica=worker, reason=str(error))
        self.message(f"{error} Its call is repeated.")

    async def heard(self, replica: Replica, answer: Awaitable[R]) -> R | None:
        """The replica's answer, or None if the replica died, which this reports. The end of a process that has been
        replaced meanwhile is no death of the replica."""
        handle = replica.handle
        try:
            return await answer
        except ReplicaError as error:
            if replica.handle is handle:
                self.died(replica, error)
            return None

    def bury(self, replica: Replica, error: ReplicaError) -> None:
        """As :meth:`died`, for a replica that may have died again before it rejoined. The journal gets the cause."""
        replica.alive = False
        replica.version, replica.asked, replica.cause = -1, -1, str(error)
        lost = sorted(replica.in_flight)
        replica.in_flight.clear()
        replica.expected.clear()
        self.journal.note("died", replica=replica.name, reason=str(error))
        for rollout_id in lost:
            if rollout_id not in self.episodes.wanted:  # else its turn is sampled again, and its episode goes on
                self.ledger.requeue(rollout_id)
            self.requeue.append(rollout_id)
        self.message(f"{replica.name} died; its {len(lost)} rollouts are issued again. Cause: {error}")
        self.dead.put_nowait(replica)
        self.progressed()

    def batch_faults(self, faults: Iterable[BatchFault]) -> None:
        """Count reward calls that failed as a whole; the first of each kind is shown to the user."""
        for fault in faults:
            self.reward_batch_faults += 1
            if (kind := (fault.part, fault.kind)) not in self.faults_told:
                self.faults_told.add(kind)
                self.message(f"{fault.part}: {fault.cause}")
