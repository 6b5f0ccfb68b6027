"""What the controller's loops share: versions, replicas, groups in the making, and the signal that wakes the loops."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncrlhf.buffer.admission import Gate
from asyncrlhf.buffer.ledger import Ledger
from asyncrlhf.buffer.replay import ReplayBuffer
from asyncrlhf.cluster.clock import Signal
from asyncrlhf.cluster.handles import GeneratorHandle
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.orchestrator.adaptive import AdaptiveBound
from asyncrlhf.orchestrator.pace import Pace
from asyncrlhf.readahead.owners import ReadAhead, Reader, ReadTotals
from asyncrlhf.types import Annotation, Prompt, ScoredRollout


@dataclass
class Replica:
    """One generator as the controller sees it. ``version`` is what it holds (-1: nothing yet)."""

    handle: GeneratorHandle
    version: int = -1
    in_flight: set[int] = field(default_factory=set)
    draining: bool = False
    alive: bool = True
    restarts: int = 0
    busy_seconds: float = 0.0  # of replicas that took its place before, too
    tokens: int = 0
    pace: Pace = field(default_factory=Pace)

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def takes_work(self) -> bool:
        return self.alive and not self.draining and self.version >= 0


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
    scored: list[ScoredRollout] = field(default_factory=list)
    # What workers of each kind (reward, reference, critic) gave, and when, by rollout id: until all kinds have.
    annotations: dict[str, dict[int, tuple[Annotation, float]]] = field(default_factory=lambda: defaultdict(dict))


@dataclass
class RunState:
    """Owned by the controller; every loop gets it and none of them keeps state of its own that must survive."""

    config: RunConfig
    ledger: Ledger
    gate: Gate
    buffer: ReplayBuffer
    replicas: list[Replica] = field(default_factory=list)
    groups: dict[int, GroupInProgress] = field(default_factory=dict)
    requeue: deque[int] = field(default_factory=deque)  # rollout ids to be sampled again
    version: int = 0
    published_version: int = -1
    next_group_id: int = 0
    elapsed: float = 0.0  # seconds of the run up to the last step, earlier sessions of a resumed run included
    stopping: bool = False
    last_progress: float = 0.0
    changed: Signal = field(default_factory=Signal)
    prefill: ReadTotals = field(default_factory=ReadTotals)  # by the reward model
    reference_prefill: ReadTotals = field(default_factory=ReadTotals)
    adaptive: AdaptiveBound = field(init=False)

    def __post_init__(self) -> None:
        self.adaptive = AdaptiveBound(self.config.async_)

    @property
    def scheduled(self) -> bool:
        """True in the modes whose every batch has its step fixed beforehand."""
        return self.config.async_.fixed_lag is not None

    @property
    def bound(self) -> int:
        """The staleness bound in force; ``config.async_.bound`` is the highest that it can be."""
        return self.adaptive.bound

    def follow(self) -> None:
        """Tell gate and buffer where the learner is and which bound is in force."""
        self.buffer.set_bound(self.bound)
        asked = self.config.buffer.admission_bound(self.bound)
        self.gate.follow(self.version, self.buffer.replayed_by(self.version), asked)

    def now(self) -> float:
        """Seconds of the run's clock."""
        return asyncio.get_running_loop().time()

    def progressed(self) -> None:
        """Something moved: restart the stall watch and let every loop look again."""
        self.last_progress = self.now()
        self.changed.notify()

    def reading_ahead(
        self, kind: str, workers: Sequence[Reader], totals: ReadTotals, message: Callable[[str], None]
    ) -> ReadAhead[Reader]:
        """Of the annotators of ``kind``; the rest as of :class:`ReadAhead`."""

        def group_of(rollout_id: int) -> GroupInProgress | None:
            return self.groups.get(rollout_id // self.config.num_generations)

        def under_way(rollout_id: int) -> bool:
            group = group_of(rollout_id)
            return group is not None and rollout_id in group.unfinished

        def wanted(rollout_id: int) -> bool:
            group = group_of(rollout_id)
            if group is None or rollout_id not in group.unscored:
                return False
            return rollout_id not in group.annotations[kind]

        return ReadAhead(f"The {kind} model", workers, under_way, wanted, totals, message, self.changed.notify)

    def unfinished_versions(self) -> list[int]:
        """One entry a group in the making: the oldest version that it can carry."""
        return [g.version for g in self.groups.values()]
