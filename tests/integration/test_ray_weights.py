"""Ways for weights to travel, in whole runs on Ray: disk, deltas and half precision."""

from __future__ import annotations

import json
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.config.compose import load_config
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.errors import ConfigError, WeightSyncError
from asyncrlhf.transport.disk import MANIFEST
from tests.loop import Finished
from tests.loop import run as local_run
from tests.ray_run import run

SMALL = ("batch_size=32", "learner.learning_rate=1e-4", "generator.slots=16", "weights.audit_every=1")
SKIPPED = "model.layers.0.mlp.up_proj.weight"
LONG = ("generator.ignore_eos=true", "generator.max_completion_length=40")


def assert_whole(done: Finished, steps: int) -> None:
    done.assert_ledger_whole()
    assert len(done.trained) == steps * 32
    for row in done.trained.itertuples():
        assert row.consumed_at_version[0] - min(row.policy_versions) == row.staleness <= 2
        assert (np.diff(row.policy_versions) >= 0).all()
    # Each publish was audited: float32 log-probs of learner and engine differ by rounding alone.
    assert all(abs(row["mismatch_kl"]) < 1e-6 for row in done.metrics)


@pytest.mark.more
@pytest.mark.in_turn
@pytest.mark.usefixtures("ray_local")
def test_weights_travel_by_disk_while_sequences_go_on(tmp_path: Path) -> None:
    way = ("weights.transport=disk", "weights.delta=sparse")
    done = run(tmp_path, *SMALL, *LONG, *way, "steps=4", "generator.replicas=2", "weights.bucket_mb=0.25")
    assert_whole(done, 4)
    assert any(len(set(versions)) > 1 for versions in done.trained.policy_versions)
    kept = sorted((tmp_path / "weights").glob("v*-*"))
    assert len(kept) <= 2 and json.loads((kept[-1] / MANIFEST).read_text())["version"] == 4
    assert list((tmp_path / "weights").glob(".writing*")) == []


def test_a_skipped_tensor_is_named_when_weights_travel_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's digests are rounded as its weights are: only the tensor that was left out differs."""
    load = HFEngine.load_weights

    def skip(engine: HFEngine, version: int, weights: Any, cache: Any) -> None:
        kept = {
            **weights,
            "model.layers.0.mlp.up_proj.weight": engine.parameters()["model.layers.0.mlp.up_proj.weight"],
        }
        load(engine, version, kept if version == 2 else weights, cache)

    monkeypatch.setattr(HFEngine, "load_weights", skip)
    options = (
        "batch_size=32", "learner.learning_rate=0.05", "weights.audit_every=1", "weights.audit_tolerance=0.02",
        "weights.dtype=bfloat16", "steps=4", "async.mode=sync",
    )  # fmt: skip
    with pytest.raises(
        WeightSyncError, match=r"version 2 .*tensors that differ: model\.layers\.0\.mlp\.up_proj\.weight"
    ):
        local_run(tmp_path / "skipped", *options)
    monkeypatch.undo()
    sent: list[set[str]] = []
    receive = GeneratorWorker.receive

    @wraps(receive)
    def note(worker: GeneratorWorker, ticket: Any) -> None:
        sent.append({entry.dtype for entry in ticket.manifest.tensors})
        receive(worker, ticket)

    monkeypatch.setattr(GeneratorWorker, "receive", note)
    local_run(tmp_path / "whole", *options[:1], "weights.dtype=bfloat16", "weights.audit_every=1", "steps=3")
    assert sent == [{"bfloat16"}] * 4


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("weights.staging=stream",), "weights.staging"),
        (("weights=stream",), "weights"),
        (("weights.delta=sparse", "weights.checksum=false"), "it needs weights.checksum=true"),
        (("weights.dtype=half",), "weights.dtype=half is not known"),
        (("weights.disk_path=/tmp/x",), "is used only by weights.transport=disk"),
        (("weights.transport=disk", "runtime=local"), "weights.transport=disk needs runtime=ray"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(list(overrides))
