"""Episodes of a stage: their environments and the engine share this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from asyncrlhf.actors.episodes import EpisodeSpec
from asyncrlhf.engines.engine import Engine
from asyncrlhf.episodes.agents.harness import AgentDriver
from asyncrlhf.episodes.worker import EpisodeWorker
from asyncrlhf.redaction import redact
from asyncrlhf.types import GenerationFailure, GenerationRequest, Rollout

HERE = "127.0.0.1"  # of the endpoint of agents, which run on this machine


async def play(
    spec: EpisodeSpec,
    engine: Engine,
    requests: Sequence[GenerationRequest],
    read: Callable[[Rollout, GenerationRequest], Rollout],
    most: int,
) -> list[Rollout]:
    """The episodes of ``requests``, ``most`` at a time; ``read`` adds a turn's text. Failed ones are missing, and their
    causes are printed."""
    driver = spec.driver(inline=False)
    worker = EpisodeWorker("evaluate", driver)
    left, asked = list(requests), dict[int, GenerationRequest]()
    played: list[Rollout] = []
    failed: list[GenerationFailure] = []
    try:
        if isinstance(driver, AgentDriver):
            await driver.open(HERE)
        while (ended := len(played) + len(failed)) < len(requests):
            room = most - (len(requests) - len(left) - ended)
            begun, left = left[: max(0, room)], left[max(0, room) :]
            worker.begin(begun)
            if engine.in_flight():
                output = await asyncio.to_thread(engine.step, 0.0)  # environments go on meanwhile
                turns = [(turn, asked.pop(turn.rollout_id)) for turn in output.finished]
                worker.sampled([read(t, r) if isinstance(t, Rollout) else replace(t, tag=r.tag) for t, r in turns])
                await asyncio.sleep(0)
            else:
                await worker.changed.wait()
            wanted, done, lost = worker.take()
            engine.submit(wanted)
            asked |= {turn.rollout_id: turn for turn in wanted}
            played, failed = [*played, *done], [*failed, *lost]
    finally:
        worker.close()
        if isinstance(driver, AgentDriver):
            await driver.shut()
    for cause in dict.fromkeys(failure.error for failure in failed):
        print(f"asyncrlhf: {sum(f.error == cause for f in failed)} episodes failed: {redact(cause)}", file=sys.stderr)
    return played
