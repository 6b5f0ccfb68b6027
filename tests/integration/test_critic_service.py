"""Whole runs whose critic is a service: in step with the learner they train as with its own, else by known versions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.cluster.parts import build_runtime
from asyncrlhf.config.compose import load_config
from asyncrlhf.learner.state.state_file import read_state
from asyncrlhf.learner.step.companions import ServedCritic
from asyncrlhf.learner.step.passes import ForwardPasses
from asyncrlhf.learner.step.plan import StepPlan
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.transport.sender import WeightSender
from asyncrlhf.types import Rollout, TrainBatch
from tests import loop
from tests.loop import FAKE, Finished
from tests.numeric import FLOAT32, assert_close
from tests.unit.learner.worlds import samples

# A critic that learns fast: its values are far from zero after a step.
PPO = (*FAKE, "algorithm=ppo", "learner.critic_learning_rate=3e-3", "generator.temperature=0.7")
SERVED = (*PPO, "critic=service", "critic.token_budget=64")
KL = ("algorithm.kl=reward", "algorithm.beta=0.1")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, TrainBatch, np.ndarray]]:
    """Of each step: the learner's version, its batch, and the values [M] of its critic before the step, in the batch's
    order."""
    seen: list[tuple[int, TrainBatch, np.ndarray]] = []
    original = TorchBackend._old_values

    def note(self: TorchBackend, plan: StepPlan) -> torch.Tensor | None:
        own = self._passes.all_values(plan)
        seen.append((self.policy_version, plan.batch, own.numpy().copy()))
        return original(self, plan)

    monkeypatch.setattr(TorchBackend, "_old_values", note)
    return seen


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions whose critic made a pass of its own over the batch."""
    made: list[int] = []
    original = ForwardPasses.all_values

    def note(self: ForwardPasses, plan: StepPlan) -> torch.Tensor:
        made.append(len(made))
        return original(self, plan)

    monkeypatch.setattr(ForwardPasses, "all_values", note)
    return made


def weights(done: Finished) -> dict[str, torch.Tensor]:
    """Of the policy and of the critic."""
    newest = sorted(done.folder.glob("checkpoints/step-*/learner"))[-1]
    critic = read_state(newest / "trainer.safetensors")["critic"]
    return {**load_file(newest / "model" / "model.safetensors"), **{f"critic {k}": v for k, v in critic.items()}}


def assert_trained_alike(a: Finished, b: Finished) -> None:
    """Values rounded otherwise give Adam other steps where a gradient is all but zero, and what the next step measures
    moves with them, further each step: by 3e-4 of the gradient's norm at step 4 on a CPU with AVX-512.
    A critic that stays at its first version more than triples the value loss of step 2."""
    assert list(a.trained.response) == list(b.trained.response)
    for one, other in zip(a.metrics, b.metrics, strict=True):
        grown = 4.0 ** max(0, one["step"] - 2)
        for key in ("loss", "value_loss", "explained_variance", "reward_mean", "grad_norm", "advantage_std"):
            assert_close(one[key], other[key], rtol=1e-4 * grown, atol=1e-5 * grown, what=str((one["step"], key)))
    assert_close(weights(a), weights(b), atol=1e-4)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param((), id="alone"),
        pytest.param((*KL, "reference=service"), id="beside the reference", marks=pytest.mark.thorough),
    ],
)
def test_in_step_the_training_is_that_of_the_learners_own_values(
    tmp_path: Path, passes: list[int], extra: tuple[str, ...]
) -> None:
    common = (*PPO, *(extra[:2]), "async.mode=sync", "steps=4", "checkpoint.every=4")
    own = loop.run(tmp_path / "learner", *common)
    assert len(passes) == 4
    served = loop.run(tmp_path / "service", *common, *extra, "critic=service", "critic.token_budget=64")
    assert len(passes) == 4, "the learner made a pass that the service spares it"
    assert own.metrics[-1]["value_loss"] > 1e-3
    assert_trained_alike(own, served)
    served.assert_ledger_whole()
    assert [row["critic_lag_mean"] for row in served.metrics] == [0.0] * 4
    assert all(row["critic_latency_p95"] >= row["critic_latency_p50"] >= 0 for row in served.metrics)
    assert "critic_lag_mean" not in own.metrics[0] and "critic_latency_p50" not in own.metrics[0]


def test_in_step_the_values_are_those_of_the_learners_critic(
    tmp_path: Path, batches: list[tuple[int, TrainBatch, np.ndarray]]
) -> None:
    loop.run(tmp_path, *SERVED, "async.mode=sync", "steps=4")
    assert [version for version, _, _ in batches] == [0, 1, 2, 3]
    for version, batch, own in batches:
        assert batch.values is not None and batch.critic_versions is not None
        assert set(batch.critic_versions) == {version}
        assert_close(batch.values[batch.response_mask], own, atol=FLOAT32)
    assert np.abs(batches[-1][2]).max() > 0.01, "the critic has learned nothing: zeros were compared"


@pytest.mark.parametrize(("mode", "lag"), [pytest.param("one_step", 1, marks=pytest.mark.thorough), ("fixed_lag", 2)])
def test_in_a_schedule_the_critic_is_that_of_the_sampling_version(
    tmp_path: Path, batches: list[tuple[int, TrainBatch, np.ndarray]], mode: str, lag: int
) -> None:
    """Whichever is quicker, the learner or the workers."""
    common = (*SERVED, f"async.mode={mode}", "steps=5", *(("async.lag=2",) if mode == "fixed_lag" else ()))
    first = loop.run(tmp_path / "a", *common)
    for version, batch, _ in batches:
        assert batch.critic_versions is not None
        sampled = np.array([batch.policy_versions[start:end].max() for start, end in spans(batch)])
        assert np.array_equal(batch.critic_versions, sampled) and set(sampled) == {max(0, version - lag)}
    second = loop.run(tmp_path / "b", *common, "learner.virtual_step_seconds=0.9")
    assert first.untimed_metrics == second.untimed_metrics
    assert [row["critic_lag_mean"] for row in first.metrics] == [min(step, lag) for step in range(5)]


def spans(batch: TrainBatch) -> list[tuple[int, int]]:
    return list(zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True))


def test_a_free_run_says_how_far_its_values_lag(
    tmp_path: Path, batches: list[tuple[int, TrainBatch, np.ndarray]]
) -> None:
    done = loop.run(
        tmp_path, *SERVED, "critic.workers=2", "generator.replicas=2", "async.max_staleness=3", "steps=8",
    )  # fmt: skip
    done.assert_ledger_whole()
    for (version, batch, _), row in zip(batches, done.metrics, strict=True):
        assert batch.critic_versions is not None
        for critic, (start, end) in zip(batch.critic_versions, spans(batch), strict=True):
            assert batch.policy_versions[start:end].max() <= critic <= version
        assert_close(row["critic_lag_mean"], version - batch.critic_versions.mean(), atol=1e-5)
        assert row["critic_lag_mean"] <= row["staleness_mean"]
    assert max(row["critic_lag_mean"] for row in done.metrics) > 0, "nothing was asynchronous here"


def test_the_learner_waits_for_the_copy_of_its_critic_before_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the copy is, it is one version's."""
    original = WeightSender.copy_params

    def slowly(self: WeightSender, params: Any) -> None:
        time.sleep(0.3 if "head.weight" in params else 0.0)
        original(self, params)

    monkeypatch.setattr(WeightSender, "copy_params", slowly)
    runtime: Any = build_runtime(load_config([*SERVED, "runtime=local"]), tmp_path)
    worker = LearnerWorker(runtime._specs.learner)
    params = worker.backend.critic_parameters()
    given = samples()
    chosen = [(((0, i),), s.reward, s.weight, s.masked_before_version) for i, s in enumerate(given)]
    bundle = [replace(s.rollout, values=0.0 * s.rollout.behavior_logprobs, critic_version=0) for s in given]
    for version in (0, 1):
        before = {name: tensor.clone() for name, tensor in params.items()}
        worker.snapshot(None)
        worker.train(chosen, bundle)
        assert any(not torch.equal(before[name], tensor) for name, tensor in params.items()), "nothing was learned"
        ticket = worker.critic_ticket()
        assert ticket.version == version
        for name, tensor in ticket.refs[0].views().items():
            assert torch.equal(tensor, before[name]), name
    worker.close()


def test_a_value_that_is_no_number_is_one_failed_rollout_and_never_a_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ServedCritic._numbers

    def numbers(self: ServedCritic, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        found = original(self, rollouts)
        return [given * np.nan if r.rollout_id % 20 == 3 else given for r, given in zip(rollouts, found, strict=True)]

    monkeypatch.setattr(ServedCritic, "_numbers", numbers)
    done = loop.run(tmp_path, *SERVED, "steps=4")
    done.assert_ledger_whole()
    failed = done.rollouts[done.rollouts.state == "failed"]
    assert len(failed) >= 3 and set(failed.rollout_id % 20) == {3}
    assert failed.drop_reason.str.contains("The critic's values are not all finite").all()
