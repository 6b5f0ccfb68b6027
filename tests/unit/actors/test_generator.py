"""The generator actor's thread, driven without Ray: a sleeping replica answers every call and samples nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.actors import generator
from asyncrlhf.actors.generator import GeneratorActor
from asyncrlhf.actors.worker import GeneratorSpec, GeneratorWorker
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import StepOutput, named_weights
from asyncrlhf.engines.generator_config import FakeConfig, GeneratorConfig
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.transport.local import LocalSender
from asyncrlhf.transport.manifest import build_manifest
from asyncrlhf.transport.shared_memory import SharedMemorySender
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.numeric import FLOAT32, assert_close
from tests.ray_run import wait_until

COUNT, LENGTH = 6, 100
LOOKS = 200  # a collect returns at the latest after half a second


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GeneratorActor, "COLLECT_SECONDS", 0.5)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[GeneratorActor]:
    monkeypatch.setattr(os, "nice", lambda increment: 0)  # it would stay with the test process
    config = GeneratorConfig(engine="hf", slots=4, threads=0)
    actor = GeneratorActor(GeneratorSpec("generator-0", config, ModelConfig(), "local", WeightsConfig()))
    yield actor
    actor.close()


def work(ids: range) -> list[GenerationRequest]:
    prompt = Prompt("p", "1+1=", np.arange(4, 9))
    sampling = SamplingParams(max_completion_length=LENGTH)
    return [GenerationRequest(i, i, prompt, i, sampling) for i in ids]


def test_a_load_by_ticket_reads_the_learners_memory_and_stages_nothing() -> None:
    spec = GeneratorSpec(
        "generator-0",
        GeneratorConfig(engine="hf", slots=4, threads=0),
        ModelConfig(),
        "ray",
        WeightsConfig(transport="shared_memory"),
    )
    worker = generator.build_worker(spec)
    own = {name: tensor.detach().clone() for name, tensor in named_weights(load_model(ModelConfig())).items()}
    sender = SharedMemorySender(build_manifest(own, 1 << 18))
    for version in (1, 2):
        for tensor in own.values():
            tensor += 1.0
        sender.snapshot(version, own)
        worker.load(version, "keep", sender.ticket())
        assert worker.engine.version == version
        assert all(torch.equal(tensor, own[name]) for name, tensor in worker.engine.parameters().items())
    assert worker.receiver._staged._buckets is None, "a copy of the weights was made"
    sender.snapshot(3, {name: torch.zeros_like(tensor) for name, tensor in own.items()})
    held = worker.engine.parameters()
    assert all(torch.equal(tensor, own[name]) for name, tensor in held.items()), "the engine works in the snapshot"
    with pytest.raises(WeightSyncError, match="asked to load version 4 but received 3"):
        worker.load(4, "keep", sender.ticket())
    worker.close()


def test_a_sleeping_replica_answers_and_samples_nothing(actor: GeneratorActor) -> None:
    model = load_model(ModelConfig())
    sender = LocalSender(build_manifest(named_weights(model), 1 << 20))
    sender.connect("", ["generator-0"], 1)
    sender.snapshot(3, named_weights(model))
    actor.call("submit", work(range(COUNT)))
    before, text = actor.call("score", [np.arange(2, 12)]), np.arange(2, 12)
    actor.call("sleep")
    made = actor.collect()[0].tokens
    actor.call("submit", work(range(COUNT, COUNT + 2)))
    actor.call("receive", sender.ticket())
    actor.call("load", 3, "keep")
    assert_close(actor.call("score", [text])[0], before[0], atol=FLOAT32)
    assert actor.call("cancel", [COUNT + 1]) == [COUNT + 1]
    facts, rollouts = actor.collect()
    assert facts.tokens == made < COUNT * LENGTH and not rollouts
    actor.call("wake")
    done: dict[int, Rollout] = {}
    for _ in range(LOOKS):
        done |= {rollout.rollout_id: rollout for rollout in actor.collect()[1]}
        if len(done) == COUNT + 1:
            break
    assert sorted(done) == list(range(COUNT + 1)), f"not finished after the wake: {set(range(COUNT + 1)) - set(done)}"
    assert set(done[COUNT].policy_versions.tolist()) == {3}
    assert all((np.diff(rollout.policy_versions) >= 0).all() for rollout in done.values())


def test_a_pause_that_a_call_ends_is_busy_only_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "nice", lambda increment: 0)
    config = GeneratorConfig(engine="fake", slots=4, threads=0, fake=FakeConfig(latency_median=300.0))
    began = time.monotonic()
    actor = GeneratorActor(GeneratorSpec("generator-0", config, ModelConfig(), "local", WeightsConfig()))
    try:
        for rollout_id in range(4):  # each call ends a pause of five minutes
            actor.call("submit", work(range(rollout_id, rollout_id + 1)))
        assert actor.call("cancel", range(4)) == list(range(4))
        wait_until(lambda: actor._stepped_at is None, "the replica out of work")
        busy = actor.collect()[0].busy_seconds
        assert 0 < busy <= time.monotonic() - began, f"{busy:.1f} s busy"
    finally:
        actor.close()


@pytest.fixture
def chunking_actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[GeneratorActor]:
    monkeypatch.setattr(os, "nice", lambda increment: 0)
    config = GeneratorConfig(engine="hf", slots=4, threads=0)
    actor = GeneratorActor(GeneratorSpec("generator-0", config, ModelConfig(), "local", WeightsConfig(), 16))
    yield actor
    actor.close()


def test_chunks_of_what_is_under_way_come_with_what_is_finished(chunking_actor: GeneratorActor) -> None:
    """Each begins where the one before ended, the first with the prompt; after a cancellation no more comes."""
    actor = chunking_actor
    actor.call("submit", work(range(COUNT)))
    sequences: dict[int, list[int]] = {}
    done: dict[int, Rollout] = {}
    for _ in range(LOOKS):
        facts, rollouts, chunks = actor.collect()
        assert [info.length for info in facts.chunks] == [len(chunk.token_ids) for chunk in chunks]
        assert len(facts.ages) == len(rollouts) and all(0 <= age < 60 for age in facts.ages)
        for chunk in chunks:
            assert chunk.rollout_id not in done and chunk.prompt_length == 5
            known = sequences.setdefault(chunk.rollout_id, [])
            assert chunk.start == len(known) and len(chunk.token_ids) >= 16
            known += chunk.token_ids
        done |= {rollout.rollout_id: rollout for rollout in rollouts}
        if len(done) == COUNT:
            break
    assert sorted(done) == list(range(COUNT)), f"not finished: {set(range(COUNT)) - set(done)}"
    for rollout_id, sequence in sequences.items():
        whole = [*done[rollout_id].prompt.token_ids.tolist(), *done[rollout_id].response_ids.tolist()]
        assert sequence == whole[: len(sequence)]


class OneAStep:
    """An engine that finishes one request a step, and waits before every step for leave."""

    asleep = torn = False
    slots = 4

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.leave = threading.Semaphore(0)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.ids += [request.rollout_id for request in requests]

    def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        gone = [i for i in self.ids if i in rollout_ids]
        self.ids = [i for i in self.ids if i not in gone]
        return gone

    def step(self, now: float) -> StepOutput:
        assert self.leave.acquire(timeout=60), "nobody gave leave for a step"
        ids, ones = np.ones(3, np.int64), np.ones(3, np.float32)
        return StepOutput([Rollout(self.ids.pop(0), 0, Prompt("", "", ids), ids, ones, ids, "stop")], 3, None)

    def close(self) -> None:
        self.leave.release(1000)


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GeneratorActor, OneAStep]]:
    engine = OneAStep()
    monkeypatch.setattr(os, "nice", lambda increment: 0)
    monkeypatch.setattr(generator, "build_worker", lambda spec: GeneratorWorker("g", engine, str, None))
    config = GeneratorConfig(engine="hf", threads=0)
    actor = GeneratorActor(GeneratorSpec("g", config, ModelConfig(), "local", WeightsConfig()))
    yield actor, engine
    engine.close()
    actor.call("cancel", range(COUNT))
    actor._commands.put(None)


def test_what_a_step_has_finished_does_not_wait_for_the_next(stepping: tuple[GeneratorActor, OneAStep]) -> None:
    actor, engine = stepping
    actor.call("submit", work(range(COUNT)))
    for number in range(3):
        engine.leave.release()
        for _ in range(LOOKS):
            facts, rollouts = actor.collect()
            if rollouts:
                break
        assert [rollout.rollout_id for rollout in rollouts] == [number], "the engine is in the midst of a step"
        assert [info.rollout_id for info in facts.finished] == [number] and 0 <= facts.ages[0] < 60


def test_what_finishes_alone_goes_at_once_and_a_crowd_at_most_every_30_ms(
    stepping: tuple[GeneratorActor, OneAStep],
) -> None:
    actor, engine = stepping
    assert actor._linger(time.monotonic()) == actor.LINGER_SECONDS, "nothing was handed on before"
    actor.call("submit", work(range(COUNT)))
    assert not actor.collect()[1] and actor._linger(time.monotonic()) == actor.LINGER_SECONDS, "an empty answer"
    engine.leave.release()
    while not actor.collect()[1]:
        pass
    handed_on = actor._collected_at
    assert actor._linger(handed_on) == pytest.approx(actor.RESULT_SECONDS)
    assert actor._linger(handed_on + 0.02) == pytest.approx(actor.RESULT_SECONDS - 0.02)
    assert actor._linger(handed_on + 0.029) == actor._linger(handed_on + 60.0) == actor.LINGER_SECONDS


def test_the_last_of_a_batch_does_not_wait_for_company(
    stepping: tuple[GeneratorActor, OneAStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would join it, and in a synchronous run everything else waits for it."""
    actor, engine = stepping
    monkeypatch.setattr(actor, "_linger", lambda now: 60.0)
    actor.call("submit", work(range(2)))
    engine.leave.release()
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(actor.collect)
        box = actor._worker.outbox
        wait_until(lambda: box.has_results, "the first rollout in the outbox")
        assert not told.done(), "the second may join it"
        engine.leave.release()
        assert [rollout.rollout_id for rollout in told.result(timeout=30)[1]] == [0, 1]


@pytest.mark.parametrize(("replicas", "seconds"), [(1, 0.03), (3, 0.03), (16, 0.128), (1000, 8.0), (10**6, 10.0)])
def test_the_controller_gets_at_most_some_125_messages_with_results_per_second(
    replicas: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From all replicas together, unless a replica would then be silent for too long."""
    monkeypatch.setattr(os, "nice", lambda increment: 0)
    monkeypatch.setattr(GeneratorActor, "COLLECT_SECONDS", 10.0)
    spec = GeneratorSpec(
        "g", GeneratorConfig(engine="fake"), ModelConfig(), "local", WeightsConfig(), replicas=replicas
    )
    actor = GeneratorActor(spec)
    try:
        actor._collected_at = 100.0
        assert actor._linger(100.0) == pytest.approx(seconds)
    finally:
        actor.close()


def test_what_is_cancelled_before_it_is_collected_never_comes(stepping: tuple[GeneratorActor, OneAStep]) -> None:
    actor, engine = stepping
    actor.call("submit", work(range(4)))
    engine.leave.release(2)  # the third step waits
    box = actor._worker.outbox
    with box.changed:
        assert box.changed.wait_for(lambda: len(box._rollouts) == 2, 60), "two rollouts handed out"
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(actor.call, "cancel", [0, 3])
        wait_until(lambda: not actor._commands.empty(), "the cancellation in the engine's inbox")
        engine.leave.release()  # it comes between the third step and the fourth
        assert sorted(gone.result(timeout=60)) == [0, 3]
    assert [rollout.rollout_id for rollout in actor.collect()[1]] == [1, 2]


def test_chunks_end_with_their_rollout_and_evaluations_send_none() -> None:
    class Paper:
        """An engine that has sampled twenty tokens of everything."""

        asleep = False

        def __init__(self) -> None:
            self.ids: list[int] = []

        def submit(self, requests: Any) -> None:
            self.ids += [request.rollout_id for request in requests]

        def cancel(self, rollout_ids: Any) -> list[int]:
            return [i for i in rollout_ids if i in self.ids]

        def partial(self, seen: Any, at_least: int) -> dict[int, np.ndarray]:
            assert at_least == 8
            return {i: np.arange(20)[before:] for i, before in seen.items() if 20 - before >= at_least}

    worker = GeneratorWorker("g", Paper(), str, None, chunk_tokens=8)  # type: ignore[arg-type]
    worker.submit([*work(range(2)), *work(range(-1, 0))])

    def sent() -> list[tuple[int, int, int]]:
        worker.send_chunks()
        return [(c.rollout_id, c.start, len(c.token_ids)) for c in worker.outbox.take(0.0, 0, 0.0)[2]]

    assert sent() == [(0, 0, 25), (1, 0, 25)]
    assert sent() == []
    worker.cancel([1])
    worker.submit(work(range(1, 2)))
    assert sent() == [(1, 0, 25)], "begun anew"
    worker.cancel([0])
    worker.submit(work(range(1)))
    worker.send_chunks()
    worker.cancel([0])
    assert not worker.outbox.has_chunks, "of a rollout that nobody wants no chunk is collected"
