"""Whole runs whose reference is a service train as with the learner's own, wherever the KL is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.pretrained import load_model
from tests import loop
from tests.loop import FAKE, Finished
from tests.numeric import assert_close

WARM = ("generator.temperature=0.7", "model.path=tiny")
KL = (*FAKE, *WARM, "algorithm=grpo", "algorithm.kl=loss", "algorithm.beta=0.1")
SERVED = (*KL, "reference=service")
PLACES = {
    "loss": ("algorithm=grpo", "algorithm.kl=loss", "algorithm.beta=0.1"),
    "reward": ("algorithm=rloo", "algorithm.kl=reward", "algorithm.beta=0.1"),
    "token reward": ("algorithm=ppo", "algorithm.kl=reward", "algorithm.beta=0.1"),
    "head": ("algorithm=online_dpo",),
}


@pytest.fixture
def learners(monkeypatch: pytest.MonkeyPatch) -> list[TorchBackend]:
    """Every training backend that is built from now on."""
    built: list[TorchBackend] = []
    original = TorchBackend.__init__

    def note(self: TorchBackend, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        built.append(self)

    monkeypatch.setattr(TorchBackend, "__init__", note)
    return built


def weights(done: Finished) -> dict[str, torch.Tensor]:
    newest = sorted(done.folder.glob("checkpoints/step-*/learner/model/model.safetensors"))[-1]
    return load_file(newest)


def assert_trained_alike(a: Finished, b: Finished) -> None:
    assert list(a.trained.response) == list(b.trained.response)
    for one, other in zip(a.metrics, b.metrics, strict=True):
        for key in ("loss", "ref_kl", "reward_mean", "grad_norm"):
            assert_close(one[key], other[key], rtol=1e-4, atol=1e-5, what=str((one["step"], key)))
    assert_close(weights(a), weights(b), atol=1e-4)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=[pytest.mark.thorough] if p == "token reward" else []) for p in PLACES]
)
@pytest.mark.more_but(every=3)
def test_the_training_is_that_of_the_learners_own_reference(
    tmp_path: Path, learners: list[TorchBackend], place: str
) -> None:
    common = (*FAKE, *WARM, *PLACES[place], "async.mode=sync", "steps=3", "checkpoint.every=3")
    own = loop.run(tmp_path / "learner", *common)
    served = loop.run(tmp_path / "service", *common, "reference=service", "reference.token_budget=64")
    assert [backend.reference is None for backend in learners] == [False, True]
    assert own.metrics[-1]["ref_kl"] > 1e-4, "the policy has not left the reference: nothing was compared"
    assert_trained_alike(own, served)
    served.assert_ledger_whole()
    for row in served.metrics:
        assert row["reference_latency_p95"] >= row["reference_latency_p50"] >= 0
    assert "reference_latency_p50" not in own.metrics[0]


def test_rows_that_name_a_teacher_train_as_with_that_teacher_alone(tmp_path: Path) -> None:
    """And by the mixture of all they do not."""
    rows = [{"prompt": f"{i % 10}+{i // 10}=", "answer": str(i % 10 + i // 10), "teacher": "whole"} for i in range(32)]
    unnamed = [{key: row[key] for key in ("prompt", "answer")} for row in rows]
    for name, table in (("named", rows), ("unnamed", unnamed)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, table)))
    student = "model.model_init_kwargs={num_hidden_layers: 2}"
    folder = tmp_path / "half"
    load_model(load_config([student]).model).save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)
    common = (*FAKE, "algorithm=distill", student, "async.mode=sync", "steps=3", "checkpoint.every=3", "task=prompts")
    both = ("++reference.teachers.whole.path=tiny", f"++reference.teachers.half.path={folder}")
    alone = loop.run(tmp_path / "alone", *common, f"task.path={tmp_path}/unnamed.jsonl", "reference.path=tiny")
    named = loop.run(tmp_path / "both", *common, f"task.path={tmp_path}/named.jsonl", *both)
    mixed = loop.run(tmp_path / "mixed", *common, f"task.path={tmp_path}/unnamed.jsonl", *both)
    assert_trained_alike(alone, named)
    named.assert_ledger_whole()
    assert mixed.metrics[0]["ref_kl"] < 0.8 * alone.metrics[0]["ref_kl"], "half of it is the student itself"
