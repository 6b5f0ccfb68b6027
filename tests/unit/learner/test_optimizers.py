"""Optimizers by name: what each parameter gets, what resumes, what is refused before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.updates.optimizers import build_optimizer, check_optimizer
from tests.unit.learner.worlds import backend, llama, random_batch


def sgd(groups: Any, lr: float, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr, **more)


def moves(config: LearnerConfig) -> dict[str, torch.Tensor]:
    """What one update with a gradient of ones changes, by parameter."""
    model = llama(tie_word_embeddings=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(config, model, None)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def test_muon_is_for_hidden_matrices_alone() -> None:
    """Its step has nearly equal singular values; AdamW's first step is the learning rate, by the gradient's sign."""
    moved = moves(LearnerConfig(optim="muon", learning_rate=1e-2))
    plain = moves(LearnerConfig(learning_rate=1e-2))
    for name, move in moved.items():
        if "proj" in name:
            values = torch.linalg.svdvals(move)
            assert values.max() / values.quantile(0.1) < 3, name
            assert abs(float(move.norm()) / float(plain[name].norm()) - 0.2) < 0.1, "steps of AdamW's size, times 0.2"
        else:
            assert torch.equal(move, plain[name]), name
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= moved.keys()


@pytest.mark.parametrize(
    "settings",
    [
        {"optim": "muon", "optim_args": {"momentum": 0.9}},
        {"optim": "tests.unit.learner.test_optimizers:sgd", "optim_args": {"momentum": 0.9}},
        {"optim": "torch.optim:Adagrad"},
    ],
    ids=lambda s: s["optim"],
)
def test_steps_follow_the_schedule_and_a_checkpoint_goes_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    learner = LearnerConfig(learning_rate=1e-2, lr_schedule="linear", **settings)
    trained, resumed = backend(learner=learner), backend(learner=learner)
    trained.train_step(random_batch(seed=1))
    trained.save(tmp_path)
    resumed.load(tmp_path)
    for seed in (2, 3):
        rates = [b.train_step(random_batch(seed=seed)).metrics["learning_rate"] for b in (trained, resumed)]
        assert rates[0] == rates[1] == pytest.approx(1e-2 * (1 - (seed - 1) / 100))
    for name, tensor in trained.parameters().items():
        assert torch.equal(tensor, resumed.parameters()[name]), name
    other = backend(learner=LearnerConfig(learning_rate=1e-2))
    if settings["optim"] == "muon":
        with pytest.raises(CheckpointError, match=r"holds another optimizer's states than learner.optim=adamw"):
            other.load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": "adam"}, r"learner.optim=adam is not known \(did you mean adamw\?\)"),
        ({"optim": "adamw_8bit"}, "learner.optim=adamw_8bit needs learner.gpus"),
        ({"optim": "muon", "sharding": "fsdp2"}, "learner.optim=muon does not work with learner.sharding=fsdp2"),
        ({"optim": "nowhere.at.all:f"}, "cannot be imported: ModuleNotFoundError"),
        ({"optim": "torch.optim:nothing"}, "has no 'nothing'"),
        ({"optim": "torch.optim:SGD", "optim_args": {"speed": 3}}, "cannot be built: TypeError.*'speed'"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config = LearnerConfig(**settings)
        check_optimizer(config)
        build_optimizer(config, llama(), None)


def test_zero_lays_out_adamw_alone() -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(ConfigError, match=r"learner.optim=muon does not work with learner.backend=deepspeed"):
        LearnerConfig(backend="deepspeed", optim="muon")
