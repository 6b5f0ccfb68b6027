"""Weights read shard by shard: the model that transformers loads, the same training, and no tensor read twice."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteConfig

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.ranks import barrier
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.state.state_file import read_parts
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.models.pretrained import load_blank, load_model
from asyncrlhf.models.weight_files import WeightFiles
from asyncrlhf.types import TrainBatch
from tests.unit.learner.ranks import run_ranks
from tests.unit.learner.worlds import SIZES, from_config, llama, random_batch, share

FSDP2: dict[str, Any] = {"sharding": "fsdp2"}
ZERO3: dict[str, Any] = {"backend": "deepspeed", "zero_stage": 3}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
PPO = AlgorithmConfig(advantage="gae", kl="loss", beta=0.1)  # with a critic and a reference
STEPS = 5


def saved(folder: Path, **sizes: Any) -> ModelConfig:
    llama(**sizes).save_pretrained(folder, max_shard_size="20KB")  # in several files
    return ModelConfig(path=str(folder))


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many numbers each read of a file gave meanwhile."""
    read, whole = list[int](), WeightFiles.rows

    def rows(files: WeightFiles, name: str, first: int, last: int, *columns: slice) -> torch.Tensor:
        found = whole(files, name, first, last, *columns)
        read.append(found.numel())
        return found

    WeightFiles.rows = rows  # type: ignore[method-assign]
    try:
        yield read
    finally:
        WeightFiles.rows = whole  # type: ignore[method-assign]


def trained(
    config: ModelConfig,
    blank: bool,
    rank: int = 0,
    ranks: int = 1,
    layout: dict[str, Any] = FSDP2,
    algorithm: AlgorithmConfig | None = None,
) -> dict[str, Any]:
    """What five steps give, and how many numbers were read from files."""
    options: dict[str, Any] = {"rank": rank, "ranks": ranks}
    if blank:
        (model, files), (reference, _) = (load_blank(config, torch.float32) or pytest.fail() for _ in range(2))
        options["files"] = files
    else:
        model, reference = (load_model(config, dtype=torch.float32) for _ in range(2))
    learner = LearnerConfig(learning_rate=1e-2, token_budget=40, ranks=ranks, **layout)
    spec = BackendSpec(learner=learner, algorithm=algorithm or PPO, steps=STEPS)
    with counted() as read:
        backend = TorchBackend(model, spec, reference=reference, **options)
    first = {name: tensor.clone() for name, tensor in backend.parameters().items()}
    part, parts = rank * learner.shares // ranks, learner.shares
    steps = [backend.train_step(share(random_batch(seed=seed), part, parts)).metrics for seed in range(STEPS)]
    return {"first": first, "steps": steps, "last": dict(backend.parameters()), "read": sum(read)}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["steps"] == other["steps"]
    for part in ("first", "last"):
        assert one[part].keys() == other[part].keys()
        assert all(torch.equal(tensor, other[part][name]) for name, tensor in one[part].items())


@pytest.mark.in_turn
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.more_but(every=2)
def test_shards_read_from_files_train_as_the_model_loaded_whole(tied: bool, tmp_path: Path) -> None:
    config = saved(tmp_path, tie_word_embeddings=tied)
    model = load_model(config)
    found = trained(config, blank=True)
    same(found, trained(config, blank=False))
    assert all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in found["first"].items())


def job(rank: int, config: ModelConfig, layout: dict[str, Any], algorithm: AlgorithmConfig | None = None) -> int:
    found = trained(config, True, rank, 2, layout, algorithm)
    same(found, trained(config, False, rank, 2, layout, algorithm))
    return int(found["read"])


@pytest.mark.thorough
def test_two_ranks_read_half_of_it_each(tmp_path: Path) -> None:
    config = saved(tmp_path)
    read = run_ranks(job, 2, config, FSDP2)
    assert sum(read) == numbers(config)
    assert abs(read[0] - read[1]) < 0.1 * sum(read)


@pytest.mark.in_turn
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.more
def test_a_stage_reads_its_own_layers_and_a_tied_table_at_both_ends(tied: bool, tmp_path: Path) -> None:
    config = saved(tmp_path, tie_word_embeddings=tied)
    read = run_ranks(job, 2, config, {"pipeline_parallel_size": 2}, AlgorithmConfig(kl="loss", beta=0.1))
    model = load_model(config)
    table, every = model.get_input_embeddings().weight.numel(), sum(p.numel() for p in model.parameters())
    assert sum(read) == 2 * (every + tied * table)  # of a policy and a reference
    assert all(count < 1.2 * (every + tied * table) for count in read)


def resumed(rank: int, config: ModelConfig, folder: Path) -> int:
    """Whether a stage goes on from its checkpoint as it did; how many numbers of weights it read for that."""
    given = [random_batch(seed=seed) for seed in range(4)]

    def build() -> TorchBackend:
        model, files = load_blank(config, torch.float32) or pytest.fail()
        learner = LearnerConfig(learning_rate=1e-2, token_budget=40, ranks=2, pipeline_parallel_size=2)
        spec = BackendSpec(learner=learner, algorithm=AlgorithmConfig(), steps=len(given))
        return TorchBackend(model, spec, rank=rank, ranks=2, files=files)

    def curve(backend: TorchBackend, batches: list[TrainBatch]) -> list[float]:
        return [backend.train_step(batch).metrics["grad_norm"] for batch in batches]

    first = build()
    curve(first, given[:2])
    first.save(folder)
    wanted, again = curve(first, given[2:]), build()
    with counted() as read:
        again.load(folder)
    assert curve(again, given[2:]) == wanted
    return sum(read)


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_resumes_from_its_own_layers(tied: bool, tmp_path: Path) -> None:
    config = saved(tmp_path, tie_word_embeddings=tied)
    read = run_ranks(resumed, 2, config, folder := tmp_path / "checkpoint")
    model = load_model(config)
    table, every = model.get_input_embeddings().weight.numel(), sum(p.numel() for p in model.parameters())
    assert sum(read) == every + tied * table and max(read) < 0.6 * (every + tied * table)
    sizes = [file.stat().st_size for file in (folder / "pipeline").iterdir()]
    assert len(sizes) == 2 and max(sizes) < 0.7 * sum(sizes) and sum(sizes) > 8 * every, "both moments of each weight"
    assert (folder / "trainer.safetensors").stat().st_size < 4 * every, "rank 0 wrote moments"


def damaged(rank: int, config: ModelConfig, folder: Path) -> str:
    model, files = load_blank(config, torch.float32) or pytest.fail()
    learner = LearnerConfig(ranks=2, token_budget=40, pipeline_parallel_size=2)
    spec = BackendSpec(learner=learner, algorithm=AlgorithmConfig(), steps=2)
    backend = TorchBackend(model, spec, rank=rank, ranks=2, files=files)
    backend.train_step(random_batch(seed=0))
    backend.save(folder)
    backend.writer.end()
    barrier(2)
    if rank == 0:
        target = folder / "model" / "model.safetensors"
        tensors = load_file(target)
        del tensors["model.norm.weight"]
        save_file(tensors, target, {"format": "pt"})
    barrier(2)
    try:
        backend.load(folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_stages_refuse_a_checkpoint_that_lacks_a_weight(tmp_path: Path) -> None:
    for said in run_ranks(damaged, 2, saved(tmp_path), tmp_path / "checkpoint"):
        assert "model.norm.weight is in one of the two alone" in said


def test_parts_of_states_are_joined_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    for rank, spans in enumerate(([[0, 1], [3, 4]], [[1, 3]])):
        rows = torch.cat([whole[first:last] for first, last in spans])
        plain = {"tensor": "0", "spans": [spans, [[0, 3]]], "shape": [4, 3]}
        state = {"dict": [["weight", {"dict": [["exp_avg", plain], ["step", 2.0]]}]]}
        save_file({"0": rows}, tmp_path / f"rank-{rank}.safetensors", {"state": json.dumps(state)})
    files = sorted(tmp_path.iterdir())
    found = read_parts(files, ["weight", "another"])
    assert found.keys() == {"weight"} and found["weight"]["step"] == 2.0
    assert torch.equal(found["weight"]["exp_avg"], whole)
    with pytest.raises(CheckpointError, match="6 of a tensor's 12 numbers"):
        read_parts(files[1:], ["weight"])


def numbers(config: ModelConfig) -> int:
    """Of a policy, a reference and a critic."""
    model = load_model(config)
    policy, trunk = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.model.parameters())
    return 2 * policy + trunk


@pytest.mark.in_turn
@needs_deepspeed
@pytest.mark.more
@pytest.mark.parametrize("mixed_precision", ["none", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_zero_3_reads_each_tensor_once_and_trains_as_the_model_loaded_whole(
    mixed_precision: str, tmp_path: Path
) -> None:
    config = saved(tmp_path, tie_word_embeddings=mixed_precision == "none")
    layout = ZERO3 | {"mixed_precision": mixed_precision}
    assert run_ranks(job, 2, config, layout) == [numbers(config), 0]  # rank 0 deals them out


def holds(rank: int, config: ModelConfig) -> float:
    """The most numbers of parameters that were whole at a time while ZeRO-3 cut up a model, over its largest's."""
    from deepspeed.runtime.zero.partition_parameters import Init

    cut, most = Init._zero_init_param, [0]
    model, files = load_blank(config, torch.float32) or pytest.fail()

    def looked(self: Any, parameter: torch.nn.Parameter) -> None:
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() // 4 for p in model.parameters()}
        most[0] = max(most[0], sum(held.values()))
        cut(self, parameter)

    Init._zero_init_param = looked  # type: ignore[method-assign]
    try:
        learner = LearnerConfig(ranks=2, **ZERO3)
        spec = BackendSpec(learner=learner, algorithm=AlgorithmConfig(), steps=STEPS)
        largest, count = max(p.numel() for p in model.parameters()), sum(1 for _ in model.parameters())
        TorchBackend(model, spec, files=files, rank=rank, ranks=2)
    finally:
        Init._zero_init_param = cut  # type: ignore[method-assign]
    return (most[0] - count) / largest


@pytest.mark.in_turn
@needs_deepspeed
@pytest.mark.more
def test_zero_3_holds_one_whole_tensor_at_a_time(tmp_path: Path) -> None:
    assert max(run_ranks(holds, 2, saved(tmp_path))) <= 1.0


def test_buffers_and_ties_are_those_of_a_model_that_was_loaded(tmp_path: Path) -> None:
    config = saved(tmp_path)
    blank, files = load_blank(config, torch.bfloat16) or pytest.fail()
    model = load_model(config)
    assert all(parameter.is_meta for parameter in blank.parameters())
    assert {parameter.dtype for parameter in blank.parameters()} == {torch.bfloat16}
    buffers = dict(blank.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert blank.get_output_embeddings().weight is blank.get_input_embeddings().weight
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(files.rows(name, 3, 9), model.get_parameter(name)[3:9])


def test_a_checkpoint_that_is_not_the_model_tensor_by_tensor_is_left_to_transformers(tmp_path: Path) -> None:
    llama().model.save_pretrained(tmp_path / "trunk")
    assert load_blank(ModelConfig(path=str(tmp_path / "trunk")), torch.float32) is None
    keywords = {"attention_dropout": 0.1}
    config = saved(tmp_path / "model")
    assert load_blank(ModelConfig(path=config.path, model_init_kwargs=keywords), torch.float32) is None


def test_whether_logits_are_the_output_layers_is_told_without_weights(tmp_path: Path) -> None:
    from_config(GraniteConfig(**SIZES, logits_scaling=3.0)).save_pretrained(tmp_path / "scaled")
    for config, plain in ((saved(tmp_path / "plain"), True), (ModelConfig(path=str(tmp_path / "scaled")), False)):
        blank, _ = load_blank(config, torch.float32) or pytest.fail()
        assert PackedPolicy(blank)._plain_head is plain
