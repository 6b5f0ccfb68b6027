"""A learner rank's calls run in threads of their own and may begin in any order: those asked for later wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, TimeoutError, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.actors.learner import LearnerActor, LearnerWorker
from asyncrlhf.cluster.parts import specs
from asyncrlhf.config.compose import load_config


class Worker:
    version = 0

    def __init__(self) -> None:
        self.done: list[str] = []

    def snapshot(self, probe: Any) -> str:
        if probe == "broken":
            raise ValueError(probe)
        self.done.append("snapshot")
        return "offer"

    def train(self, chosen: list[int]) -> int:
        self.done.append(f"train {len(chosen)}")
        return len(chosen)


@pytest.fixture
def actor() -> LearnerActor:
    spec: Any = SimpleNamespace(learner=SimpleNamespace(threads=1))
    actor = LearnerActor(spec, 0, 1)
    actor._worker = Worker()  # type: ignore[assignment]
    return actor


@pytest.mark.parametrize("probe", [None, "broken"])
def test_a_step_waits_for_the_snapshots_asked_for_before_it(actor: LearnerActor, probe: str | None) -> None:
    """A snapshot that fails holds nobody up."""
    with ThreadPoolExecutor(2) as pool:
        assert actor.call("train", [1], snapshots=0) == 1
        step = pool.submit(actor.call, "train", [2, 2], snapshots=1)
        with pytest.raises(TimeoutError):
            step.result(timeout=0.2)
        wait([pool.submit(actor.call, "snapshot", probe, snapshots=0)])
        assert step.result(timeout=60) == 2
    worker: Any = actor._worker
    assert worker.done == ["train 1", *(["snapshot"] if probe is None else []), "train 2"]


def test_a_sleeping_learner_wakes_for_what_reads_its_weights_and_sleeps_on(tmp_path: Path) -> None:
    config = load_config(["runtime=local", "cluster=flatten", "cluster.offload=true"])
    worker = LearnerWorker(specs(config, config.weights).learner)
    with torch.no_grad():  # else a loader's file would bring them back
        for parameter in worker.backend.model.parameters():
            parameter.add_(0.01)
    weights = {name: tensor.clone() for name, tensor in worker.backend.parameters().items()}
    probe = [np.arange(3, 12)]
    expected = worker.backend.score(probe)[0]
    for _ in range(2):
        assert worker.sleep() == sum(bucket.nbytes for bucket in worker.require_sender().buckets.tensors)
        offer = worker.snapshot(probe)
        assert offer.probe_logprobs is not None
        np.testing.assert_array_equal(offer.probe_logprobs[0], expected)
        worker.transfer(worker.ticket())
        sent = worker.require_sender().tensors()
        assert all(torch.equal(tensor, sent[name]) for name, tensor in weights.items())
        worker.save(tmp_path)
        worker.saved()
        worker.load(tmp_path)
        assert worker._sleep.asleep
    worker.wake()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in worker.backend.parameters().items())
    worker.close()
