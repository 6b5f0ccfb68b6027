"""Two FSDP2 ranks against one of plain torch: the same curve, and a checkpoint that any number of ranks reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from tests.numeric import assert_close
from tests.unit.learner.ranks import assert_curve, batches, build, curve, run_ranks, skips, weights

SAVED_AFTER = 6
SHORT: dict[str, tuple[AlgorithmConfig, dict[str, Any]]] = {
    "ppo": (AlgorithmConfig(advantage="gae", whiten=True, kl="loss", beta=0.1, num_iterations=2), {}),
    "m2po": (load_config(["algorithm=m2po"]).algorithm, {"gradient_checkpointing": True}),
    "impact": (load_config(["algorithm=impact"]).algorithm, {}),
    "gradients dealt out once an update": (AlgorithmConfig(), {"gradient_reduction": "update"}),
}
SHORT_STEPS = 3


def scatters(rank: int, **settings: Any) -> int:
    """How often gradients are dealt out in one step of several microbatches."""
    trained, name = build(rank, 2, sharding="fsdp2", **settings), "reduce_scatter_single"
    if not hasattr(torch.distributed, name):
        name = "reduce_scatter_tensor"  # its name in torch 2.11
    with mock.patch.object(torch.distributed, name, side_effect=getattr(torch.distributed, name)) as counted:
        curve(trained, batches(1), rank, 2)
    return counted.call_count


def job(rank: int, folder: Path) -> dict[str, Any]:
    trained, given = build(rank, 2, sharding="fsdp2"), batches()
    found: dict[str, Any] = {"curve": curve(trained, given[:SAVED_AFTER], rank, 2)}
    trained.make_room()
    trained.save(folder)
    found["saved"] = weights(trained)
    found["curve"] += curve(trained, given[SAVED_AFTER:], rank, 2)
    found["scores"] = trained.score([np.array([1, 2, 3, 4]), np.array([5, 6])])
    resumed = build(rank, 2, sharding="fsdp2")
    curve(resumed, given[:1], rank, 2)
    resumed.load(folder)
    found["resumed"] = curve(resumed, given[SAVED_AFTER:], rank, 2)
    found["skips"] = skips(trained, rank)
    found["scatters"] = scatters(rank), scatters(rank, gradient_reduction="update")
    for name, (algorithm, settings) in SHORT.items():
        found[name] = curve(build(rank, 2, algorithm, sharding="fsdp2", **settings), batches(SHORT_STEPS), rank, 2)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(job, 2, folder)


@pytest.fixture(scope="module")
def alone() -> list[dict[str, float]]:
    """The curve of one rank of plain torch."""
    return curve(build(), batches())


def test_two_ranks_make_the_curve_of_one_plain_rank(
    two_ranks: list[dict[str, Any]], alone: list[dict[str, float]]
) -> None:
    for rank in two_ranks:
        assert_curve(rank["curve"], alone)


@pytest.mark.parametrize("name", SHORT)
def test_other_algorithms_too(two_ranks: list[dict[str, Any]], name: str) -> None:
    expected = curve(build(algorithm=SHORT[name][0]), batches(SHORT_STEPS))
    for rank in two_ranks:
        assert_curve(rank[name], expected, rtol=2e-3, atol=2e-4)


def test_gradients_are_dealt_out_once_an_update_where_that_is_asked_for(two_ranks: list[dict[str, Any]]) -> None:
    for each, once in (rank["scatters"] for rank in two_ranks):
        assert once == 5 and each >= 2 * once  # four decoder layers and the rest


def test_a_resumed_run_makes_the_same_curve_with_two_ranks_and_with_one(
    two_ranks: list[dict[str, Any]], folder: Path
) -> None:
    expected = two_ranks[0]["curve"][SAVED_AFTER:]
    for rank in two_ranks:
        assert_curve(rank["resumed"], expected, rtol=1e-6, atol=1e-7)
    alone = build(sharding="fsdp2")
    alone.load(folder)
    assert_curve(curve(alone, batches()[SAVED_AFTER:]), expected)


def test_the_export_is_what_was_published(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    exported = dict(AutoModelForCausalLM.from_pretrained(folder / "model").named_parameters())
    published = two_ranks[0]["saved"]
    assert exported.keys() == published.keys() and not two_ranks[1]["saved"]
    for key, tensor in exported.items():
        assert np.array_equal(tensor.detach().numpy(), published[key]), key


def test_all_ranks_score_alike_and_skip_together(two_ranks: list[dict[str, Any]]) -> None:
    for first, second in zip(*(rank["scores"] for rank in two_ranks), strict=True):
        assert np.array_equal(first, second) and np.isfinite(first).all()
    assert [rank["skips"] for rank in two_ranks] == [True, True]


def test_bfloat16_gathers_halves_and_keeps_float32_masters() -> None:
    options = {"learning_rate": 1e-5, "lr_schedule": "constant", "max_grad_norm": 0.0, "token_budget": 40}
    exact = curve(build(**options), batches(1))[0]
    mixed = build(sharding="fsdp2", mixed_precision="bfloat16", **options)
    before = weights(mixed)
    found = curve(mixed, batches(1))[0]
    assert_close(found["grad_norm"], exact["grad_norm"], rtol=0.05)
    assert_close(found["entropy"], exact["entropy"], rtol=0.02)
    curve(mixed, batches(1) * 15)
    assert max(np.abs(tensor - before[name]).max() for name, tensor in weights(mixed).items()) > 1e-4


def test_a_checkpoint_of_another_layout_is_refused(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"one of learner\.sharding=fsdp2, not learner\.backend=torch"):
        build().load(folder)


def test_the_policys_layers_are_compiled_before_they_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of the policy, none of the critic and the reference."""
    compiled: list[tuple[torch.nn.Module, dict[str, Any]]] = []

    def note(layer: torch.nn.Module, **options: Any) -> None:
        assert not isinstance(layer, FSDPModule)
        compiled.append((layer, options))

    monkeypatch.setattr(torch.nn.Module, "compile", note)
    trained = build(algorithm=SHORT["ppo"][0], sharding="fsdp2", compile=True)
    layers = list(trained.model.model.layers)
    assert [layer for layer, _ in compiled] == layers and all(isinstance(layer, FSDPModule) for layer in layers)
    assert all(options == {"dynamic": True} for _, options in compiled)


COMPILED: dict[str, dict[str, Any]] = {
    "whole": {},
    "sharded": {"sharding": "fsdp2", "gradient_checkpointing": True},
    "in a ring": {"sharding": "fsdp2", "context_parallel_size": 2},
}


def compiled_job(rank: int) -> dict[str, Any]:
    kl = AlgorithmConfig(kl="loss", beta=0.1)
    return {
        name: curve(build(rank, 2, kl, compile=True, **settings), batches(SHORT_STEPS), rank, 2)
        for name, settings in COMPILED.items()
    }


@pytest.mark.thorough
def test_compiled_layers_make_the_curve_of_one_plain_rank() -> None:
    expected = curve(build(algorithm=AlgorithmConfig(kl="loss", beta=0.1)), batches(SHORT_STEPS))
    for found in run_ranks(compiled_job, 2):
        for name in COMPILED:
            for metrics, wanted in zip(found[name], expected, strict=True):
                for key in ("loss", "grad_norm", "entropy"):
                    assert_close(metrics[key], wanted[key], atol=1e-4, rtol=1e-4, what=f"{name} {key}")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sharding": "fsdp"}, r"learner\.sharding=fsdp is not known \(did you mean fsdp2\?\); allowed: none, fsdp2"),
        ({"sharding": "fsdp2", "mixed_precision": "float16"}, r"float16 needs learner\.sharding=none"),
        ({"gradient_reduction": "update"}, r"gradient_reduction=update needs learner\.sharding=fsdp2"),
        (
            {"ranks": 2, "tensor_parallel_size": 2, "compile": True},
            r"learner\.compile does not work with learner\.tensor_parallel_size=2: torch's compiler",
        ),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LearnerConfig(**settings)
