"""Whole runs with vLLM generators: on Ray with gloo and updates in flight, and one whose engine skips a tensor."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.cluster.ray_handles import RayGenerator
from asyncrlhf.engines.vllm.transfer import StagedWeightTransferEngine
from asyncrlhf.errors import WeightSyncError
from tests.loop import run as local_run
from tests.ray_run import before_call, run
from tests.vllm_tiny import needs_vllm

pytestmark = needs_vllm

SMALL = ("generator.slots=16", "batch_size=16", "num_generations=4", "generator.vllm.kv_cache_gb=0.1")


@pytest.mark.usefixtures("ray_local")
def test_vllm_generators_take_weights_by_gloo_while_sequences_go_on(tmp_path: Path) -> None:
    done = run(
        tmp_path, "experiment=vllm_cpu", *SMALL, "steps=8", "generator.ignore_eos=true",
        "generator.max_completion_length=40", "weights.audit_every=1", "learner.learning_rate=1e-4",
    )  # fmt: skip
    done.assert_ledger_whole()
    trained = done.trained
    assert len(trained) == 8 * 16
    assert trained.staleness.max() <= 2
    assert all((np.diff(versions) >= 0).all() for versions in trained.policy_versions)
    assert any(len(set(versions)) > 1 for versions in trained.policy_versions)
    # Every publish was audited, with a tolerance of 1e-4 in the experiment.
    assert all(abs(row["mismatch_kl"]) < 1e-8 for row in done.metrics)


@pytest.mark.in_turn
@pytest.mark.more
def test_the_audit_ends_a_run_whose_engine_skips_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = "model.layers.2.self_attn.v_proj.weight"
    original = StagedWeightTransferEngine.update_weights

    def skip(self: StagedWeightTransferEngine, update: dict[str, Any]) -> None:
        original(self, {"tensors": {n: w for n, w in update["tensors"].items() if n != skipped}})

    monkeypatch.setattr(StagedWeightTransferEngine, "update_weights", skip)
    with pytest.raises(WeightSyncError, match=f"audit of .* tensors that differ: {skipped}[.]$"):
        local_run(tmp_path, "generator.engine=vllm", *SMALL, "steps=4", "weights.audit_every=1")


async def _die_in_the_next_load(actor: Any) -> None:
    """Have the last vLLM worker of a replica killed when it has loaded the first bucket of the next version."""

    def arm(replica: Any) -> None:
        def in_worker(worker: Any) -> None:
            inner, seen = worker.worker, []

            def update_weights(info: Any) -> None:
                seen.append(1)
                if len(seen) == 2 and inner.rank > 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                type(inner).update_weights(inner, info)

            inner.update_weights = update_weights

        replica._between_steps(lambda: replica._worker.engine._core._llm.collective_rpc(in_worker))

    await actor.__ray_call__.remote(arm)


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_a_worker_killed_in_mid_load_costs_its_replica_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed: list[int] = []

    async def arm(handle: RayGenerator, version: int, *_: Any) -> None:
        if version == 2 and not armed:
            armed.append(version)
            await _die_in_the_next_load(handle.actor)

    before_call(monkeypatch, RayGenerator, "load", arm)
    done = run(
        tmp_path, "experiment=vllm_cpu", *SMALL, "steps=6", "generator.vllm.tensor_parallel_size=2",
        "weights.bucket_mb=0.1", "weights.audit_every=1", "stall_timeout_seconds=300",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert armed and len(done.trained) == 6 * 16
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events].count("died") == 1, "the replica died more than once, or never"
