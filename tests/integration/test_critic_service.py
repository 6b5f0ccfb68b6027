"""Whole runs whose critic is a service: in step with the learner they train as with its own, and survive its deaths."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrlhf.actors.critic import CriticWorker
from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.cluster.handles import WorkerLostError
from asyncrlhf.cluster.local_runtime import LocalCritic, fetch_local
from asyncrlhf.cluster.parts import build_runtime, critic_spec
from asyncrlhf.cluster.ray_runtime import RayRuntime
from asyncrlhf.cluster.ray_services import RayCritic
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.pretrained import load_policy
from asyncrlhf.errors import ReplicaError
from asyncrlhf.learner.companions import ServedCritic, ValueModel
from asyncrlhf.learner.passes import ForwardPasses
from asyncrlhf.learner.plan import StepPlan
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.transport.build_transport import build_sender
from asyncrlhf.transport.snapshot import SnapshotHolder
from asyncrlhf.types import Payload, Rollout, ServiceResult, TrainBatch
from tests import loop, ray_run
from tests.integration.test_local_loop import interrupt_after
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
    critic = torch.load(newest / "trainer.pt", weights_only=True)["critic"]
    return {**load_file(newest / "model" / "model.safetensors"), **{f"critic {k}": v for k, v in critic.items()}}


def assert_trained_alike(a: Finished, b: Finished) -> None:
    assert list(a.trained.response) == list(b.trained.response)
    for one, other in zip(a.metrics, b.metrics, strict=True):
        for key in ("loss", "value_loss", "explained_variance", "reward_mean", "grad_norm", "advantage_std"):
            assert_close(one[key], other[key], rtol=1e-4, atol=1e-5, what=str((one["step"], key)))
    assert_close(weights(a), weights(b), atol=1e-4)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param((), id="alone"),
        pytest.param((*KL, "reference=service"), id="behind the reference", marks=pytest.mark.thorough),
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
    original = SnapshotHolder.copy_params

    def slowly(self: SnapshotHolder, params: Any) -> None:
        time.sleep(0.3 if "head.weight" in params else 0.0)
        original(self, params)

    monkeypatch.setattr(SnapshotHolder, "copy_params", slowly)
    runtime: Any = build_runtime(load_config([*SERVED, "runtime=local"]), tmp_path)
    worker = LearnerWorker(runtime._learner_spec)
    params = worker.backend.critic_parameters()
    given = [
        replace(s, rollout=replace(s.rollout, values=0.0 * s.rollout.behavior_logprobs, critic_version=0))
        for s in samples()
    ]
    for version in (0, 1):
        before = {name: tensor.clone() for name, tensor in params.items()}
        worker.snapshot(None)
        worker.train(given)
        assert any(not torch.equal(before[name], tensor) for name, tensor in params.items()), "nothing was learned"
        ticket = worker.critic_ticket()
        assert ticket.version == version
        for name, tensor in ticket.refs[0].views().items():
            assert torch.equal(tensor, before[name]), name
    worker.close()


class Mortal:
    """A worker that dies of some rollouts."""

    def __init__(self, inner: LocalCritic, deadly: Callable[[Rollout], bool], lost: bool) -> None:
        self.inner, self.deadly, self.lost = inner, deadly, lost

    async def value(self, payloads: Sequence[Payload], ticket: Any) -> list[ServiceResult]:
        if any(self.deadly(rollout) for rollout in fetch_local(payloads)):
            raise (WorkerLostError if self.lost else ReplicaError)("critic-0 died: struck by the test.")
        return await self.inner.value(payloads, ticket)


def meddle_with(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[int, LocalCritic], Any]) -> None:
    def action(runtime: Any) -> None:
        runtime.critics[:] = [wrap(number, worker) for number, worker in enumerate(runtime.critics)]

    loop.meddle(monkeypatch, action)


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


@pytest.mark.thorough
def test_a_lost_worker_leaves_its_work_to_the_others_and_the_last_one_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meddle_with(
        monkeypatch,
        lambda number, worker: Mortal(worker, lambda r: r.rollout_id > 30, lost=True) if number == 1 else worker,
    )
    done = loop.run(tmp_path / "two", *SERVED, "steps=4", "critic.workers=2", "critic.token_budget=32")
    done.assert_ledger_whole()
    assert done.summary["ledger"]["trained"] == 4 * 16 and not done.summary["ledger"]["failed"]
    meddle_with(monkeypatch, lambda _, worker: Mortal(worker, lambda r: r.rollout_id > 30, lost=True))
    with pytest.raises(ReplicaError, match="No critic worker is left: critic-0 died: struck"):
        loop.run(tmp_path / "one", *SERVED, "steps=4")


@pytest.mark.thorough
def test_resume_has_the_resumed_critic_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    common = (*SERVED, "async.mode=fixed_lag", "async.lag=1", "checkpoint.every=2", "steps=4")
    whole = loop.run(tmp_path / "whole", *common)
    folder = tmp_path / "parts"
    interrupt_after(folder, 2, *common, "checkpoint.resume=auto")
    resumed = loop.run(folder, *common, "checkpoint.resume=auto")

    def told(done: Finished) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "mismatch_kl"} for row in done.untimed_metrics]

    assert told(whole) == told(resumed)
    assert whole.weights_digest() == resumed.weights_digest()


@pytest.mark.parametrize("change", ["critic=service", pytest.param("critic=learner", marks=pytest.mark.thorough)])
def test_what_a_checkpoint_lacks_is_computed_by_the_critic_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Rollouts in the buffer that no service has seen, or whose values nobody wants any more."""
    asked: list[tuple[int, int]] = []
    original = CriticWorker.value

    def value(self: CriticWorker, rollouts: Sequence[Rollout], ticket: Any) -> Any:
        asked.append((ticket.version, len(rollouts)))
        return original(self, rollouts, ticket)

    first = PPO if change == "critic=service" else SERVED
    interrupt_after(tmp_path, 2, *first, "steps=4", "async.max_staleness=3")
    held = pickle.loads(next(tmp_path.glob("checkpoints/*/rollouts.pkl")).read_bytes())
    assert held, "the buffer was empty, so nothing is tried"
    assert {r.values is None for r in held.values()} == {change == "critic=service"}
    assert all((r.critic_version in (0, 1, 2)) == (change == "critic=learner") for r in held.values())
    monkeypatch.setattr(CriticWorker, "value", value)
    resumed = loop.run(tmp_path, *PPO, change, "steps=4", "async.max_staleness=3", "checkpoint.resume=auto")
    resumed.assert_ledger_whole()
    assert asked[:1] == ([(2, len(held))] if change == "critic=service" else [])


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_a_ray_worker_answers_like_a_local_one_and_again_after_its_death() -> None:
    """Also with a version that comes later, from the learner's own sender."""
    config = load_config([*SERVED, "runtime=ray"])
    spec = critic_spec(config, config.weights)
    assert spec is not None
    rollouts = [sample.rollout for sample in samples(groups=2, size=2)]
    model = ValueModel(load_policy(config.model, "cpu", dtype=torch.float32))
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    sender = build_sender(spec.weights.beside_the_policy("ray"), "ray", params)
    plain = CriticWorker(replace(spec, runtime="local"), "local")

    def publish(version: int) -> tuple[Any, list[np.ndarray]]:
        with torch.no_grad():
            torch.manual_seed(version)
            model.head.weight.normal_()
        sender.begin_snapshot(version, params)
        sender.fence()
        plain._critic.load(version, params)
        return sender.ticket(), [r.values for r in plain._critic.answer(rollouts)]  # type: ignore[union-attr]

    async def main() -> None:
        worker = RayCritic(spec, 0, {"num_cpus": 1}, start_seconds=60.0)
        store = RayRuntime.store(None, rollouts)  # type: ignore[arg-type]
        published = [publish(version) for version in (3, 4)]
        try:
            for version, strike in ((3, False), (4, False), (3, True)):
                ticket, expected = published[version - 3]
                if strike:
                    await ray_run.strike(worker.actor, 9)
                results = await worker.value([store[2], store[0], store[3]], ticket)
                assert [r.rollout_id for r in results] == [2, 0, 3]
                found = await RayRuntime.fetch(None, [r.payload for r in results if r.payload])  # type: ignore[arg-type]
                for rollout in found:
                    assert rollout.critic_version == version
                    assert_close(rollout.values, expected[rollout.rollout_id], atol=FLOAT32)
        finally:
            await worker.close()

    asyncio.run(main())
    ray_run.wait_until(lambda: not ray_run.part_processes(), "the end of the worker's process")


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_under_ray_a_killed_worker_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, one of which dies in the midst of the run; and the training is that of the learner's own values."""
    struck: list[RayCritic] = []

    async def strike(worker: RayCritic, payloads: Sequence[Payload], ticket: Any) -> None:
        if not struck and ticket.version == 1:
            struck.append(worker)  # before the wait: the other one may be asked meanwhile
            await ray_run.strike(worker.actor, 9)

    ray_run.before(monkeypatch, RayCritic, "value", strike)
    common = (*PPO, "async.mode=sync", "steps=3", "checkpoint.every=3")
    served = ray_run.run(tmp_path / "ray", *common, "critic=service", "critic.workers=2")
    assert len(struck) == 1
    served.assert_ledger_whole()
    assert not served.summary["ledger"]["failed"]
    assert_trained_alike(loop.run(tmp_path / "local", *common), served)
