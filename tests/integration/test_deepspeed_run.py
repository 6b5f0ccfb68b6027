"""Whole runs on Ray whose two learner ranks hold shards: they train as one rank does, publish, audit and resume."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.loop import Finished
from tests.loop import run as local_run
from tests.numeric import assert_close
from tests.ray_run import run

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("ray_local")]

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
# Buckets smaller than the model, so that it is gathered in several portions.
OPTIONS = (
    "batch_size=32", "learner.learning_rate=1e-4", "generator.slots=16", "weights.audit_every=1",
    "weights.bucket_mb=0.5",
)  # fmt: skip


def assert_audited(done: Finished) -> None:
    """Every publish was audited, and engine and learner computed the same."""
    found = [row["mismatch_kl"] for row in done.metrics]
    assert all(abs(value) < 1e-6 for value in found) and any(found), found
    assert done.metrics[-1]["policy_version"] == len(done.metrics)


@needs_deepspeed
def test_a_zero_3_run_publishes_what_it_trains_and_resumes(tmp_path: Path) -> None:
    sync = (*OPTIONS, "async.mode=sync")
    options = (*sync, "learner.backend=deepspeed", "learner.zero_stage=3", "learner.ranks=2")
    done = run(tmp_path / "two", *options, "steps=2", "checkpoint.every=2")
    done.assert_ledger_whole()
    assert_audited(done)
    one = local_run(tmp_path / "one", *sync, "steps=1").metrics
    # Later steps may part ways: sampling under weights that differ by rounding.
    for key, tolerance in {"loss": 1e-4, "reward_mean": 0, "grad_norm": 1e-3}.items():
        assert_close(done.metrics[0][key], one[0][key], atol=tolerance)
    exported = tmp_path / "two" / "checkpoints" / "step-00000002" / "learner" / "model"
    assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() > 0
    again = run(tmp_path / "two", *options, "steps=4", "checkpoint.resume=auto")
    again.assert_ledger_whole()
    assert_audited(again)
    assert len(again.metrics) == 4


def test_a_free_fsdp2_run_takes_snapshots_and_steps_in_one_order_on_all_ranks(tmp_path: Path) -> None:
    done = run(tmp_path / "two", *OPTIONS, "async.mode=async", "learner.sharding=fsdp2", "learner.ranks=2", "steps=6")
    done.assert_ledger_whole()
    assert_audited(done)
