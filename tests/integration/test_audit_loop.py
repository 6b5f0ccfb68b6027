"""The log-prob audit in a whole run: half-updated weights end it with the tensor's name, rounding does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport import weights_config
from tests.loop import run

BF16 = ("model.dtype=bfloat16", "steps=4", "batch_size=32", "weights.audit_every=1")


def test_the_bits_of_half_precision_weights_agree(tmp_path: Path) -> None:
    """Even where no rounding at all is tolerated, the audit finds no tensor to blame."""
    with pytest.raises(WeightSyncError, match="all tensors arrived"):
        run(tmp_path, *BF16, "weights.audit_tolerance=1e-12")


def test_coarse_rounding_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_config, "HALF", weights_config.Tolerance(1e-12, 1.0))
    done = run(tmp_path, *BF16)
    assert all(row["mismatch_kl"] > 0 for row in done.metrics)


def test_a_tensor_that_was_not_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = "model.layers.1.mlp.up_proj.weight"
    load = HFEngine.load_weights

    def half(self: HFEngine, version: int, weights: Mapping[str, torch.Tensor], *rest: object) -> None:
        kept = {name: tensor for name, tensor in weights.items() if name != forgotten or version == 0}
        load(self, version, {**dict(self.parameters()), **kept}, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(HFEngine, "load_weights", half)
    with pytest.raises(WeightSyncError, match=rf"differ: {forgotten}\."):
        run(tmp_path, "steps=4", "batch_size=32", "weights.audit_every=1", "learner.learning_rate=1e-2")
