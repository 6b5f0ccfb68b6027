"""Runs that train a LoRA adapter: it alone travels, every publish passes the audit, the reward rises, a run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.data.data_config import LoraConfig, ModelConfig
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.models.adapter import trained_tensors
from asyncrlhf.models.pretrained import load_policy
from asyncrlhf.transport.local import LocalReceiver
from tests import ray_run
from tests.loop import run

LORA = (
    "model.lora.r=8", "weights.audit_every=1", "weights.audit_tolerance=1e-4", "learner.learning_rate=2e-4",
)  # fmt: skip


def test_an_adapter_alone_is_sent_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tickets: list[Any] = []
    original = LocalReceiver.receive
    monkeypatch.setattr(LocalReceiver, "receive", lambda self, ticket: tickets.append(ticket) or original(self, ticket))
    done = run(tmp_path, *LORA, "batch_size=64", "generator.slots=64", "steps=50")
    done.assert_ledger_whole()
    rewards = np.array([row["reward_mean"] for row in done.metrics])
    first, last = rewards[:10], rewards[-10:]
    assert last.mean() - first.mean() > 3 * np.sqrt((first.var() + last.var()) / 10), rewards
    adapter = trained_tensors(load_policy(ModelConfig(lora=LoraConfig(r=8))))
    assert len(tickets) > 40
    for ticket in tickets:
        assert [entry.name for entry in ticket.manifest.tensors] == list(adapter)
        assert ticket.manifest.total_bytes == sum(tensor.nbytes for tensor in adapter.values())
    # Every publish was audited, with a tolerance of 1e-4.
    assert all(abs(row["mismatch_kl"]) < 1e-8 for row in done.metrics)


def test_the_audit_ends_a_run_that_merges_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraConfig, "scaling", property(lambda self: 1.0))
    with pytest.raises(WeightSyncError, match="all tensors arrived: the engine computes something else"):
        run(tmp_path, *LORA, "batch_size=16", "steps=6")


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_an_adapter_reaches_generators_of_other_processes(tmp_path: Path) -> None:
    done = ray_run.run(
        tmp_path, *LORA, "batch_size=16", "steps=4", "generator.replicas=2", "async.on_weight_update=in_flight"
    )
    done.assert_ledger_whole()
    assert all(abs(row["mismatch_kl"]) < 1e-8 for row in done.metrics)
    assert max(max(versions) for versions in done.trained.policy_versions) >= 1


@pytest.mark.more
@pytest.mark.in_turn
def test_a_run_of_an_adapter_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    settings = (*LORA, "batch_size=16", "async.mode=sync", "checkpoint.every=2")
    whole = run(tmp_path / "whole", *settings, "steps=4")
    run(tmp_path / "parts", *settings, "steps=2")
    parts = run(tmp_path / "parts", *settings, "steps=4", "checkpoint.resume=auto")
    assert [row["step"] for row in parts.metrics] == [row["step"] for row in whole.metrics]
    assert parts.weights_digest() == whole.weights_digest()
