"""Whole runs of models of many families: without staleness, what the engine sampled is what the learner trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from asyncrlhf.cli.main import main
from asyncrlhf.models.checkpoint_folder import resolve
from tests.loop import QUIET, run
from tests.unit.engines.families import family

SYNC = (
    "runtime=local", "async.mode=sync", "steps=2", "batch_size=8", "num_generations=4", "generator.slots=8",
    "generator.max_completion_length=20", "weights.audit_every=1", "learner.learning_rate=1e-3", "eval_every=0",
    "reward.kind=python", "reward.target=tests.reward_functions:one_for_digits",
)  # fmt: skip
# Each was wrong, or ended in a Python error, before sequences were compared with each one alone: windows, a leak
# through convolutions, states or linear attention, dropout, chunks, keyword arguments that are lost, no interface.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3_text": {},
    "lfm2": {},
    "granitemoehybrid": {},
    "minimax": {},
    "opt": {"dropout": 0.1, "max_position_embeddings": 256},
    "llama4_text": {},
    "bloom": {},
    "mamba": {},
}


def checkpoint(folder: Path, name: str, **sizes: Any) -> Path:
    """A random model of the family, with the packaged tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = family(name, dtype=torch.float32, **({"vocab_size": len(tokenizer)} | ends | sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.in_turn
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.more_but("gemma3_text", "mamba")
@pytest.mark.thorough_but("gemma3_text", "mamba", "bloom")
def test_without_staleness_the_learners_log_probs_are_the_engines(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "model", name, **FAMILIES[name])
    done = run(tmp_path / "run", *QUIET, *SYNC, f"model.path={folder}")
    assert len(done.metrics) == 2
    for row in done.metrics:
        assert row["mismatch_kl"] < 1e-8 and abs(row["behavior_kl"]) < 1e-8, row
        assert row["ess_fraction"] == pytest.approx(1.0, abs=1e-6) and row["clip_fraction"] == 0
        assert row["grad_norm"] > 0
    assert done.trained["response"].str.len().max() > 0


def test_a_model_that_cannot_be_right_ends_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RWKV divides its weights in its forward pass."""
    folder = checkpoint(tmp_path / "model", "rwkv", rescale_every=1)
    code = main(["train", *QUIET, *SYNC, f"model.path={folder}", f"run_dir={tmp_path / 'run'}"])
    printed = capsys.readouterr().err
    assert code == 2, printed
    assert "RwkvForCausalLM" in printed and "Traceback" not in printed
