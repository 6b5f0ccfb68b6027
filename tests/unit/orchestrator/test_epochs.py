"""After a rollback an answer to what was given out before is no answer to what was issued again under the same id."""

from __future__ import annotations

import asyncio

import numpy as np

from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.rollouts.assembly import Assembly
from asyncrlhf.orchestrator.state import GroupInProgress
from asyncrlhf.types import Annotation, Payload, Prompt, RolloutInfo


def info(rollout_id: int, epoch: int, version: int) -> RolloutInfo:
    return RolloutInfo(rollout_id, 0, "generator-0", 2, 3, version, version, "stop", 0.0, Payload([], 0), epoch=epoch)


def test_an_answer_of_an_earlier_epoch_is_not_taken() -> None:
    async def main() -> None:
        config = load_config(["runtime=local", "num_generations=2", "batch_size=4", "async.mode=sync"])
        state = build_state(config)
        prompt = Prompt("0", "1+1=", np.ones(2, dtype=np.int64))
        assembly = Assembly(state, lambda *_: None, PromptSource(lambda _: prompt, 1, 0))
        ids = {0, 1}
        state.epoch = 1
        state.buffer.reserve(2)
        state.groups[0] = GroupInProgress(0, prompt, 0.0, 0, 0, set(ids), set(ids), epoch=state.epoch)
        for rollout_id in sorted(ids):
            state.ledger.admit(rollout_id, 0, prompt, 0.0)
            state.ledger.start(rollout_id, "generator-0", 0)
        assert not assembly.generated(info(0, epoch=0, version=7)), "it left its generator before the rollback"
        assembly.annotated("reward", info(0, epoch=0, version=7), Annotation(0, 1.0))
        assert state.ledger.live_ids("generating") == [0, 1] and not state.groups[0].scored
        fresh = info(0, epoch=1, version=0)
        assert assembly.generated(fresh)
        assembly.annotated("reward", info(0, epoch=0, version=7), Annotation(0, 0.0))
        assert state.ledger.live_ids("scoring") == [0], "it waited for its score at the rollback"
        assembly.annotated("reward", fresh, Annotation(0, 1.0))
        assert [(r.rollout_id, r.epoch) for r in state.groups[0].scored] == [(0, 1)]
        await asyncio.sleep(0)

    run_virtual(main())
