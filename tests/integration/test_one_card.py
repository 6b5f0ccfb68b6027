"""Learner and generators share one GPU's memory and work at the same time: whole runs on the virtual clock over the
transport cuda_ipc, with a table in place of CUDA's handles. Every reader finds one whole version, however slow it is,
also after each death."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.local_runtime import LocalGenerator, LocalLearner, LocalRuntime
from asyncrlhf.errors import ReplicaError
from asyncrlhf.transport.audit import tensor_digests
from tests.loop import Finished, run
from tests.one_card import QUEUED_SECONDS, Card

SETTINGS = (
    "batch_size=16", "num_generations=4", "generator.slots=16", "generator.replicas=3", "learner.learning_rate=1e-3",
    "generator.max_completion_length=12", "weights.bucket_mb=0.5", "weights.audit_every=2", "max_restarts=9",
    "learner.virtual_step_seconds=0.1", "generator.virtual_step_seconds=0.02", "weights.timeout_seconds=5",
)  # fmt: skip
READING = 0.15  # seconds that a reader takes for one bucket: several learner steps for a version


class OneCard:
    """What a run's readers found. ``delay``: seconds of one bucket, for a replica's name and version; ``on_read`` is
    called with the runtime, the replica and the number of its reading before the first bucket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.card = Card(monkeypatch)
        self.delay: Callable[[str, int], float] = lambda name, version: READING
        self.on_read: Callable[[LocalRuntime, str, int], None] = lambda runtime, name, number: None
        self.truth: dict[int, dict[str, str]] = {}  # by version: digests of the learner's weights
        self.readings: Counter[str] = Counter()
        self.whole: Counter[str] = Counter()  # readings that ended, by replica
        self.problems: list[str] = []
        self.sampled_meanwhile = self.trained_meanwhile = 0
        self._runtime: LocalRuntime
        self._under_way = 0
        self._patch(monkeypatch)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start, restart_learner = LocalRuntime.start, LocalRuntime.restart_learner
        snapshot, step, train = LearnerWorker.snapshot, GeneratorWorker.step, LocalLearner.train
        self._load = GeneratorWorker.load

        async def started(runtime: LocalRuntime) -> None:
            self._runtime, found = runtime, runtime._specs
            wired = replace(found.learner.weights, transport="cuda_ipc", checksum=True)
            generators = [replace(spec, runtime="ray", weights=wired) for spec in found.generators]
            learner = replace(found.learner, runtime="ray", weights=wired)
            runtime._specs = replace(found, generators=generators, learner=learner)
            await start(runtime)

        async def learner_again(runtime: LocalRuntime) -> None:
            self.card.free()
            await restart_learner(runtime)

        def noted(worker: LearnerWorker, probe: Any) -> Any:
            self.truth[worker.version] = tensor_digests(worker._offered())
            return snapshot(worker, probe)

        def stepped(worker: GeneratorWorker) -> Any:
            self.sampled_meanwhile += self._under_way > 0
            return step(worker)

        async def trained(learner: LocalLearner, rollouts: Any) -> Any:
            self.trained_meanwhile += self._under_way > 0
            return await train(learner, rollouts)

        async def load(worker: GeneratorWorker, version: int, cache: Any, ticket: Any = None) -> None:
            # The process goes on after its answer is no longer awaited.
            await asyncio.shield(asyncio.ensure_future(self._read_and_load(worker, version, cache, ticket)))

        monkeypatch.setattr(LocalRuntime, "maps", True, raising=False)
        for owner, name, method in (
            (LocalRuntime, "start", started), (LocalRuntime, "restart_learner", learner_again),
            (LearnerWorker, "snapshot", noted),
            (GeneratorWorker, "step", stepped), (LocalLearner, "train", trained), (GeneratorWorker, "load", load),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, method)

    async def _read_and_load(self, worker: GeneratorWorker, version: int, cache: Any, ticket: Any) -> None:
        handle = next((g for g in self._runtime.generators if g.worker is worker), None)  # type: ignore[attr-defined]
        self.readings[worker.name] += 1
        number, found = self.readings[worker.name], dict[str, torch.Tensor]()
        self._under_way += 1
        try:
            for views in worker.receiver.stream(ticket):
                if not found:
                    self.on_read(self._runtime, worker.name, number)
                found |= {name: tensor.clone() for name, tensor in views.items()}
                await asyncio.sleep(self.delay(worker.name, version))
            self._judge(worker, version, tensor_digests(found), "read")
            self._load(worker, version, cache, ticket)
        except BaseException:
            if self._lives(worker):
                raise
        finally:
            self._under_way -= 1
        if isinstance(handle, LocalGenerator) and handle._ended():
            raise ReplicaError(f"{worker.name} died while it read")
        asyncio.get_running_loop().call_later(QUEUED_SECONDS / 2, lambda: self._judge_engine(worker, version))
        self.whole[worker.name] += 1

    def _lives(self, worker: GeneratorWorker) -> bool:
        return any(g.worker is worker and not g._ended() for g in self._runtime.generators)  # type: ignore[attr-defined]

    def _judge_engine(self, worker: GeneratorWorker, version: int) -> None:
        if worker.engine.version == version:
            self._judge(worker, version, tensor_digests(worker.engine.parameters()), "computes with")

    def _judge(self, worker: GeneratorWorker, version: int, digests: dict[str, str], verb: str) -> None:
        wrong = [name for name, digest in digests.items() if digest != self.truth[version][name]]
        if wrong and self._lives(worker):
            self.problems.append(f"{worker.name} {verb} {len(wrong)} wrong tensors as version {version}")


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> OneCard:
    return OneCard(monkeypatch)


def assert_whole(done: Finished, found: OneCard, steps: int) -> None:
    assert found.problems == []
    done.assert_ledger_whole()
    assert len(done.trained) == steps * 16
    assert (done.trained.staleness <= 2).all()
    assert all(abs(row["mismatch_kl"]) < 1e-6 for row in done.metrics)
    assert found.sampled_meanwhile > 0 and found.trained_meanwhile > 0, "nothing went on beside the readings"


def deaths(done: Finished) -> list[str]:
    notes = map(json.loads, (done.folder / "journal.jsonl").read_text().splitlines())
    return [note["reason"] for note in notes if note["event"] == "died"]


@pytest.mark.more
@pytest.mark.in_turn
def test_slow_readers_find_whole_versions_over_many_publishes(tmp_path: Path, one_card: OneCard) -> None:
    one_card.delay = lambda name, version: READING * (name == "generator-1")
    done = run(tmp_path, *SETTINGS, "steps=24")
    assert_whole(done, one_card, 24)
    assert set(one_card.whole) == {f"generator-{i}" for i in range(3)}
    assert min(one_card.whole.values()) >= 12, one_card.whole
    exported = len(one_card.card.open)
    assert exported == len({id(bucket) for bucket in one_card.card.open.values()}) <= 8, "a handle a bucket, once"


@pytest.mark.in_turn
@pytest.mark.more
def test_a_reader_killed_in_the_middle_delays_nobody_and_comes_back(tmp_path: Path, one_card: OneCard) -> None:
    def strike(runtime: LocalRuntime, name: str, number: int) -> None:
        victim = next(g for g in runtime.generators if g.name == name)
        if name == "generator-1" and number in (3, 5, 8) and isinstance(victim, LocalGenerator):
            victim.kill("struck while it read")

    one_card.on_read = strike
    done = run(tmp_path, *SETTINGS, "steps=16")
    assert_whole(done, one_card, 16)
    assert len([reason for reason in deaths(done) if "struck while it read" in reason]) == 3
    assert one_card.whole["generator-1"] >= 6, "it rejoined, and read on"


@pytest.mark.thorough
def test_a_reader_that_is_too_slow_is_given_up_and_what_it_reads_later_harms_nobody(
    tmp_path: Path, one_card: OneCard
) -> None:
    """Its process lives on and reads memory that the learner writes by then; nothing is taken from it."""
    late: list[int] = []

    def delay(name: str, version: int) -> float:
        if name == "generator-2" and version == 4 and not late:
            late.append(version)
            return 30.0
        return READING

    one_card.delay = delay
    done = run(tmp_path, *SETTINGS, "steps=16")
    assert_whole(done, one_card, 16)
    assert [reason for reason in deaths(done) if "generator-2 did not answer load within 5" in reason]
    assert len(deaths(done)) == 1 and one_card.whole["generator-2"] >= 6


@pytest.mark.thorough
def test_after_the_learners_death_nobody_reads_the_memory_that_it_left(
    tmp_path: Path, one_card: OneCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new learner's memory is other memory, under the same versions: a handle that was kept shows rubbish."""

    def strike(runtime: LocalRuntime, name: str, number: int) -> None:
        learner = runtime.learner
        if name == "generator-0" and number in (6, 11) and isinstance(learner, LocalLearner):
            learner.kill("struck while a replica read")

    one_card.on_read = strike
    done = run(tmp_path, *SETTINGS, "steps=16", "checkpoint.every=4")
    assert one_card.problems == [] and done.summary["exit_reason"] == "done"
    assert done.summary["ledger"]["adds_up"] and len(done.metrics) == 16
    notes = (done.folder / "journal.jsonl").read_text()
    assert notes.count('"event":"rollback"') == 2
