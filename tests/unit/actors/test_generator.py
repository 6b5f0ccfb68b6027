"""The generator actor's thread, driven without Ray: a sleeping replica answers every call and samples nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from asyncrlhf.actors.generator import GeneratorActor, GeneratorSpec
from asyncrlhf.actors.messages import WorkItem
from asyncrlhf.data.config import ModelConfig
from asyncrlhf.data.pretrained import load_model
from asyncrlhf.engines.config import GeneratorConfig
from asyncrlhf.engines.weights import named_weights
from asyncrlhf.transport.config import WeightsConfig
from asyncrlhf.transport.local import LocalSender
from asyncrlhf.transport.manifest import build_manifest
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams

COUNT, LENGTH = 6, 100
LOOKS = 200  # a collect returns at the latest after half a second


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[GeneratorActor]:
    monkeypatch.setattr(os, "nice", lambda increment: 0)  # it would stay with the test process
    config = GeneratorConfig(engine="hf", slots=4, threads=0)
    actor = GeneratorActor(GeneratorSpec("generator-0", config, ModelConfig(), "local", WeightsConfig()))
    yield actor
    actor.close()


def work(ids: range) -> list[WorkItem]:
    prompt = Prompt("p", "1+1=", np.arange(4, 9))
    sampling = SamplingParams(max_completion_length=LENGTH)
    return [WorkItem(GenerationRequest(i, i, prompt.token_ids, i, sampling), prompt) for i in ids]


def test_a_sleeping_replica_answers_and_samples_nothing(actor: GeneratorActor) -> None:
    model = load_model(ModelConfig())
    sender = LocalSender(build_manifest(named_weights(model), 1 << 20))
    sender.connect("", ["generator-0"], 1)
    sender.snapshot(3, named_weights(model))
    actor.submit(work(range(COUNT)))
    before, text = actor.score([np.arange(2, 12)]), np.arange(2, 12)
    actor.sleep()
    made = actor.collect()[0].tokens
    actor.submit(work(range(COUNT, COUNT + 2)))
    actor.receive(sender.ticket())
    actor.load(3, "keep")
    np.testing.assert_allclose(actor.score([text])[0], before[0], atol=1e-5)
    assert actor.cancel([COUNT + 1]) == [COUNT + 1]
    facts, rollouts = actor.collect()
    assert facts.tokens == made < COUNT * LENGTH and not rollouts
    actor.wake()
    done: dict[int, Rollout] = {}
    for _ in range(LOOKS):
        done |= {rollout.rollout_id: rollout for rollout in actor.collect()[1]}
        if len(done) == COUNT + 1:
            break
    assert sorted(done) == list(range(COUNT + 1)), f"not finished after the wake: {set(range(COUNT + 1)) - set(done)}"
    assert set(done[COUNT].policy_versions.tolist()) == {3}
    assert all((np.diff(rollout.policy_versions) >= 0).all() for rollout in done.values())
