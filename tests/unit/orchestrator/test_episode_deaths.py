"""Which episodes begin again, wait, or fail when their worker dies; and turns that come late."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncrlhf.actors.episodes import TurnWanted
from asyncrlhf.actors.messages import Collected
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.episode_table import DEATHS_ALLOWED, EpisodeTable
from asyncrlhf.orchestrator.rollouts.episodes import ATTEMPT, Episodes
from asyncrlhf.orchestrator.state import Replica
from asyncrlhf.types import GenerationRequest, Payload, Prompt, RolloutInfo, SamplingParams

PROMPT = Prompt("p", "1+1=", np.ones(2, np.int64))


class Worker:
    """Keeps what it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun: list[int] = []
        self.turns: list[Payload] = []
        self.restarted: list[bool] = []

    def begin(self, items: Any) -> None:
        self.begun += [item.rollout_id for item in items]

    def sampled(self, turns: Any) -> None:
        self.turns += turns

    def cancel(self, rollout_ids: Any) -> None:
        pass

    async def restart(self, error: ReplicaError, counts: bool = True) -> None:
        self.restarted.append(counts)


class Assembly:
    def __init__(self) -> None:
        self.failures: dict[int, str] = {}

    def failed(self, rollout_id: int, group_id: int, error: str, facts: Any) -> None:
        self.failures[rollout_id] = error


class Ledger:
    def start(self, rollout_id: int, worker: str, version: int) -> None: ...

    def requeue(self, rollout_id: int) -> None: ...

    def get(self, rollout_id: int) -> Any:
        return SimpleNamespace(state="generating")


def nothing(*arguments: Any, **keywords: Any) -> None: ...


def made(*names: str) -> tuple[Episodes, Any, list[Worker], Assembly]:
    group = SimpleNamespace(epoch=0, group_id=0, newest=-1)
    state: Any = SimpleNamespace(
        episodes=EpisodeTable(), requeue=deque(), replicas=[], ledger=Ledger(), now=lambda: 5.0, epoch=0,
        groups=dict.fromkeys(range(99), group), config=SimpleNamespace(num_generations=1), touch=nothing,
        emptied=None, queue=None,
        message=nothing, progressed=nothing, expect_no_more=nothing, room=SimpleNamespace(notify=nothing),
        journal=SimpleNamespace(note=nothing),
    )  # fmt: skip
    workers, assembly = [Worker(name) for name in names], Assembly()
    runtime: Any = SimpleNamespace(episodes=workers)
    return Episodes(state, runtime, assembly, []), state, workers, assembly  # type: ignore[arg-type]


def request(rollout_id: int) -> GenerationRequest:
    return GenerationRequest(rollout_id, rollout_id, PROMPT, 0, SamplingParams(8), 0)


def begin_again(episodes: Episodes, state: Any) -> None:
    again = sorted(state.requeue)
    state.requeue.clear()
    episodes.begin([request(i) for i in again])


async def test_only_the_episode_that_ends_its_worker_fails() -> None:
    """Of three that were at work at two deaths one begins at a time; the others wait, and go on when it has failed."""
    episodes, state, (worker,), assembly = made("episode-0")
    episodes.begin([request(i) for i in (1, 2, 3, 4)])
    state.episodes.wanted[4] = TurnWanted(4, 0, Payload(None, 0))
    for deaths in range(1, DEATHS_ALLOWED + 1):
        assert await episodes._replace(worker, ReplicaError("episode-0 died."))  # type: ignore[arg-type]
        assert state.episodes.deaths == {1: deaths, 2: deaths, 3: deaths} and not assembly.failures
        assert sorted(state.requeue) == [1, 2, 3, 4]
        begin_again(episodes, state)
        state.episodes.wanted[4] = TurnWanted(4, 0, Payload(None, 0))
    assert state.episodes.at.keys() == {1, 4} and list(state.requeue) == [2, 3]
    await episodes._replace(worker, ReplicaError("episode-0 died."))  # type: ignore[arg-type]
    assert assembly.failures == {1: "Its episode worker died 3 times with it: episode-0 died."}
    assert worker.restarted == [True, True, False], "a death with a culprit does not count"
    begin_again(episodes, state)
    assert state.episodes.at.keys() == {2, 4} and list(state.requeue) == [3]
    assert 1 not in state.episodes.deaths


async def test_without_a_worker_episodes_wait_to_be_issued_again() -> None:
    episodes, state, workers, _ = made("episode-0", "episode-1")
    episodes._down = {"episode-0", "episode-1"}
    episodes.begin([request(1), request(-1)])
    assert list(state.requeue) == [1] and not state.episodes.at
    episodes._down = {"episode-0"}
    begin_again(episodes, state)
    episodes._begin_held()
    assert workers[1].begun == [1, -1] and not workers[0].begun


async def test_an_evaluation_that_is_given_up_does_not_begin_later() -> None:
    episodes, _, (worker,), _ = made("episode-0")
    episodes._down = {"episode-0"}
    asked = asyncio.create_task(episodes.answer([request(-1)]))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    episodes._down = set()
    episodes._begin_held()
    assert not worker.begun and not episodes._table.at


def info(rollout_id: int, tag: int) -> RolloutInfo:
    facts: Any = dict(
        rollout_id=rollout_id, group_id=0, tag=tag, generator_id="generator-0", max_version=3, payload=Payload(None, 0)
    )
    return SimpleNamespace(**facts)  # type: ignore[return-value]


def test_a_late_turn_of_an_attempt_before_is_not_the_turn_that_is_waited_for() -> None:
    episodes, state, (worker,), _ = made("episode-0")
    handle: Any = SimpleNamespace(name="generator-0", slots=4)
    replica = Replica(handle, in_flight={1})
    episodes.begin([request(1)])
    state.episodes.wanted[1] = TurnWanted(1, ATTEMPT, Payload(None, 0))
    episodes.turned(replica, Collected([info(1, 0)]))
    assert replica.in_flight == {1} and not worker.turns and 1 in state.episodes.wanted
    episodes.turned(replica, Collected([info(1, ATTEMPT), info(1, ATTEMPT)]))
    assert not replica.in_flight and len(worker.turns) == 1 and 1 not in state.episodes.wanted
    assert state.groups[0].newest == 3
