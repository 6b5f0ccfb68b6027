"""Whole runs whose reference is a service: they train as with the learner's own, and lose nothing when workers die."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrlhf.actors.reference import ReferenceWorker
from asyncrlhf.cluster.handles import WorkerLostError
from asyncrlhf.cluster.local_runtime import LocalReference, fetch_local
from asyncrlhf.cluster.parts import reference_spec
from asyncrlhf.cluster.ray_runtime import RayRuntime
from asyncrlhf.cluster.ray_services import RayReference
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import AsyncRLHFError, ReplicaError
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.types import Payload, Rollout, ServiceResult
from tests import loop, ray_run
from tests.integration.test_local_loop import interrupt_after
from tests.loop import FAKE, Finished
from tests.numeric import FLOAT32, assert_close
from tests.unit.learner.worlds import samples

WARM = ("generator.temperature=0.7",)
KL = (*FAKE, *WARM, "algorithm=grpo", "algorithm.kl=loss", "algorithm.beta=0.1")
SERVED = (*KL, "reference=service")
PLACES = {
    "loss": ("algorithm=grpo", "algorithm.kl=loss", "algorithm.beta=0.1"),
    "reward": ("algorithm=rloo", "algorithm.kl=reward", "algorithm.beta=0.1"),
    "token reward": ("algorithm=ppo", "algorithm.kl=reward", "algorithm.beta=0.1"),
    "head": ("algorithm=online_dpo",),
}


@pytest.fixture
def learners(monkeypatch: pytest.MonkeyPatch) -> list[TorchBackend]:
    """Every training backend that is built from now on."""
    built: list[TorchBackend] = []
    original = TorchBackend.__init__

    def note(self: TorchBackend, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        built.append(self)

    monkeypatch.setattr(TorchBackend, "__init__", note)
    return built


def weights(done: Finished) -> dict[str, torch.Tensor]:
    newest = sorted(done.folder.glob("checkpoints/step-*/learner/model/model.safetensors"))[-1]
    return load_file(newest)


def assert_trained_alike(a: Finished, b: Finished) -> None:
    assert list(a.trained.response) == list(b.trained.response)
    for one, other in zip(a.metrics, b.metrics, strict=True):
        for key in ("loss", "ref_kl", "reward_mean", "grad_norm"):
            assert_close(one[key], other[key], rtol=1e-4, atol=1e-5, what=str((one["step"], key)))
    assert_close(weights(a), weights(b), atol=1e-4)


@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=[pytest.mark.thorough] if p == "token reward" else []) for p in PLACES]
)
def test_the_training_is_that_of_the_learners_own_reference(
    tmp_path: Path, learners: list[TorchBackend], place: str
) -> None:
    common = (*FAKE, *WARM, *PLACES[place], "async.mode=sync", "steps=3", "checkpoint.every=3")
    own = loop.run(tmp_path / "learner", *common)
    served = loop.run(tmp_path / "service", *common, "reference=service", "reference.token_budget=64")
    assert [backend.reference is None for backend in learners] == [False, True]
    assert own.metrics[-1]["ref_kl"] > 1e-4, "the policy has not left the reference: nothing was compared"
    assert_trained_alike(own, served)
    served.assert_ledger_whole()
    for row in served.metrics:
        assert row["reference_latency_p95"] >= row["reference_latency_p50"] >= 0
    assert "reference_latency_p50" not in own.metrics[0]


def meddle_with(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[int, LocalReference], Any]) -> None:
    def action(runtime: Any) -> None:
        runtime.references[:] = [wrap(number, worker) for number, worker in enumerate(runtime.references)]

    loop.meddle(monkeypatch, action)


class Mortal:
    """A worker that dies of some rollouts."""

    def __init__(self, inner: LocalReference, deadly: Callable[[Rollout], bool], lost: bool) -> None:
        self.inner, self.deadly, self.lost = inner, deadly, lost

    async def complete(self, payloads: Sequence[Payload]) -> list[ServiceResult]:
        if any(self.deadly(rollout) for rollout in fetch_local(payloads)):
            raise (WorkerLostError if self.lost else ReplicaError)("reference-0 died: struck by the test.")
        return await self.inner.complete(payloads)


def test_a_failure_is_one_failed_rollout_and_never_a_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ReferenceWorker.complete

    def complete(self: ReferenceWorker, rollouts: Sequence[Rollout]) -> Any:
        results, made = original(self, rollouts)
        bad = [r.rollout_id % 20 == 3 for r in results]
        return [
            ServiceResult(r.rollout_id, None, error="no log-probs today") if b else r
            for r, b in zip(results, bad, strict=True)
        ], made

    monkeypatch.setattr(ReferenceWorker, "complete", complete)
    done = loop.run(tmp_path, *SERVED, "steps=6")
    done.assert_ledger_whole()
    failed = done.rollouts[done.rollouts.state == "failed"]
    assert len(failed) >= 4 and set(failed.rollout_id % 20) == {3}
    assert failed.drop_reason.str.contains("no log-probs today").all()


def test_when_all_fail_the_run_ends_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: ReferenceWorker, rollouts: Sequence[Rollout]) -> Any:
        return [ServiceResult(r.rollout_id, None, error="no log-probs at all") for r in rollouts], []

    monkeypatch.setattr(ReferenceWorker, "complete", none)
    with pytest.raises(AsyncRLHFError, match=r"of the last 16 rollouts failed.*no log-probs at all"):
        loop.run(tmp_path, *SERVED, "steps=6")


def test_a_rollout_that_kills_its_worker_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meddle_with(monkeypatch, lambda _, worker: Mortal(worker, lambda r: r.rollout_id % 40 == 7, lost=False))
    done = loop.run(tmp_path, *SERVED, "steps=6")
    done.assert_ledger_whole()
    failed = done.rollouts[done.rollouts.state == "failed"]
    assert len(failed) >= 2 and set(failed.rollout_id % 40) == {7}
    assert failed.drop_reason.str.contains("reference worker died 2 times with it").all()


def test_a_lost_worker_leaves_its_work_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meddle_with(
        monkeypatch,
        lambda number, worker: Mortal(worker, lambda r: r.rollout_id > 30, lost=True) if number == 1 else worker,
    )
    done = loop.run(tmp_path, *SERVED, "steps=6", "reference.workers=2", "reference.token_budget=32")
    done.assert_ledger_whole()
    assert done.summary["ledger"]["trained"] == 6 * 16 and not done.summary["ledger"]["failed"]


def test_the_loss_of_the_last_worker_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meddle_with(monkeypatch, lambda _, worker: Mortal(worker, lambda r: r.rollout_id > 30, lost=True))
    with pytest.raises(ReplicaError, match="No reference worker is left: reference-0 died: struck"):
        loop.run(tmp_path, *SERVED, "steps=6")


def test_resume_keeps_the_start_model_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    common = (*SERVED, "async.mode=fixed_lag", "async.lag=1", "checkpoint.every=2", "steps=4")
    whole = loop.run(tmp_path / "whole", *common)
    folder = tmp_path / "parts"
    interrupt_after(folder, 2, *common, "checkpoint.resume=auto")
    resumed = loop.run(folder, *common, "checkpoint.resume=auto")

    def told(done: Finished) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "mismatch_kl"} for row in done.untimed_metrics]

    assert told(whole) == told(resumed)
    assert whole.weights_digest() == resumed.weights_digest()


@pytest.mark.parametrize("change", ["reference=service", "generator.temperature=0.9", "reference=learner"])
def test_what_a_checkpoint_lacks_is_computed_when_it_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Rollouts in the buffer that no service, or one with other settings, has seen; or that need none any more."""
    first = KL if change == "reference=service" else SERVED
    asked: list[int] = []
    original = ReferenceWorker.complete

    def complete(self: ReferenceWorker, rollouts: Sequence[Rollout]) -> Any:
        asked.append(len(rollouts))
        return original(self, rollouts)

    interrupt_after(tmp_path, 2, *first, "steps=4")
    held = len(pickle.loads(next(tmp_path.glob("checkpoints/*/rollouts.pkl")).read_bytes()))
    assert held > 0, "the buffer was empty, so nothing is tried"
    monkeypatch.setattr(ReferenceWorker, "complete", complete)
    again = (*KL, change) if change != "generator.temperature=0.9" else (*SERVED, change)
    resumed = loop.run(tmp_path, *again, "steps=4", "checkpoint.resume=auto")
    resumed.assert_ledger_whole()
    assert asked[:1] == ([] if change == "reference=learner" else [held])


@pytest.mark.usefixtures("ray_local")
def test_a_ray_worker_answers_like_a_local_one_and_again_after_its_death() -> None:
    spec = reference_spec(load_config([*SERVED]))
    assert spec is not None
    rollouts = [sample.rollout for sample in samples(groups=2, size=2)]
    expected = [r.ref_logprobs for r in ReferenceWorker(spec).complete(rollouts)[1]]

    async def main() -> None:
        worker = RayReference(spec, 0, {"num_cpus": 1}, start_seconds=60.0)
        store = RayRuntime.store(None, rollouts)  # type: ignore[arg-type]
        try:
            for strike in (False, True):
                if strike:
                    await ray_run.strike(worker.actor, 9)
                results = await worker.complete([store[2], store[0], store[3]])
                assert [r.rollout_id for r in results] == [2, 0, 3]
                found = await RayRuntime.fetch(None, [r.payload for r in results if r.payload])  # type: ignore[arg-type]
                for rollout in found:
                    assert_close(rollout.ref_logprobs, expected[rollout.rollout_id], atol=FLOAT32)
                assert [r.rollout_id for r in found] == [2, 0, 3]
        finally:
            await worker.close()

    asyncio.run(main())
    ray_run.wait_until(lambda: not ray_run.part_processes(), "the end of the worker's process")


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_under_ray_a_killed_worker_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, one of which dies in the midst of the run; and the training is that of the learner's own."""
    struck: list[int] = []

    async def strike(worker: RayReference, payloads: Sequence[Payload]) -> None:
        if not struck and worker.name == "reference-0":
            struck.append(await ray_run.strike(worker.actor, 9))

    ray_run.before(monkeypatch, RayReference, "complete", strike)
    common = (*KL, "async.mode=sync", "steps=3", "checkpoint.every=3")
    served = ray_run.run(tmp_path / "ray", *common, "reference=service", "reference.workers=2")
    assert len(struck) == 1
    served.assert_ledger_whole()
    assert not served.summary["ledger"]["failed"]
    assert_trained_alike(loop.run(tmp_path / "local", *common), served)
