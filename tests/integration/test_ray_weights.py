"""Ways for weights to travel, in whole runs on Ray: disk, streams, deltas, half precision, and a death on the way."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.ray_handles import RayGenerator, RayLearner
from asyncrlhf.config.compose import load_config
from asyncrlhf.engines.hf import HFEngine
from asyncrlhf.errors import ConfigError, WeightSyncError
from asyncrlhf.transport.disk_files import MANIFEST
from tests.loop import Finished
from tests.loop import run as local_run
from tests.ray_run import before, run, strike, until, watch

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


WAYS = {
    "disk": ("weights.transport=disk", "weights.delta=true"),
    "stream": ("weights.staging=stream", "async.on_weight_update=in_flight"),
}


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("way", WAYS)
def test_weights_travel_while_sequences_go_on(tmp_path: Path, way: str) -> None:
    done = run(tmp_path, *SMALL, *LONG, *WAYS[way], "steps=4", "generator.replicas=2", "weights.bucket_mb=0.25")
    assert_whole(done, 4)
    assert any(len(set(versions)) > 1 for versions in done.trained.policy_versions)
    if way.startswith("disk"):
        kept = sorted((tmp_path / "weights").glob("v*-*"))
        assert len(kept) <= 2 and json.loads((kept[-1] / MANIFEST).read_text())["version"] == 4
        assert list((tmp_path / "weights").glob(".writing*")) == []


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_a_schedule_is_kept_by_streams_onto_the_disk_and_by_the_wire(tmp_path: Path) -> None:
    """The schedule waits for its batches before a stream begins, and the stream holds up the update: no deadlock."""
    options = (*SMALL, "steps=4", "async.mode=fixed_lag", "async.lag=2", "weights.staging=stream")
    wire = run(tmp_path / "wire", *options)
    disk = run(tmp_path / "disk", *options, "weights.transport=disk")
    assert wire.untimed_metrics == disk.untimed_metrics
    for row in wire.trained.itertuples():
        assert set(row.policy_versions) == {max(0, row.consumed_at_version[0] - 2)}


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_generators_killed_in_a_stream_are_replaced_and_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One in the middle of a transfer; then all while the learner trains: it runs out of batches, and no publish
    but one of the version that it has already would ever reach their successors."""
    controllers, struck = watch(monkeypatch), []

    async def kill_one(generator: RayGenerator, *_: Any) -> None:
        if generator.name == "generator-1" and controllers[0].state.version == 2 and not struck:
            struck.append(generator.name)
            await strike(generator.actor, signal.SIGKILL)

    async def kill_all(learner: RayLearner, *_: Any) -> None:
        state, publisher = controllers[0].state, controllers[0]._publisher
        if state.version == 3:
            await until(lambda: publisher.wanted or state.replicas[1].takes_work, "generator-1's wish to join")
        if state.version == 5 and len(struck) == 1:
            await until(lambda: not publisher.busy, "the end of the publish")
            assert all(replica.takes_work for replica in state.replicas)
            for replica in list(state.replicas):
                struck.append(replica.name)
                await strike(replica.handle.actor, signal.SIGKILL)

    before(monkeypatch, RayGenerator, "load", kill_one)
    before(monkeypatch, RayLearner, "train", kill_all)
    done = run(
        tmp_path, *SMALL, "steps=8", "generator.replicas=2", "weights.staging=stream", "weights.timeout_seconds=20",
        "logging.progress=plain",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert len(done.trained) == 8 * 32 and struck == ["generator-1", "generator-0", "generator-1"]
    assert all(abs(row["mismatch_kl"]) < 1e-6 for row in done.metrics)
    said = " ".join(capsys.readouterr().out.split())
    assert "gave no answer" not in said and said.count("generator-1 is back") >= 1


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

    def note(worker: GeneratorWorker, ticket: Any) -> None:
        sent.append({entry.dtype for entry in ticket.manifest.tensors})
        receive(worker, ticket)

    monkeypatch.setattr(GeneratorWorker, "receive", note)
    local_run(tmp_path / "whole", *options[:1], "weights.dtype=bfloat16", "weights.audit_every=1", "steps=3")
    assert sent == [{"bfloat16"}] * 4


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("weights.staging=stream", "runtime=local"), "weights.staging=stream does not work with runtime=local"),
        (("weights.staging=stream", "generator.engine=vllm"), "does not work with generator.engine=vllm"),
        (("weights.staging=stream", "cluster.placement=flatten"), "which sleep meanwhile"),
        (("weights.staging=stream", "model.lora.r=4"), "has nothing to save with model.lora.r=4"),
        (("weights.staging=stream", "weights.delta=true"), "weights.delta=true needs the copies"),
        (("weights.delta=true", "weights.checksum=false"), "it needs weights.checksum=true"),
        (("weights.staging=stream", "weights.transport=object_store"), "allowed: auto, collective, disk"),
        (("weights.dtype=half",), "weights.dtype=half is not known"),
        (("weights.disk_path=/tmp/x",), "is read by weights.transport=disk alone"),
        (("weights.transport=disk", "runtime=local"), "weights.transport=disk needs runtime=ray"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(list(overrides))
