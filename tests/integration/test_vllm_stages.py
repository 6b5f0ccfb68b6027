"""Stages whose answers vLLM samples: evaluate and preferences through the command line, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.cli.main import main
from tests.vllm_tiny import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.thorough]

VLLM = ("generator=vllm", "generator.vllm.kv_cache_gb=0.1")
QUIET = ("logging.wandb=disabled", "logging.progress=none")


def evaluation(folder: Path, *typed: str) -> dict[str, Any]:
    assert main(["evaluate", "task.heldout_size=16", f"run_dir={folder}", *QUIET, *typed]) == 0
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


def test_evaluate_and_preferences_sample_with_vllm(tmp_path: Path) -> None:
    """Greedy answers are transformers' own; a model is no better than itself, and at no distance of itself. Three
    engines start one after the other in this process, the two of the second evaluation in one command."""
    ours = evaluation(tmp_path / "vllm", *VLLM)
    assert ours == evaluation(tmp_path / "hf", "generator=hf")
    assert 0 < ours["reward_mean"] < 1
    sampled = evaluation(
        tmp_path / "self", *VLLM, "evaluation=sampled", "evaluation.against=tiny", "evaluation.reference=tiny"
    )
    assert sampled["answers"] == 64 and sampled["failed"] == 0
    assert sampled["kl"]["k1_sequence"] == sampled["kl"]["k3_sequence"] == 0 and sampled["perplexity"] > 1
    assert sampled["win_rate"] == pytest.approx(0.5), "the same seeds give both the same answers"
    pairs = ("preferences.num_prompts=32", "generator.temperature=1.0", f"run_dir={tmp_path / 'pairs'}")
    assert main(["preferences", *VLLM, *pairs, *QUIET]) == 0
    rows = [json.loads(line) for line in (tmp_path / "pairs" / "preferences.jsonl").read_text().splitlines()]
    right = [str(sum(int(n) for n in row["prompt"].removesuffix("=").split("+"))) for row in rows]
    assert rows and [row["chosen"] for row in rows] == right
    assert not np.any([row["rejected"] == answer for row, answer in zip(rows, right, strict=True)])
