"""Experiment 13: with responses of a fixed length TRL and ours sample the same tokens, the model's end token among
them; and a series that is interrupted keeps what it measured."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.models.checkpoint_folder import resolve

bench = importlib.import_module("experiments.13_against_trl.bench")
endless = importlib.import_module("experiments.13_against_trl.endless")
LENGTH = 8


def sampled(folder: Path) -> torch.Tensor:
    """Responses as TRL samples those of a fixed length: its end token is suppressed until then. [N, LENGTH]"""
    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(["12+34="] * 16, return_tensors="pt")
    whole = model.generate(
        **inputs,
        **{"do_sample": True, "top_k": 0, "min_new_tokens": LENGTH, "max_new_tokens": LENGTH},
        eos_token_id=tokenizer.eos_token_id,
    )
    return whole[:, inputs["input_ids"].shape[1] :]


def test_the_models_own_end_token_is_sampled_and_ends_nothing(tmp_path: Path) -> None:
    source = Path(resolve("tiny"))
    own_end = AutoTokenizer.from_pretrained(source).eos_token_id
    assert not (sampled(source) == own_end).any()
    folder = endless.endless_checkpoint(source, tmp_path / "model")
    responses = sampled(folder)
    assert responses.shape == (16, LENGTH) and (responses == own_end).any(1).all()  # this model ends after some digits
    assert not (responses == AutoTokenizer.from_pretrained(folder).eos_token_id).any()


def test_the_spare_token_has_no_role_or_is_the_unknown_word(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    assert endless.spare_token(tokenizer) == "<unk>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<file>", "<issue>"]})
    assert endless.spare_token(tokenizer) == "<issue>"
    bare: Any = SimpleNamespace(
        bos_token=None, eos_token="<end>", pad_token=None, unk_token=None, added_tokens_decoder={}
    )
    with pytest.raises(AsyncRLHFError, match="needs a tokenizer with a special token"):
        endless.spare_token(bare)


def test_an_interrupted_series_leaves_the_rounds_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def their_round(settings: Sequence[str], *_: Any) -> dict[str, Any]:
        if "seed=9" in settings:
            raise KeyboardInterrupt
        return {"samples_per_second": 1.0, "reward": 0.5, "rewards": [0.5]}

    async def alone(*_: Any) -> tuple[float, float]:
        return 1.0, 0.25

    monkeypatch.setattr(bench, "trl_round", their_round)
    monkeypatch.setattr(bench, "our_round", lambda *_: {"samples_per_second": 3.0, "reward": 0.4, "rewards": [0.4]})
    monkeypatch.setattr(bench.overlap, "alone", alone)
    words = ["--repeats", "3", "--first-seed", "7", "--out", str(tmp_path / "series.json"), "batch_size=16"]
    with pytest.raises(KeyboardInterrupt):
        bench.run(words)
    left = json.loads((tmp_path / "series.json").read_text())
    assert [made["seed"] for made in left["rounds"]] == [7, 8]
    assert left["ratios"]["asyncrlhf / TRL"]["values"] == [3.0, 3.0]
    assert left["ratios"]["asyncrlhf / its limit"]["values"] == [0.75, 0.75]
    with pytest.raises(SystemExit, match="2"):
        bench.run(["--repeats", "0"])
