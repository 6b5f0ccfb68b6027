"""The worker that plays episodes: its spec, the news that it sends to the controller, and the Ray actor around it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from asyncrlhf.actors.messages import Address, RolloutBundle, TurnBundle, infos_of, resolved, told_infos
from asyncrlhf.actors.part import PartActor
from asyncrlhf.actors.where import where
from asyncrlhf.actors.worker import describe
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.episodes.agents.harness import AgentDriver
from asyncrlhf.episodes.conversation import Conversation
from asyncrlhf.episodes.driver import Driver
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.worker import EpisodeWorker
from asyncrlhf.episodes.world import World
from asyncrlhf.errors import ReplicaError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.records.write.spans import Span, SpanBatch, host
from asyncrlhf.tasks.task import PromptEncoder
from asyncrlhf.types import GenerationFailure, GenerationRequest, Payload, Rollout, RolloutInfo

T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeSpec:
    """Everything that a worker needs to start on any machine."""

    settings: EpisodeConfig
    task: TaskConfig
    model: ModelConfig
    context: int  # the longest text that every replica can read, in tokens
    stall_seconds: float = 600.0  # without progress, after which the run counts as stalled
    max_restarts: int = 0

    kind: ClassVar[str] = "episode"

    def build(self, name: str, inline: bool) -> EpisodeWorker:
        """``inline``: functions run in place, on a virtual clock. Raises ConfigError for settings that do not work."""
        return EpisodeWorker(name, self.driver(inline))

    def driver(self, inline: bool) -> Driver | AgentDriver:
        tokenizer = load_tokenizer(self.model)
        task = self.task
        talk = Conversation(
            tokenizer,
            history=self.settings.history,  # type: ignore[arg-type]
            special_in_observed=self.settings.special_in_observed,  # type: ignore[arg-type]
            template_kwargs=task.chat_template_kwargs,
        )
        if self.settings.agents:
            return AgentDriver(self.settings, talk, self.context)
        return Driver(
            self.settings,
            World(self.settings, inline),
            talk,
            PromptEncoder(tokenizer, task),
            self.context,
            task.chat_template,
        )


class TurnWanted(NamedTuple):
    """A turn that an episode waits for; its request lies behind ``payload``."""

    rollout_id: int
    tag: int
    payload: Payload


@dataclass(frozen=True)
class EpisodeNews:
    """What became of a worker's episodes since its last answer, and its spans. ``playing``: those whose environment is
    at work."""

    wanted: list[TurnWanted] = field(default_factory=list)
    finished: list[RolloutInfo] = field(default_factory=list)
    failed: list[GenerationFailure] = field(default_factory=list)
    playing: int = 0
    spans: Sequence[SpanBatch] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        wanted = tuple((turn.rollout_id, turn.tag) for turn in self.wanted)
        return _news, (wanted, told_infos(self.finished), self.failed, self.playing, self.spans)


class StepLanes:
    """The spans of a worker's environments and tools, one a step. Steps at one time are in lanes of their own, each a
    part of the timeline; those that find no lane free are not recorded."""

    MOST = 4

    def __init__(self, worker: EpisodeWorker) -> None:
        """Called on the worker's loop, whose clock is that of the spans."""
        self._worker, self._clock = worker, asyncio.get_running_loop().time
        self._ends = [self._clock()] * self.MOST

    def take(self) -> list[SpanBatch]:
        spans: list[list[Span]] = [[] for _ in self._ends]
        steps, lost = self._worker.steps.take()
        for step in sorted(steps, key=lambda step: step.start):
            lane = next((i for i, end in enumerate(self._ends) if end <= step.start), None)
            if lane is not None:
                kind = f"step {step.name}".strip()
                waited = Span("wait", self._ends[lane], step.start)
                spans[lane] += [waited, Span(kind, step.start, step.end, busy_seconds=step.end - step.start)]
                self._ends[lane] = step.end
        now, name = self._clock(), self._worker.name
        batches = [SpanBatch(f"{name}-{i}", own, now, now, host()) for i, own in enumerate(spans) if own]
        return [batch._replace(lost=lost if i == 0 else 0) for i, batch in enumerate(batches)]


def _wanted(asked: Iterable[tuple[int, int]]) -> list[TurnWanted]:
    return [TurnWanted(rollout_id, tag, Payload(None, i)) for i, (rollout_id, tag) in enumerate(asked)]


def _news(wanted: Iterable[tuple[int, int]], finished: Iterable[Sequence[Any]], *others: Any) -> EpisodeNews:
    return EpisodeNews(_wanted(wanted), infos_of(finished), *others)


def news_of(worker: EpisodeWorker, lanes: StepLanes) -> tuple[EpisodeNews, TurnBundle, RolloutBundle]:
    """The facts, and the bundles for their payloads (:func:`told`)."""
    requests, rollouts, failed = worker.take()
    wanted = _wanted((r.rollout_id, r.tag) for r in requests)
    news = EpisodeNews(wanted, describe(rollouts), failed, worker.playing, lanes.take())
    return news, TurnBundle(requests), RolloutBundle(rollouts)


def told(news: EpisodeNews, requests: Any, rollouts: Any, now: float) -> EpisodeNews:
    """``news`` with the places of requests and rollouts, and the time by the caller's clock."""
    for info in news.finished:
        info.payload, info.generated_at = Payload(rollouts, info.payload.index), now
    wanted = [TurnWanted(turn.rollout_id, turn.tag, Payload(requests, turn.payload.index)) for turn in news.wanted]
    return replace(news, wanted=wanted)


class EpisodeActor(PartActor):
    """One thread runs the asyncio loop of the episodes; calls of other threads reach the worker there."""

    # Between two answers with news, as a replica's with results; the first of a burst waits only for those that come
    # at the same moment.
    NEWS_SECONDS = 0.03
    LINGER_SECONDS = 0.003
    COLLECT_SECONDS = 10.0  # the longest wait of a collect for news
    MOST_ABANDONED = 128  # threads with a call that does not end, after which the process is replaced

    def __init__(self, spec: EpisodeSpec, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True).start()
        self._look_seconds = min(self.COLLECT_SECONDS, spec.stall_seconds / 5)
        self._told_at = -math.inf  # when news were last sent
        driver = spec.driver(inline=False)
        self._calls = driver.calls
        self._agents = driver if isinstance(driver, AgentDriver) else None
        if self._agents is not None:
            self._there(self._agents.open(where().address))
        self._worker: EpisodeWorker = self._there(_async(lambda: EpisodeWorker(name, driver)))
        self._lanes: StepLanes = self._there(_async(lambda: StepLanes(self._worker)))

    def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work`` on the episodes' loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def ping(self) -> bool:
        """Answers if the loop does: code of the user that blocks it blocks all episodes."""
        return self._there(_async(lambda: True))

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        self._there(_async(lambda: self._worker.begin(requests)))

    def sampled(self, addresses: Sequence[Address], *bundles: Any) -> None:
        turns: list[Rollout] = resolved(addresses, bundles)
        self._there(_async(lambda: self._worker.sampled(turns)))

    def cancel(self, rollout_ids: Sequence[int]) -> None:
        self._there(_async(lambda: self._worker.cancel(rollout_ids)))

    def collect(self) -> tuple[EpisodeNews, TurnBundle, RolloutBundle]:
        return self._there(self._collect())

    async def _collect(self) -> tuple[EpisodeNews, TurnBundle, RolloutBundle]:
        try:
            await asyncio.wait_for(self._worker.changed.wait(), self._look_seconds)
            now = self._loop.time()
            await asyncio.sleep(max(self.LINGER_SECONDS, self._told_at + self.NEWS_SECONDS - now))
            self._told_at = self._loop.time()
        except TimeoutError:
            pass
        if self._calls.abandoned >= self.MOST_ABANDONED:
            what = "agents" if self._agents is not None else "tools"
            raise ReplicaError(f"{self._worker.name} has {self._calls.abandoned} calls of {what} that do not end.")
        return news_of(self._worker, self._lanes)

    def close(self) -> list[SpanBatch]:
        self._there(_async(self._worker.close))
        if self._agents is not None:
            self._there(self._agents.shut())
        return self._there(_async(self._lanes.take))


async def _async(action: Callable[[], T]) -> T:
    return action()
