"""`cluster.placement=flatten` on the virtual clock: real loops, in which nobody samples on a device that trains."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.local_runtime import LocalGenerator, LocalLearner, LocalRuntime
from asyncrlhf.engines.engine import StepOutput
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.errors import ReplicaError
from tests import loop
from tests.loop import FAKE, QUIET

FLATTEN = (*FAKE, "cluster=flatten", "steps=12", "learner.virtual_step_seconds=0.3", "generator.replicas=2")


class Diary:
    """What happened when: spans of training, and the times at which each replica sampled or loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[tuple[float, float]] = []
        self.sampled: dict[str, list[float]] = defaultdict(list)
        self.loaded: dict[str, list[float]] = defaultdict(list)
        train, step, load = LocalLearner.train, GeneratorWorker.step, GeneratorWorker.load

        async def note_train(learner: LocalLearner, items: Sequence[Any]) -> Any:
            started = asyncio.get_running_loop().time()
            result = await train(learner, items)
            self.trained.append((started, asyncio.get_running_loop().time()))
            return result

        def note_step(worker: GeneratorWorker) -> StepOutput:
            self.sampled[worker.name].append(asyncio.get_running_loop().time())
            return step(worker)

        @wraps(load)
        def note_load(worker: GeneratorWorker, version: int, cache: Any) -> None:
            self.loaded[worker.name].append(asyncio.get_running_loop().time())
            load(worker, version, cache)

        monkeypatch.setattr(LocalLearner, "train", note_train)
        monkeypatch.setattr(GeneratorWorker, "step", note_step)
        monkeypatch.setattr(GeneratorWorker, "load", note_load)

    def inside(self, times: list[float]) -> list[float]:
        """Those strictly within a span of training: at its very start a generator falls asleep, at its end it wakes."""
        return [t for t in times if any(a + 1e-6 < t < b - 1e-6 for a, b in self.trained)]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("mode", "engine"),
    [("sync", "fake"), ("one_step", "fake"), ("async", "fake"), ("fixed_lag", "fake"), ("async", "hf")],
)
@pytest.mark.more_but(every=3)
def test_nobody_samples_on_the_learners_device_while_it_trains(
    mode: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = Diary(monkeypatch)
    steps = 12 if engine == "fake" else 4
    done = loop.run(
        tmp_path,
        *FLATTEN,
        f"generator.engine={engine}",
        f"async.mode={mode}",
        *(["async.lag=2"] if mode == "fixed_lag" else []),  # a contradiction in the other modes
        f"steps={steps}",
        "buffer.capacity=48",  # as little as the lag allows
    )
    done.assert_ledger_whole()
    assert len(diary.trained) == steps
    # The learner has one rank: it sits with generator-0, and generator-1 has a device of its own.
    assert diary.sampled["generator-0"] and not diary.inside(diary.sampled["generator-0"])
    assert not diary.inside(diary.loaded["generator-0"]), "weights are loaded by those who are awake"
    if mode != "sync":
        assert diary.inside(diary.sampled["generator-1"]), "only those who share a device have to sleep"
    assert done.summary["taking_turns"] == ["generator-0"]
    bound = {"sync": 0, "one_step": 1, "async": 2, "fixed_lag": 2}[mode]
    assert done.trained.staleness.max() <= bound


@pytest.mark.thorough
def test_each_side_leaves_the_device_for_the_other_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty turns with checkpoints, an evaluation and audits in between; the bytes of each side that lie on the device
    while the other is at work."""
    found: dict[str, list[int]] = {"learner": [], "generator": []}
    train, step = LearnerWorker.train, HFEngine.step
    learners: list[LearnerWorker] = []
    engines: list[HFEngine] = []

    def bytes_of(engine: HFEngine) -> int:
        assert engine._offload is not None
        return engine._offload.resident_bytes(engine._model.parameters())

    @wraps(train)
    def note_train(learner: LearnerWorker, *arguments: Any, **keywords: Any) -> Any:
        learners[:] = [learner]
        found["generator"] += [bytes_of(engine) for engine in engines]
        return train(learner, *arguments, **keywords)

    def note_step(engine: HFEngine, now: float) -> StepOutput:
        if engine not in engines:
            engines.append(engine)
        found["learner"] += [learner._sleep.kept_bytes() for learner in learners]
        assert bytes_of(engine) > 0
        return step(engine, now)

    settings = (
        *("cluster=flatten", "generator.engine=hf", "steps=20", "batch_size=8", "num_generations=4"),
        *("generator.max_completion_length=4", "weights.audit_every=3", "checkpoint.every=8", "algorithm=grpo"),
        *("algorithm.kl=loss", "algorithm.beta=0.1", "eval_every=10", "weights.publish_every=2", "async.mode=async"),
    )
    plain = loop.run(tmp_path / "plain", *settings)
    monkeypatch.setattr(LearnerWorker, "train", note_train)
    monkeypatch.setattr(HFEngine, "step", note_step)
    done = loop.run(tmp_path / "offload", *settings, "cluster.offload=true")
    done.assert_ledger_whole()
    assert len(found["generator"]) == 20 and len(found["learner"]) > 20
    assert set(found["generator"]) == {0}, "the generator kept weights on the device of a learner that trains"
    assert set(found["learner"]) == {0}, "the learner kept something on the device of a generator that samples"
    assert done.weights_digest() == plain.weights_digest()


def test_without_sharing_everybody_samples_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above looks for is there when nobody is asked to sleep."""
    diary = Diary(monkeypatch)
    loop.run(tmp_path, *FLATTEN, "cluster=separate")
    assert diary.inside(diary.sampled["generator-0"]) and diary.inside(diary.sampled["generator-1"])


def test_a_replica_that_dies_asleep_is_started_again_between_two_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = Diary(monkeypatch)
    restarted: list[float] = []
    restart = LocalRuntime.restart

    async def note_restart(runtime: LocalRuntime, dead: Any) -> Any:
        restarted.append(asyncio.get_running_loop().time())
        return await restart(runtime, dead)

    async def kill_when_asleep(runtime: LocalRuntime) -> None:
        victim = runtime.generators[0]
        assert isinstance(victim, LocalGenerator)
        while not diary.trained or not victim.worker.engine.asleep:
            await asyncio.sleep(0.01)
        victim.kill("killed in its sleep")

    monkeypatch.setattr(LocalRuntime, "restart", note_restart)
    killers: list[asyncio.Task[None]] = []
    loop.meddle(monkeypatch, lambda runtime: killers.append(asyncio.ensure_future(kill_when_asleep(runtime))))
    done = loop.run(tmp_path, *FLATTEN, "async.mode=async")
    done.assert_ledger_whole()
    assert len(restarted) == 1 and not diary.inside(restarted)
    assert not diary.inside(diary.sampled["generator-0"])
    assert max(diary.sampled["generator-0"]) > restarted[0], "it never came back to work"
    assert done.trained.staleness.max() <= 2


def test_a_replica_that_does_not_fall_asleep_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    @wraps(GeneratorWorker.sleep)
    async def refuse(worker: GeneratorWorker, keep_weights: bool = True) -> None:
        calls.append(worker.name)
        if len(calls) == 1:
            await asyncio.Event().wait()

    monkeypatch.setattr(GeneratorWorker, "sleep", refuse)
    done = loop.run(tmp_path, *FLATTEN, "steps=4", "weights.timeout_seconds=5")
    done.assert_ledger_whole()
    assert len(calls) == 4 and len(done.metrics) == 4


def test_the_learners_wait_for_its_turn_is_idle_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = GeneratorWorker.sleep

    @wraps(sleep)
    async def slowly(worker: GeneratorWorker, keep_weights: bool = True) -> None:
        await asyncio.sleep(0.9)
        sleep(worker)

    monkeypatch.setattr(GeneratorWorker, "sleep", slowly)
    done = loop.run(tmp_path, *FLATTEN, "async.max_staleness=4", "generator.fake.latency_median=0.01")
    # A step takes 0.3 s and the turn before it 0.9 s, which is three quarters of the learner's time.
    assert sum(row["learner_idle_fraction"] for row in done.metrics[4:]) / len(done.metrics[4:]) > 0.7


def test_death_in_the_turn_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(learner: LocalLearner, items: Sequence[Any]) -> Any:
        raise ReplicaError("learner-0 died: killed")

    monkeypatch.setattr(LocalLearner, "train", die)
    with pytest.raises(ReplicaError, match="learner-0 died: killed"):
        loop.run(tmp_path, *FLATTEN, *QUIET)
