"""Whole runs with reward, reference and critic workers side by side: what they train on, and what failures cost."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.actors.annotator import AnnotatorActor
from asyncrlhf.actors.messages import ArrayBundle, RolloutBundle
from asyncrlhf.cluster.handles import AnnotatorHandle, WorkerLostError
from asyncrlhf.cluster.local_runtime import LocalAnnotator, LocalGenerator, LocalLearner, LocalRuntime, fetch_local
from asyncrlhf.cluster.parts import critic_spec, reference_spec
from asyncrlhf.cluster.ray_handles import RayAnnotator
from asyncrlhf.cluster.ray_runtime import RayRuntime
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import AsyncRLHFError, ReplicaError
from asyncrlhf.learner.step.companions import ValueModel
from asyncrlhf.learner.step.plan import StepPlan
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.models.pretrained import load_policy
from asyncrlhf.records.write.saved_rollouts import read_rollouts
from asyncrlhf.transport.build_transport import build_sender
from asyncrlhf.types import Annotation, Payload, RolloutInfo, TrainBatch
from tests import loop, ray_run
from tests.integration.test_local_loop import interrupt_after
from tests.loop import FAKE, Finished
from tests.numeric import FLOAT32, assert_close
from tests.unit.learner.worlds import samples

# A critic that learns fast: its values are far from zero after a step.
OWN = (
    *FAKE, "algorithm=ppo", "algorithm.kl=reward", "algorithm.beta=0.1", "learner.critic_learning_rate=3e-3",
    "generator.temperature=0.7", "fusion.max_batch=8",
)  # fmt: skip
SERVED = (*OWN, "reference=service", "reference.token_budget=64", "critic=service", "critic.token_budget=64")
KINDS = ("reward", "reference", "critic")


def meddle_with(
    monkeypatch: pytest.MonkeyPatch, kind: str, wrap: Callable[[int, AnnotatorHandle], AnnotatorHandle]
) -> None:
    """Put what ``wrap`` makes of each worker of a kind in its place."""

    def action(runtime: Any) -> None:
        workers = getattr(runtime, f"{kind}s")
        workers[:] = [wrap(number, worker) for number, worker in enumerate(workers)]

    loop.meddle(monkeypatch, action)


class Wrapped:
    """A worker that fails some rollouts, or dies of them: of held-out ones never."""

    def __init__(self, inner: AnnotatorHandle, hits: Callable[[int], bool], error: ReplicaError | str) -> None:
        self.inner, self.hits, self.error = inner, hits, error
        self.name = inner.name

    async def annotate(self, payloads: Sequence[Payload], ticket: Any = None) -> list[Annotation]:
        hit = {r.rollout_id for r in fetch_local(payloads) if r.rollout_id >= 0 and self.hits(r.rollout_id)}
        if hit and isinstance(self.error, ReplicaError):
            raise self.error
        given = await self.inner.annotate(payloads, ticket)
        return [Annotation(a.rollout_id, error=str(self.error)) if a.rollout_id in hit else a for a in given]

    async def close(self) -> None: ...


def wrapped(hits: Callable[[int], bool], error: ReplicaError | str, only: int | None = None) -> Any:
    return lambda number, worker: worker if only not in (None, number) else Wrapped(worker, hits, error)


Batches = list[tuple[TrainBatch, torch.Tensor, torch.Tensor]]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    """Of each step: its batch, and the reference log-probs and values [M] that the learner trains with."""
    seen: Batches = []
    reference, critic = TorchBackend._reference_logprobs, TorchBackend._old_values

    def note(self: TorchBackend, plan: StepPlan) -> torch.Tensor | None:
        values = critic(self, plan)
        ref = plan.tokens.ref_logprobs if self.reference is None else reference(self, plan)
        assert values is not None and ref is not None
        seen.append((plan.batch, ref.clone(), values.clone()))
        return values

    monkeypatch.setattr(TorchBackend, "_old_values", note)
    return seen


def test_the_batch_is_array_for_array_that_of_the_learners_own_models(tmp_path: Path, batches: Batches) -> None:
    common = ("async.mode=sync", "steps=2")  # further on, rounding differences have grown
    loop.run(tmp_path / "learner", *OWN, *common)
    own, batches[:] = list(batches), []
    loop.run(tmp_path / "service", *SERVED, *common)
    assert len(own) == len(batches) == 2
    for (mine, ref, values), (served, given_ref, given_values) in zip(own, batches, strict=True):
        assert mine.ref_logprobs is None and mine.values is None
        for name in (field.name for field in fields(TrainBatch)):
            one, other = getattr(mine, name), getattr(served, name)
            if name not in ("ref_logprobs", "values", "critic_versions"):
                assert np.array_equal(one, other), name
        assert_close(given_ref, ref, atol=FLOAT32)
        assert_close(given_values, values, atol=FLOAT32)
        assert served.ref_logprobs is not None and served.values is not None
        assert np.array_equal(served.ref_logprobs[served.response_mask], given_ref.numpy())
        assert np.array_equal(served.values[served.response_mask], given_values.numpy())
    assert np.abs(batches[-1][2].numpy()).max() > 0.01, "the critic has learned nothing: zeros were compared"


def test_no_rollout_is_stored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner gets the bundles that generators made, and beside them arrays; workers make nothing else."""
    collected: list[Any] = []
    trained: list[RolloutInfo] = []
    bundles: list[RolloutBundle] = []
    collect, train, build = LocalGenerator.collect, LocalLearner.train, RolloutBundle.__init__

    async def note_collected(self: LocalGenerator) -> Any:
        found = await collect(self)
        collected.extend(info.payload.ref for info in found.finished)
        return found

    async def note_trained(self: LocalLearner, items: Sequence[RolloutInfo]) -> Any:
        trained.extend(items)
        return await train(self, items)

    def note_built(self: RolloutBundle, *rollouts: Any) -> None:
        bundles.append(self)
        build(self, *rollouts)

    monkeypatch.setattr(LocalGenerator, "collect", note_collected)
    monkeypatch.setattr(LocalLearner, "train", note_trained)
    monkeypatch.setattr(RolloutBundle, "__init__", note_built)
    loop.run(tmp_path, *SERVED, "steps=2")
    assert len(trained) == 2 * 16
    places = {id(ref) for ref in collected}
    assert [bundle for bundle in bundles if len(bundle) and id(bundle) not in places] == []
    for item in trained:
        assert id(item.payload.ref) in places, "it lies where its generator put it"
        assert [type(a.ref) for a in item.payload.annotations] == [ArrayBundle] * 2


def test_what_a_worker_sends_is_its_arrays_alone() -> None:
    config = load_config([*SERVED, "runtime=local"])
    spec: Any = reference_spec(config)
    rollouts = [sample.rollout for sample in samples(groups=8, size=4)]
    actor = AnnotatorActor(spec, "reference-0")
    told, arrays = actor.annotate([((0, i),) for i in range(len(rollouts))], None, rollouts)
    assert [a.rollout_id for a in told.answer] == [r.rollout_id for r in rollouts] and arrays is not None
    numbers, places = sum(len(r.response_ids) for r in rollouts), len(rollouts)
    assert len(pickle.dumps(arrays)) < 4 * numbers + 8 * places + 600


def deaths(run: Path, kind: str) -> list[str]:
    """The causes of its workers' deaths, as the journal has them."""
    events = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return [e["reason"] for e in events if e["event"] == "died" and e["replica"].startswith(f"{kind}-")]


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.more_but(every=3)
def test_a_rollout_that_fails_or_kills_its_worker_is_one_failure_and_its_neighbours_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """And never a zero."""
    meddle_with(monkeypatch, kind, wrapped(lambda i: i % 20 == 3, "nothing today"))
    meddle_with(monkeypatch, kind, wrapped(lambda i: i % 40 == 7, ReplicaError("it died: struck by the test.")))
    done = loop.run(tmp_path, *SERVED, "steps=5")
    done.assert_ledger_whole()
    failed = done.rollouts[done.rollouts.state == "failed"]
    killers, others = failed[failed.rollout_id % 40 == 7], failed[failed.rollout_id % 40 != 7]
    assert len(killers) >= 2 and len(others) >= 3 and set(others.rollout_id % 20) == {3}
    assert killers.drop_reason.str.contains(f"{kind} worker died 2 times with it").all()
    assert others.drop_reason.str.contains("nothing today").all()
    assert len(deaths(tmp_path, kind)) >= 2 * len(killers)


def test_a_death_after_which_a_call_was_repeated_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = LocalRuntime.start

    async def and_survive(runtime: LocalRuntime) -> None:
        await start(runtime)
        runtime.survived("reward-0", ReplicaError("reward-0 died: struck by the test."))

    monkeypatch.setattr(LocalRuntime, "start", and_survive)
    loop.run(tmp_path, *SERVED, "steps=1", "logging.progress=plain")
    assert deaths(tmp_path, "reward") == ["reward-0 died: struck by the test."]
    assert "reward-0 died: struck by the test. Its call is repeated." in " ".join(capsys.readouterr().out.split())


def test_when_all_fail_the_run_ends_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meddle_with(monkeypatch, "critic", wrapped(lambda _: True, "nothing at all"))
    with pytest.raises(AsyncRLHFError, match=r"of the last 16 rollouts failed.*nothing at all"):
        loop.run(tmp_path, *SERVED, "steps=6")


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.more_but(every=3)
def test_a_lost_worker_leaves_its_work_to_the_others_and_the_last_one_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lost = WorkerLostError("it died: struck by the test.")
    with monkeypatch.context() as patch:
        meddle_with(patch, kind, wrapped(lambda i: i > 30, lost, only=1))
        small = "fusion.max_batch=4" if kind == "reward" else f"{kind}.token_budget=32"
        done = loop.run(tmp_path / "two", *SERVED, "steps=4", f"{kind}.workers=2", small)
    done.assert_ledger_whole()
    assert done.summary["ledger"]["trained"] == 4 * 16 and not done.summary["ledger"]["failed"]
    meddle_with(monkeypatch, kind, wrapped(lambda i: i > 30, lost))
    with pytest.raises(ReplicaError, match=f"No {kind} worker is left: it died: struck"):
        loop.run(tmp_path / "one", *SERVED, "steps=4")
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["ledger"]["adds_up"]
    for run in ("one", "two"):
        assert deaths(tmp_path / run, kind) == [str(lost)]


def test_resume_has_start_model_and_resumed_critic_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    common = (*SERVED, "async.mode=fixed_lag", "async.lag=1", "checkpoint.every=2", "steps=4")
    whole = loop.run(tmp_path / "whole", *common)
    folder = tmp_path / "parts"
    interrupt_after(folder, 2, *common, "checkpoint.resume=auto")
    resumed = loop.run(folder, *common, "checkpoint.resume=auto")

    def told(done: Finished) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "mismatch_kl"} for row in done.untimed_metrics]

    assert told(whole) == told(resumed)
    assert whole.weights_digest() == resumed.weights_digest()


@pytest.mark.parametrize(
    "change",
    [
        "reference.workers=1 critic.workers=1",
        "generator.temperature=0.9",
        pytest.param("reference.workers=0 critic.workers=0", marks=pytest.mark.thorough),
    ],
)
def test_what_a_checkpoint_lacks_is_computed_when_it_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Rollouts in the buffer that no service has seen, or one with other settings; or whose arrays are not needed."""
    asked: list[tuple[str, int, int | None]] = []
    original = LocalAnnotator.annotate

    async def annotate(self: LocalAnnotator, payloads: Sequence[Payload], ticket: Any = None) -> list[Annotation]:
        kind = type(self.worker).__name__
        if kind != "RewardWorker":
            asked.append((kind, len(payloads), None if ticket is None else ticket.version))
        return await original(self, payloads, ticket)

    fresh = change.startswith("reference.workers=1")
    interrupt_after(tmp_path, 2, *(OWN if fresh else SERVED), "steps=4", "async.max_staleness=3")
    held = read_rollouts(next(tmp_path.glob("checkpoints/*/rollouts.arrow")))
    assert held, "the buffer was empty, so nothing is tried"
    for rollout in held.values():
        assert (rollout.ref_logprobs is None, rollout.values is None) == (fresh, fresh)
        assert fresh or rollout.critic_version in (0, 1, 2)
    monkeypatch.setattr(LocalAnnotator, "annotate", annotate)
    again = (*OWN, *change.split()) if "workers" in change else (*SERVED, change)
    resumed = loop.run(tmp_path, *again, "steps=4", "async.max_staleness=3", "checkpoint.resume=auto")
    resumed.assert_ledger_whole()
    reference, critic = ("ReferenceWorker", len(held), None), ("CriticWorker", len(held), 2)
    if fresh:
        assert asked[:2] == [reference, critic]
    elif change.startswith("generator"):
        assert asked[0] == reference and asked[1] != critic, "values that are there are kept"
    else:
        assert asked == []


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("kind", ["reference", "critic"])
def test_under_ray_a_killed_worker_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Two workers, one of which dies in the midst of the run; and the training is that of the learner's own models."""
    struck: list[str] = []

    async def strike(worker: RayAnnotator, payloads: Sequence[Payload], ticket: Any = None) -> None:
        if not struck and worker.name == f"{kind}-0" and (ticket is None or ticket.version == 1):
            struck.append(worker.name)  # before the wait: the other one may be asked meanwhile
            await ray_run.strike(worker.actor, 9)

    ray_run.before(monkeypatch, RayAnnotator, "annotate", strike)
    common = ("async.mode=sync", "steps=2")  # further on, rounding differences have grown
    served = ray_run.run(tmp_path / "ray", *SERVED, *common, f"{kind}.workers=2")
    assert struck == [f"{kind}-0"]
    (death,) = deaths(tmp_path / "ray", kind)
    assert death.startswith(f"{kind}-0 died: ")
    served.assert_ledger_whole()
    assert not served.summary["ledger"]["failed"]
    local = loop.run(tmp_path / "local", *OWN, *common)
    assert list(local.trained.response) == list(served.trained.response)
    for one, other in zip(local.metrics, served.metrics, strict=True):
        for key in ("loss", "value_loss", "ref_kl", "reward_mean", "grad_norm"):
            assert_close(one[key], other[key], rtol=1e-4, atol=1e-5, what=str((one["step"], key)))


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("kind", ["reference", pytest.param("critic", marks=pytest.mark.thorough)])
def test_a_ray_worker_answers_like_a_local_one_and_again_after_its_death(kind: str) -> None:
    """The critic's of two versions, from the learner's own sender."""
    config = load_config([*SERVED, "runtime=ray"])
    rollouts = [sample.rollout for sample in samples(groups=2, size=2)]
    spec: Any
    if kind == "reference":
        spec, field = reference_spec(config), "ref_logprobs"
        arrays = spec.build("local").annotate(rollouts)[1]
        expected = [(None, [arrays[i][field] for i in range(4)])]
    else:
        spec, field = critic_spec(config, config.weights), "values"
        expected = published_critics(spec, rollouts)

    async def main() -> None:
        worker = RayAnnotator(spec, 0, {"num_cpus": 1}, start_seconds=60.0)
        store = RayRuntime.store(None, rollouts)  # type: ignore[arg-type]
        try:
            for strike, (ticket, numbers) in [(False, e) for e in expected] + [(True, expected[0])]:
                if strike:
                    await ray_run.strike(worker.actor, 9)
                asked = [store[2], store[0], store[3]]
                given = await worker.annotate(asked, ticket)
                assert [a.rollout_id for a in given] == [2, 0, 3]
                places = [Payload(p.ref, p.index, (a.arrays,)) for p, a in zip(asked, given, strict=True) if a.arrays]
                found = await RayRuntime.fetch(None, places)  # type: ignore[arg-type]
                assert [r.rollout_id for r in found] == [2, 0, 3]
                for rollout in found:
                    assert_close(getattr(rollout, field), numbers[rollout.rollout_id], atol=FLOAT32)
                    assert rollout.critic_version == (None if ticket is None else ticket.version)
        finally:
            await worker.close()

    asyncio.run(main())
    ray_run.wait_until(lambda: not ray_run.part_processes(), "the end of the worker's process")


def published_critics(spec: Any, rollouts: Sequence[Any]) -> list[tuple[Any, list[np.ndarray]]]:
    """Tickets of two critics, and the values of each."""
    model = ValueModel(load_policy(spec.model, "cpu", dtype=torch.float32))
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    sender = build_sender(spec.weights.beside_the_policy("ray"), "ray", params)
    plain = replace(spec, runtime="local").build("local")._critic

    def publish(version: int) -> tuple[Any, list[np.ndarray]]:
        with torch.no_grad():
            torch.manual_seed(version)
            model.head.weight.normal_()
        sender.begin_snapshot(version, params)
        sender.fence()
        plain.load(version, params)
        return sender.ticket(), plain.answer(rollouts)

    return [publish(version) for version in (3, 4)]
