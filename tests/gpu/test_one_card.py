"""Learner and generators at work at the same time on one GPU, weights by CUDA IPC; skipped visibly without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.loop import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_every_version_arrives_whole_while_all_work(engine: str, tmp_path: Path) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    words = (
        "runtime=ray", "cluster=one_gpu", "weights.transport=cuda_ipc", "generator.replicas=2", "generator.gpus=0.25",
        f"generator.engine={engine}", "generator.vllm.engine_kwargs={enforce_eager:true}", "steps=12", "batch_size=32",
        "learner.learning_rate=1e-3", "weights.audit_every=1", "weights.checksum=true",
    )  # fmt: skip
    done = run(tmp_path, *words)
    done.assert_ledger_whole()
    assert len(done.metrics) == 12 and all(abs(row["mismatch_kl"]) < 1e-3 for row in done.metrics)
