"""Workers that only let virtual time pass, for whole simulated runs of milliseconds: the loops around them are real.

Each knows the truth that the controller only claims. A generator writes into ``behavior_logprobs`` of each token the
version that it really held, and of which life of the learner, beside the ``policy_versions`` that it was told; the
learner keeps what it really trained.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncrlhf.actors.messages import Offer, annotated
from asyncrlhf.actors.worker import Outbox
from asyncrlhf.engines.engine import StepOutput
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.orchestrator.rollouts.episodes import ATTEMPT
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import Annotation, GenerationFailure, GenerationRequest, Rollout, WeightManifest

TOKENS = 3  # of each response
TRAINED_FILE = "trained.json"
LIFE = 10_000  # more than a run has versions: a token's truth is the learner's life and the version, in one number
TORN = LIFE - 1  # the truth of a token whose weights were written to while they were loaded
EARLY = 1e-9  # seconds that a timer of the virtual clock may be early


@dataclass(frozen=True)
class Trained:
    """One use of a rollout by the learner: ``true`` versions of its tokens, and those that they were ``told``."""

    step: int
    rollout_id: int
    true: tuple[int, ...]
    told: tuple[int, ...]
    masked_before: int
    critic_version: int | None
    has_reference: bool
    undone: bool = False  # a token is of a version that a death of the learner has undone
    whole: bool = True  # its turns are those of one attempt, in their order


@dataclass
class World:
    """Seconds that things cost, one rollout in how many fails, and what the learner did."""

    rollout: float = 0.4
    train: float = 0.35
    score: float = 0.02
    transfer: float = 0.05
    load: float = 0.02
    machines: int = 1
    fails_one_in: int = 0
    odd_one_in: int = 0  # episodes
    deadly_one_in: int = 0  # episodes that end their worker
    episodes_fail: bool = False  # or may have failed in a session before
    trained: list[Trained] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)  # of the learner: the version at which each began, LIFE before that

    def fails(self, rollout_id: int, what: int) -> bool:
        """The same of each rollout in every session of a run."""
        return self.fails_one_in > 0 and random.Random(2 * rollout_id + what).randrange(self.fails_one_in) == 0


@dataclass
class Response:
    """A response under way: when each token comes, and the (told, true) version of those that came."""

    item: GenerationRequest
    due: list[float]
    versions: list[tuple[int, int]] = field(default_factory=list)


class Generator:
    """A replica. A response's seconds come from its request's seed alone."""

    def __init__(self, world: World, spec: Any, clock: Callable[[], float]) -> None:
        self.name, self.clock, self.outbox = spec.name, clock, Outbox()
        self.tokens, self.busy_seconds, self.version = 0, 0.0, -1
        self.frozen = self.asleep = False
        self._world, self._slots = world, spec.generator.slots
        self._staged = self._held = -1
        self._memory: dict[int, int] = {}  # what it holds for others, by place
        self._offer: Ticket | None = None
        self._waiting: deque[GenerationRequest] = deque()
        self._running: dict[int, Response] = {}

    def worked(self, seconds: float) -> None:
        self.busy_seconds += seconds

    def submit(self, items: Sequence[GenerationRequest]) -> None:
        self._waiting.extend(items)

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        gone = set(rollout_ids)
        held = [i.rollout_id for i in self._waiting if i.rollout_id in gone] + [i for i in self._running if i in gone]
        self._waiting = deque(item for item in self._waiting if item.rollout_id not in gone)
        self._running = {i: one for i, one in self._running.items() if i not in gone}
        return held + self.outbox.withdraw(rollout_ids)

    def sleep(self, keep_weights: bool = True) -> None:
        self._go_on()
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    @property
    def running(self) -> int:
        return len(self._running)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running) and not self.frozen and not self.asleep

    def step(self) -> StepOutput:
        now = self.clock()
        self._go_on()
        ended = [one for one in self._running.values() if len(one.versions) == TOKENS]
        for one in ended:
            del self._running[one.item.rollout_id]
        while self._waiting and len(self._running) < self._slots:
            item = self._waiting.popleft()
            rng = random.Random(item.seed)
            seconds = self._world.rollout * math.exp(0.5 * rng.gauss(0.0, 1.0)) * (8 if rng.random() < 0.03 else 1)
            due = [now + seconds * (i + 1) / TOKENS for i in range(TOKENS)]
            self._running[item.rollout_id] = Response(item, due)
        done = [self._finished(one) for one in ended]
        self.outbox.put(done, now)
        self.tokens += TOKENS * len(done)
        wake = min((one.due[-1] for one in self._running.values()), default=now)
        return StepOutput([r for r in done if isinstance(r, Rollout)], wake_at=wake)

    def _go_on(self) -> None:
        """The tokens that are due by now, by the weights that are loaded now."""
        now = self.clock() + EARLY
        for one in self._running.values():
            while len(one.versions) < TOKENS and one.due[len(one.versions)] <= now:
                one.versions.append((self.version, self._held))

    def _finished(self, one: Response) -> Rollout | GenerationFailure:
        item, (told, true) = one.item, zip(*one.versions, strict=True)
        if item.rollout_id >= 0 and self._world.fails(item.rollout_id, 0):
            return GenerationFailure(item.rollout_id, "a planned failure of generation", item.epoch, item.tag)
        ids, truth = np.full(TOKENS, item.tag + 1, np.int64), np.array(true, np.float32)
        made = item.rollout_id, item.group_id, item.prompt, ids, truth, np.array(told), "stop", "", self.name
        return Rollout(*made, epoch=item.epoch, tag=item.tag)

    async def receive(self, ticket: Any, read: Sequence[Any] | None = None) -> None:
        """With ``read`` into memory that holds an earlier version and that none of these reads, as a relay does."""
        if read is None:
            await asyncio.sleep(self._world.transfer)
            self._staged = ticket.truth
            return
        taken = {place for holder, place in read if holder is self}
        taken |= {self._offer.refs[1]} if self._offer is not None else set()
        place = next(i for i in itertools.count() if i not in taken)
        self._memory[place], self._offer = TORN, None
        await asyncio.sleep(self._world.transfer)
        self._memory[place] = ticket.truth
        self._offer = Ticket(ticket.version, 0, ticket.manifest, (self, place))

    def offer(self) -> Ticket:
        assert self._offer is not None
        return self._offer

    def host(self) -> str:
        return f"machine {int(self.name[-1]) % self._world.machines}"

    async def load(self, version: int, cache: str, ticket: Ticket | None = None) -> None:
        if ticket is not None:
            assert ticket.version == version
            holder, place = ticket.refs
            before = holder._memory[place]
        await asyncio.sleep(self._world.load)
        if ticket is not None:
            self._staged = before if before == holder._memory[place] else TORN
        self._go_on()
        self.version, self._held = version, self._staged


class Learner:
    """One rank. Its checkpoint is the list of what it trained. What it did before its death, and did not save, never
    was: its next life begins at an earlier version."""

    def __init__(self, world: World) -> None:
        self.version = 0
        self._world = world
        self._snapshot = -1
        world.trained.clear()
        world.lives.append(LIFE)  # none of its versions is known yet: it may die before it has any

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        """Nothing is sent."""

    def snapshot(self, probe: Any) -> Any:
        self._snapshot = self.version
        self._world.lives[-1] = min(self._world.lives[-1], self.version)

        async def offer() -> Offer:
            await asyncio.sleep(self._world.load)
            return Offer(0.0)

        return offer()

    def ticket(self) -> Any:
        truth = (len(self._world.lives) - 1) * LIFE + self._snapshot
        return SimpleNamespace(version=self._snapshot, truth=truth, manifest=WeightManifest((), ()))

    critic_ticket = ticket

    async def transfer(self, ticket: Any) -> None:
        await asyncio.sleep(self._world.transfer)

    async def train(self, chosen: Sequence[Any], rollouts: Sequence[Rollout], **recorded: Any) -> StepResult:
        await asyncio.sleep(self._world.train)
        for (_, _, _, masked), r in zip(chosen, rollouts, strict=True):
            stamped = [divmod(int(v), LIFE) for v in r.behavior_logprobs[r.sampled]]
            true = tuple(version for _, version in stamped)
            undone = any(version > min(self._world.lives[life + 1 :], default=version) for life, version in stamped)
            told = tuple(int(v) for v in r.policy_versions[r.sampled])
            facts = r.critic_version, r.ref_logprobs is not None, undone, is_whole(r)
            use = Trained(self.version, r.rollout_id, true, told, masked, *facts)
            self._world.trained.append(use)
        self.version += 1
        return StepResult({"loss": 0.0, "ess_fraction_seq": 0.9})

    async def save(self, folder: Path) -> None:
        await asyncio.sleep(self._world.train)
        uses = [list(vars(use).values()) for use in self._world.trained]
        (folder / TRAINED_FILE).write_text(json.dumps([self.version, uses, self._world.lives]))

    def saved(self) -> dict[str, Any]:
        return {}

    async def load(self, folder: Path) -> None:
        await asyncio.sleep(self._world.train)
        self.version, uses, lives = json.loads((folder / TRAINED_FILE).read_text())
        if len(self._world.lives) == 1:  # the first of a process that resumes the run
            self._world.lives[:0] = lives
        self._world.lives[-1] = self.version
        self._world.trained[:] = [Trained(a, b, tuple(c), tuple(d), *rest) for a, b, c, d, *rest in uses]


class Scorer:
    """A reward, reference or critic worker."""

    def __init__(self, world: World, kind: str) -> None:
        self._world, self._kind = world, kind

    async def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], Any]:
        await asyncio.sleep(self._world.score * len(rollouts))
        if self._kind == "reward":
            return [self._reward(r.rollout_id) for r in rollouts], []
        arrays = [np.zeros(len(r.response_ids), np.float32) for r in rollouts]
        if self._kind == "reference":
            return annotated("ref_logprobs", rollouts, arrays)
        return annotated("values", rollouts, arrays, ticket.version)

    def _reward(self, rollout_id: int) -> Annotation:
        if rollout_id >= 0 and self._world.fails(rollout_id, 1):
            return Annotation(rollout_id, error="a planned failure of a reward")
        return Annotation(rollout_id, random.Random(rollout_id).random())


def is_whole(rollout: Rollout) -> bool:
    """Whether an episode's turns were asked for by one attempt, one after the other: a sampled token is the tag of its
    request and 1."""
    tags = rollout.response_ids[rollout.sampled] - 1
    first = int(tags[0]) if len(tags) else 0
    turns = len(rollout.turns) or 1
    return bool(first % ATTEMPT == 0 and np.array_equal(tags - first, np.repeat(np.arange(turns), TOKENS)))
