"""Tensor parallel, expert parallel and HSDP learners against one plain rank; checkpoints read by other layouts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from tests.numeric import assert_close
from tests.unit.learner.ranks import COMMON, batches, run_ranks, share, weights

STEPS = 10
SHORT = 3
KL = AlgorithmConfig(kl="loss", beta=0.1)
PPO = AlgorithmConfig(advantage="gae", kl="loss", beta=0.1)  # with a critic and a reference
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def model(kind: str, **sizes: Any) -> PreTrainedModel:
    """A small random model, the same on every rank."""
    more = EXPERTS if kind == "qwen3_moe" else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | {"tie_word_embeddings": kind == "llama"} | more | sizes))
    config.vocab_size -= kind == "qwen3"  # two ranks cannot share its rows
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def build(
    kind: str, rank: int = 0, ranks: int = 1, algorithm: AlgorithmConfig | None = None, **learner: Any
) -> TorchBackend:
    config = LearnerConfig(ranks=ranks, **(COMMON | {"max_grad_norm": 0.1} | learner))
    spec = BackendSpec(learner=config, algorithm=algorithm or AlgorithmConfig(), steps=STEPS)
    reference = model(kind) if spec.algorithm.needs_reference else None
    return TorchBackend(model(kind), spec, reference=reference, rank=rank, ranks=ranks)


def curve(trained: TorchBackend, steps: range) -> list[dict[str, float]]:
    shares, rank = trained.config.shares, trained.rank * trained.config.shares // trained.ranks
    given = batches(STEPS)
    return [trained.train_step(share(given[step], rank, shares)).metrics for step in steps]


def job(rank: int, ranks: int, cases: dict[str, tuple[str, AlgorithmConfig, dict[str, Any], int]], folder: Path) -> Any:
    """Of each case the curve, the weights in its midst, where it is saved, and at its end, and what is resumed."""
    found = {}
    for name, (kind, algorithm, settings, steps) in cases.items():
        trained, half = build(kind, rank, ranks, algorithm, **settings), steps // 2
        first = curve(trained, range(half))
        trained.save(folder / name)
        metrics = first + curve(trained, range(half, steps))
        again = build(kind, rank, ranks, algorithm, **settings)
        again.load(folder / name)
        found[name] = {"curve": metrics, "weights": weights(trained), "again": curve(again, range(half, steps))}
    return found


def written(folder: Path) -> list[tuple[int, int]]:
    """Of each tensor of a checkpoint's shards: numbers in the files of all ranks together, numbers that it has."""
    found: dict[str, list[int]] = {}

    def look(value: Any, path: str, file: Any) -> None:
        if isinstance(value, dict) and "spans" in value:
            part = found.setdefault(path, [0, math.prod(value["shape"])])
            part[0] += math.prod(file.get_slice(value["tensor"]).get_shape())
        elif isinstance(value, dict) and "tensor" in value and (shape := file.get_slice(value["tensor"]).get_shape()):
            found.setdefault(path, [0, math.prod(shape)])[0] += math.prod(shape)
        elif isinstance(value, dict) and "dict" in value:
            for key, item in value["dict"]:
                look(item, f"{path}/{key}", file)

    for name in folder.glob("*/rank-*.safetensors"):
        with safe_open(name, "pt") as file:
            look(json.loads(file.metadata()["state"]), "", file)
    return [(there, whole) for there, whole in found.values()]


def check(found: list[dict[str, Any]], cases: dict[str, Any], folder: Path) -> None:
    """Each case is one plain rank; and its checkpoint is read by one rank and goes on as the case did."""
    for name, (kind, algorithm, settings, steps) in cases.items():
        alone = build(kind, algorithm=algorithm)
        expected = curve(alone, range(steps))
        for rank in found:
            for metrics, wanted in zip(rank[name]["curve"], expected, strict=True):
                for key in ("loss", "grad_norm", "entropy"):
                    assert_close(metrics[key], wanted[key], atol=1e-4, rtol=1e-4, what=f"{name} {key}")
            for metrics, wanted in zip(rank[name]["again"], rank[name]["curve"][steps // 2 :], strict=True):
                assert_close(metrics["grad_norm"], wanted["grad_norm"], rtol=1e-6, what=f"{name} resumed as it was")
        published = found[0][name]["weights"]
        whole = weights(alone)
        assert published.keys() == whole.keys()
        for key, tensor in whole.items():
            assert_close(published[key], tensor, atol=1e-4, what=f"{name} {key}")
        staged = "pipeline_parallel_size" in settings  # a plain rank reads its checkpoint; its weights are in model/
        assert len(parts := written(folder / name)) >= (2 if staged else 3) * len(whole)  # both moments, and weights
        assert all(there == numbers for there, numbers in parts), f"{name}: parts are there twice, or missing"
        one = build(kind, algorithm=algorithm, sharding="none" if staged else "fsdp2")
        one.load(folder / name)
        for metrics, wanted in zip(curve(one, range(steps // 2, steps)), expected[steps // 2 :], strict=True):
            assert_close(metrics["grad_norm"], wanted["grad_norm"], atol=1e-4, rtol=1e-4, what=f"{name} resumed")
        for key, tensor in weights(one).items():
            assert_close(tensor, whole[key], atol=1e-4, what=f"{name} resumed {key}")


QUICK: dict[str, tuple[str, AlgorithmConfig, dict[str, Any], int]] = {
    "tensor, norms of heads, untied": ("qwen3", PPO, {"tensor_parallel_size": 2}, SHORT),
    "expert": ("qwen3_moe", AlgorithmConfig(), {"expert_parallel_size": 2}, SHORT),
    "copies": ("llama", AlgorithmConfig(), {"sharding": "fsdp2", "dp_replicate_size": 2}, SHORT),
}
TWO: dict[str, tuple[str, AlgorithmConfig, dict[str, Any], int]] = {
    "tensor": ("llama", AlgorithmConfig(), {"tensor_parallel_size": 2}, STEPS),
    "tensor, norms of heads, untied": ("qwen3", PPO, {"tensor_parallel_size": 2}, STEPS),
    "tensor of experts": ("qwen3_moe", AlgorithmConfig(), {"tensor_parallel_size": 2}, STEPS),
    "expert": ("qwen3_moe", AlgorithmConfig(), {"expert_parallel_size": 2}, STEPS),
    "expert, compiled": ("qwen3_moe", AlgorithmConfig(), {"expert_parallel_size": 2, "compile": True}, SHORT),
}


def test_a_few_steps_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    check(run_ranks(job, 2, 2, QUICK, tmp_path), QUICK, tmp_path)


SHARDED = {"sharding": "fsdp2"}
TENSOR = {"tensor_parallel_size": 2}
RING = SHARDED | {"context_parallel_size": 2}
MOVES = ((SHARDED, TENSOR), (TENSOR, RING), (RING, SHARDED))


def state(trained: TorchBackend) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    own = trained.updater._state()  # type: ignore[attr-defined]
    moments = {f"{name} {key}": t for name, found in own["optimizer"]["state"].items() for key, t in found.items()}
    whole = own["weights"] | moments
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in whole.items()}


def moved(rank: int, folder: Path) -> list[Any]:
    found = []
    for place, (here, there) in enumerate(MOVES):
        trained, other = build("llama", rank, 2, **here), build("llama", rank, 2, **there)
        curve(trained, range(3))
        trained.save(folder / str(place))
        other.load(folder / str(place))
        before, after = state(trained), state(other)
        exact = before.keys() == after.keys() and all(torch.equal(t, after[name]) for name, t in before.items())
        found.append((exact, len(before), curve(trained, range(3, 6)), curve(other, range(3, 6))))
    return found


@pytest.mark.thorough
def test_a_checkpoint_of_shards_goes_on_in_another_sharded_layout(tmp_path: Path) -> None:
    tensors = len(dict(model("llama").named_parameters()))
    for rank in run_ranks(moved, 2, tmp_path):
        for exact, count, expected, metrics in rank:
            assert exact and count >= 3 * tensors
            for wanted, given in zip(expected, metrics, strict=True):
                for key in ("loss", "grad_norm"):
                    assert_close(given[key], wanted[key], atol=1e-4, rtol=1e-4, what=key)


@pytest.mark.thorough
def test_two_ranks_of_one_model_are_one_rank(tmp_path: Path) -> None:
    check(run_ranks(job, 2, 2, TWO, tmp_path), TWO, tmp_path)


FOUR: dict[str, tuple[str, AlgorithmConfig, dict[str, Any], int]] = {
    "fsdp2 x tensor": ("llama", AlgorithmConfig(), {"tensor_parallel_size": 2, "sharding": "fsdp2"}, STEPS),
    "copies x tensor": ("qwen3", AlgorithmConfig(), {"tensor_parallel_size": 2}, STEPS),
    "hsdp": ("llama", AlgorithmConfig(), {"sharding": "fsdp2", "dp_replicate_size": 2}, STEPS),
    "fsdp2 x expert": ("qwen3_moe", AlgorithmConfig(), {"expert_parallel_size": 2, "sharding": "fsdp2"}, STEPS),
    "context x tensor": ("qwen3", PPO, {"context_parallel_size": 2, "tensor_parallel_size": 2}, STEPS),
    "context x expert": ("qwen3_moe", KL, {"context_parallel_size": 2, "expert_parallel_size": 2}, STEPS),
    "pipelines side by side": ("llama", KL, {"pipeline_parallel_size": 2}, STEPS),
    "pipeline x tensor": ("llama", AlgorithmConfig(), {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, STEPS),
    "pipeline x tensor, norms of heads, untied": (
        "qwen3",
        KL,
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        STEPS,
    ),
    "pipeline x expert": ("qwen3_moe", KL, {"pipeline_parallel_size": 2, "expert_parallel_size": 2}, STEPS),
    "expert x tensor": ("qwen3_moe", PPO, {"expert_parallel_size": 2, "tensor_parallel_size": 2}, STEPS),
}


QUICK_FOUR = {name: (*FOUR[name][:3], SHORT) for name in ("context x tensor", "pipeline x tensor")}


@pytest.mark.thorough
def test_a_few_steps_of_four_ranks_in_two_dimensions_are_those_of_one(tmp_path: Path) -> None:
    check(run_ranks(job, 4, 4, QUICK_FOUR, tmp_path), QUICK_FOUR, tmp_path)


@pytest.mark.thorough
def test_four_ranks_are_one_rank(tmp_path: Path) -> None:
    check(run_ranks(job, 4, 4, FOUR, tmp_path), FOUR, tmp_path)
