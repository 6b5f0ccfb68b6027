"""Runs with ``weights.delta=sparse``: the same rollouts as with whole versions, and what was sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.loop import Finished
from tests.loop import run as local_run
from tests.ray_run import run

SMALL = (
    "batch_size=16", "num_generations=4", "generator.slots=16", "weights.audit_every=1", "learner.learning_rate=1e-6",
    "weights.bucket_mb=0.25", "eval_every=0",
)  # fmt: skip


def told(done: Finished) -> list[tuple[Any, ...]]:
    """What would differ if a number of a weight did."""
    return [(row["loss"], row["reward_mean"], row["entropy"], row["grad_norm"]) for row in done.metrics]


@pytest.mark.parametrize("steps", [12, pytest.param(200, marks=pytest.mark.thorough)])
def test_a_run_samples_what_it_samples_with_whole_versions(tmp_path: Path, steps: int) -> None:
    options = (*SMALL, f"steps={steps}", "weights.dtype=bfloat16", "async=async")
    whole = local_run(tmp_path / "whole", *options)
    sparse = local_run(tmp_path / "sparse", *options, "weights.delta=sparse")
    assert told(sparse) == told(whole)
    assert list(sparse.trained.rollout_id) == list(whole.trained.rollout_id)
    everything = whole.metrics[0]["weights_sent_bytes"]
    assert {row["weights_sent_bytes"] for row in whole.metrics} == {everything}
    for row in sparse.metrics[1:]:
        assert 0 < row["weights_sent_bytes"] < 0.1 * everything
        layers = [value for name, value in row.items() if name.startswith("weights_changed/model.layers.")]
        assert 0 < row["weights_changed_fraction"] < 0.05 and len(layers) == 4
        assert min(layers) <= row["weights_changed_fraction"] <= max(layers)


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("transport", ["collective", "object_store", "disk"])
def test_replicas_on_ray_hold_what_was_sent(tmp_path: Path, transport: str) -> None:
    """Every audit compares the engine's log-probs with the learner's, which are those of the same rounded weights."""
    options = (f"weights.transport={transport}", "weights.delta=sparse", "steps=8", "generator.replicas=2")
    done = run(tmp_path, *SMALL, *options, "weights.dtype=bfloat16")
    done.assert_ledger_whole()
    sent = [row["weights_sent_bytes"] for row in done.metrics]
    assert sum(size < 0.1 * max(sent) for size in sent) >= 6


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("workers", [1, 2])
def test_vllm_loads_what_was_patched(tmp_path: Path, workers: int) -> None:
    done = run(
        tmp_path, "experiment=vllm_cpu", *SMALL, "weights.delta=sparse", "weights.dtype=bfloat16", "steps=5",
        "stall_timeout_seconds=300", f"generator.vllm.tensor_parallel_size={workers}", "weights.audit_tolerance=0",
    )  # fmt: skip
    done.assert_ledger_whole()
    sent = [row["weights_sent_bytes"] for row in done.metrics]
    assert len(sent) == 5 and min(sent) < 0.1 * max(sent)
