"""The texts of the log-prob audits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import MistralConfig

from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.replicas.audits import PROBE_LENGTH, PROBE_TEXTS, Audits


@pytest.mark.parametrize(("answers", "longest"), [(60, 40), (16, PROBE_LENGTH)])
def test_one_text_exceeds_the_window_if_the_runs_sequences_can(tmp_path: Path, answers: int, longest: int) -> None:
    """As long as that, an engine that ignores the window of 24 tokens differs; longer ones would cost for nothing."""
    MistralConfig(sliding_window=24).save_pretrained(tmp_path)
    settings = (f"model.path={tmp_path}", f"generator.max_completion_length={answers}", "task.max_prompt_length=8")
    state = build_state(load_config(["runtime=local", *settings]))
    runtime: Any = SimpleNamespace()
    audits = Audits(state, runtime, 19)
    texts = audits.due(0)
    assert texts is not None and [len(text) for text in texts] == [PROBE_LENGTH] * (PROBE_TEXTS - 1) + [longest]
    assert all(text.min() >= 0 and text.max() < 19 for text in texts)
    assert audits.due(1) is None
