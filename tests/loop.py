"""Runs whole training runs in this process for tests: real loops, virtual clock, records read back."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrlhf.cluster.local_runtime import LocalRuntime
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.models.checkpoint_folder import resolve
from asyncrlhf.orchestrator import run as run_module
from asyncrlhf.records.read.verify import verify
from asyncrlhf.records.show.metric_names import find_metric
from asyncrlhf.records.show.summary import REPLICA_PREFIX
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.types import TrainBatch

QUIET = (
    "logging.wandb=disabled", "logging.progress=none", "logging.report=false", "task.heldout_size=8",
    "checkpoint.at_end=false",
)  # fmt: skip
FAKE = (
    "generator.engine=fake",
    "learner.learning_rate=1e-4",
    "num_generations=4",
    "batch_size=16",
    "generator.slots=16",
)


# What depends on when things happened and not on what was computed: all that two runs of one seed in
# ``async.mode=fixed_lag`` may differ in.
TIMING_KEYS = frozenset(
    {
        "wall_time",
        "tool_seconds_mean",
        "samples_per_second",
        "tokens_per_second",
        "generated_tokens_per_second",
        "learner_idle_fraction",
        "generator_idle_fraction",
        "weight_sync_seconds",
        "snapshot_seconds",
        "train_seconds",
        "wait_seconds",
        "buffer_size",
        "buffer_age",
        "dropped",
        "reward_latency_p50",
        "reward_latency_p95",
        "reference_latency_p50",
        "reference_latency_p95",
        "critic_latency_p50",
        "critic_latency_p95",
        "prefilled_fraction",
        "prefill_evictions",
        "reference_prefilled_fraction",
        "reference_prefill_evictions",
        "rollouts_in_flight",
        "generators_alive",
        "generators_held_back",
        "loop_lag_p99",
        "controller_cpu_seconds",
        "shared_cpu_seconds",
        "remote_calls",
    }
)


def is_timing(key: str) -> bool:
    """Whether the metric depends on when things happened, as all figures of single replicas do."""
    return key in TIMING_KEYS or key.startswith(REPLICA_PREFIX)


@dataclass(frozen=True)
class Finished:
    """What a run left behind."""

    folder: Path
    summary: dict[str, Any]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def untimed_metrics(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if not is_timing(k)} for row in self.metrics]

    @property
    def rollouts(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "rollouts")

    @property
    def trained(self) -> pd.DataFrame:
        rows = self.rollouts
        return rows[rows.state == "trained"].sort_values("rollout_id").reset_index(drop=True)

    def weights_digest(self) -> str:
        newest = sorted(self.folder.glob("checkpoints/step-*/learner/model/model.safetensors"))[-1]
        return hashlib.sha256(newest.read_bytes()).hexdigest()

    def assert_ledger_whole(self) -> None:
        """The totals add up, and the records hold each ended rollout exactly once."""
        ledger = self.summary["ledger"]
        assert ledger["adds_up"], ledger
        rows = self.rollouts
        assert rows.rollout_id.is_unique
        ended = ledger["trained"] + sum(ledger["dropped"].values()) + sum(ledger["failed"].values())
        assert len(rows) == ended
        assert (rows.state == "trained").sum() == ledger["trained"]
        if ledger["left"] == 0:
            assert sorted(rows.rollout_id) == list(range(ledger["admitted"]))


HELD: list[tempfile.TemporaryDirectory[str]] = []  # until this process ends


@cache
def small_checkpoint() -> Path:
    """The packaged checkpoint with one layer of 16 random channels: of a fake engine's responses nothing is learned,
    and steps of this one cost less."""
    held = tempfile.TemporaryDirectory(prefix="small-checkpoint-")
    HELD.append(held)
    folder = Path(held.name)
    packaged = Path(resolve(ModelConfig().path))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8}
    config = AutoConfig.from_pretrained(packaged, num_hidden_layers=1, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(packaged / file, folder)
    return folder


def run(folder: Path, *overrides: str) -> Finished:
    """One run of the local runtime (unless overridden), with nothing on the screen; its records keep every promise."""
    all_fake = "generator.engine=fake" in overrides and not any(word.startswith("model") for word in overrides)
    model = [f"model.path={small_checkpoint()}"] if all_fake else []
    config = load_config([f"run_dir={folder}", "runtime=local", *QUIET, *model, *overrides])
    finished = Finished(folder, run_module.train(config))
    unknown = sorted({key for row in finished.metrics for key in row if find_metric(key) is None})
    assert unknown == [], f"records/show/metric_names.py does not say what these mean: {unknown}"
    assert verify(folder) == []
    return finished


def train_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have learner steps of this process raise the version and make no pass: for runs that are asked how the loops move
    and not what is learned. A pass is most of what such a run costs."""

    def train_step(self: TorchBackend, batch: TrainBatch) -> StepResult:
        self.policy_version += 1
        return StepResult({"loss": 0.0, "grad_norm": 0.0, "ess_fraction_seq": 1.0})

    monkeypatch.setattr(TorchBackend, "train_step", train_step)


def meddle(monkeypatch: pytest.MonkeyPatch, action: Callable[[LocalRuntime], None]) -> list[LocalRuntime]:
    """Call ``action`` with the runtime as soon as its parts stand; it sets its own timers on the virtual clock."""
    seen: list[LocalRuntime] = []
    original = LocalRuntime.start

    async def start(self: LocalRuntime) -> None:
        await original(self)
        seen.append(self)
        action(self)

    monkeypatch.setattr(LocalRuntime, "start", start)
    return seen
