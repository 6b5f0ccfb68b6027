"""Calls of tools that do not end: told to the model, counted, and at last a reason to replace the process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from asyncrlhf.actors.episodes import EpisodeActor, EpisodeSpec
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.episodes.environment import Caller
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.replies import ParsedReply, ToolCall
from asyncrlhf.episodes.tools import ToolEnvironment
from asyncrlhf.errors import ReplicaError

RELEASED = threading.Event()


def stuck() -> str:
    """Wait for something that does not come."""
    RELEASED.wait()
    return "late"


async def test_the_model_is_told_of_a_tool_that_is_late_and_its_thread_is_counted() -> None:
    RELEASED.clear()
    call = Caller(0.05, inline=False)
    step = await ToolEnvironment(call, [stuck]).step(ParsedReply("", (ToolCall("stuck", {}, "call00000"),)))
    await asyncio.sleep(0)  # until the call has heard that it is given up
    (message,) = step.observation
    assert message["content"] == "error: stuck took longer than episode.timeout_seconds=0.05."
    assert (step.done, step.failures, call.abandoned) == (False, 1, 1)
    RELEASED.set()


def test_a_process_with_too_many_calls_that_do_not_end_asks_to_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpisodeActor, "MOST_ABANDONED", 2)
    monkeypatch.setattr(EpisodeActor, "COLLECT_SECONDS", 0.01)
    settings = EpisodeConfig(environment="tests.worlds:Sums", timeout_seconds=0.01)
    actor: Any = EpisodeActor(EpisodeSpec(settings, TaskConfig(), ModelConfig(), context=512), "episode-7")
    RELEASED.clear()
    for _ in range(2):
        assert actor.ping() and not actor.collect()[0].failed
        with pytest.raises(Exception, match="tool took longer"):
            actor._there(actor._calls("tool", stuck))
    with pytest.raises(ReplicaError, match=r"^episode-7 has 2 calls of tools that do not end\.$"):
        actor.collect()
    RELEASED.set()
    actor.close()
