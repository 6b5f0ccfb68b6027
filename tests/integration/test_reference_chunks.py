"""Whole runs whose reference reads ahead: they train as without it, whatever happens on the way."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from asyncrlhf.actors.messages import resolved
from asyncrlhf.actors.model_annotators import ReferenceWorker
from asyncrlhf.cluster.local_runtime import LocalAnnotator, fetch_local
from asyncrlhf.cluster.ray_handles import RayAnnotator, addressed
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.learner.step.companions import ReferencePolicy
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.orchestrator.run import prepare
from asyncrlhf.types import Annotation, Payload, Rollout
from tests import loop, ray_run
from tests.integration.test_fusion import SHORT
from tests.integration.test_local_loop import kill_at
from tests.integration.test_reference_service import SERVED, assert_trained_alike
from tests.numeric import FLOAT32, assert_close
from tests.unit.rewards.worlds import save_reward_model

HOT = 3.0  # the temperature of SHORT
KL = (*SHORT, "algorithm=grpo", "algorithm.kl=loss", "algorithm.beta=0.1", "reference=service")


class Checked:
    """Every log-prob that reference workers give, beside that of the whole rollout."""

    def __init__(self, temperature: float) -> None:
        model = load_model(ModelConfig(path="tiny"))
        self._whole = ReferencePolicy(model, temperature=temperature, precision="none", token_budget=4096)
        self.answered: list[Rollout] = []

    def check(self, rollouts: Sequence[Rollout]) -> None:
        for found, expected in zip(rollouts, self._whole.answer(rollouts), strict=True):
            assert_close(found.ref_logprobs, expected, atol=FLOAT32)
        self.answered += rollouts


def _with(payloads: Sequence[Payload], results: Sequence[Annotation]) -> list[Payload]:
    """The payloads of rollouts that got log-probs, with them."""
    given = zip(payloads, results, strict=True)
    return [replace(payload, annotations=(r.arrays,)) for payload, r in given if r.arrays is not None]


@pytest.fixture
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checked]:
    seen = Checked(getattr(request, "param", HOT))
    local, remote = LocalAnnotator.annotate, RayAnnotator.annotate

    async def annotate_locally(self: LocalAnnotator, payloads: Sequence[Payload], *_: Any) -> list[Annotation]:
        results = await local(self, payloads)
        if isinstance(self.worker, ReferenceWorker):
            seen.check(fetch_local(_with(payloads, results)))
        return results

    async def annotate_remotely(self: RayAnnotator, payloads: Sequence[Payload], *_: Any) -> list[Annotation]:
        results = await remote(self, payloads)
        if self.name.startswith("reference"):
            addresses, references = addressed(_with(payloads, results))
            seen.check(resolved(addresses, ray.get(references)))
        return results

    monkeypatch.setattr(LocalAnnotator, "annotate", annotate_locally)
    monkeypatch.setattr(RayAnnotator, "annotate", annotate_remotely)
    yield seen
    assert seen.answered, "nothing was answered"


@pytest.mark.parametrize("checked", [0.7], indirect=True)
def test_the_training_is_that_of_whole_rollouts(tmp_path: Path, checked: Checked) -> None:
    """By a reward that reads no chunks: they are sent for the reference alone."""
    common = (*SERVED, "async.mode=sync", "steps=3", "checkpoint.every=3", "fusion.chunk_tokens=2")
    whole = loop.run(tmp_path / "rollout", *common, "fusion=rollout")
    ahead = loop.run(tmp_path / "chunk", *common, "fusion=chunk")
    assert whole.metrics[-1]["ref_kl"] > 1e-4, "the policy has not left the reference: nothing was compared"
    assert_trained_alike(whole, ahead)
    ahead.assert_ledger_whole()
    assert max(row["reference_prefilled_fraction"] for row in ahead.metrics) > 0.2
    assert all(row["reference_prefill_evictions"] == 0 for row in ahead.metrics)
    assert not any("prefill" in key for key in [*whole.metrics[0]])
    assert "prefilled_fraction" not in ahead.metrics[0], "no reward model read anything"


def test_both_read_ahead_with_little_room_and_a_generator_that_dies(
    tmp_path: Path, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers of each, versions that change in mid-sequence, rollouts that are sampled again to another end."""
    folder = save_reward_model(tmp_path / "rm", 19, context=128)
    loop.meddle(monkeypatch, kill_at(0.12, 0.31))
    done = loop.run(
        tmp_path / "run", *KL, "steps=6", "fusion=chunk", "fusion.cache_tokens=256", "generator.replicas=2",
        "generator.slots=16", "learner.virtual_step_seconds=0.05", "reference.workers=2", "reference.token_budget=64",
        "reward.kind=model", f"reward.model.path={folder}", "reward.model.inputs=ids",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert not done.summary["ledger"]["failed"]
    assert any(r.policy_versions.min() < r.policy_versions.max() for r in checked.answered)
    for key in ("prefilled_fraction", "reference_prefilled_fraction"):
        assert max(row[key] for row in done.metrics) > 0.2, key
    assert sum(row["reference_prefill_evictions"] for row in done.metrics) > 0


def test_chunks_are_sent_where_anyone_can_read_them(tmp_path: Path) -> None:
    def prepared(*settings: str) -> Any:
        return prepare(load_config([f"run_dir={tmp_path}", "runtime=local", "fusion=chunk", *settings]))

    served = prepared(*KL)
    assert served.config.fusion.granularity == "chunk" and not served.notes
    own = prepared(*KL, "reference=learner")
    assert own.config.fusion.granularity == "rollout" and "has none (kind task)" in own.notes[0]


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_under_ray_a_reference_worker_may_die_with_all_that_it_has_read(
    tmp_path: Path, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers: the first dies when it has read ahead, the other in the midst of the run, as it is to answer."""
    struck: list[str] = []
    original = RayAnnotator.prefill

    async def prefill(self: RayAnnotator, released: Any, chunks: Any) -> Any:
        answer = await original(self, released, chunks)
        if chunks and not struck and self.name.startswith("reference"):
            struck.append(self.name)
            await ray_run.strike(self.actor, signal.SIGKILL)
        return answer

    async def strike(self: RayAnnotator, *_: Any) -> None:
        if struck and self.name.startswith("reference") and self.name not in struck:
            struck.append(self.name)
            await ray_run.strike(self.actor, signal.SIGKILL)

    monkeypatch.setattr(RayAnnotator, "prefill", prefill)
    ray_run.before(monkeypatch, RayAnnotator, "annotate", strike)
    done = ray_run.run(
        tmp_path, *KL, "steps=6", "fusion=chunk", "fusion.chunk_tokens=8", "reference.workers=2",
        "generator.max_completion_length=96", "generator.ignore_eos=true", "model.path=tiny",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert len(struck) == 2 and len(checked.answered) >= 6 * 16
    assert not done.summary["ledger"]["failed"]
    assert max(row["reference_prefilled_fraction"] for row in done.metrics) > 0
