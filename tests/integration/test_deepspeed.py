"""Two DeepSpeed ranks against one of plain torch, at every ZeRO stage: the same curve, also after a resume."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.learner.model import forward
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from tests.numeric import assert_close
from tests.unit.learner.ranks import assert_curve, batches, build, curve, run_ranks, skips, weights

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

SAVED_AFTER = 6
STAGES = (0, 1, 2, 3)
PPO = AlgorithmConfig(advantage="gae", whiten=True, kl="loss", beta=0.1, num_iterations=2)
M2PO = load_config(["algorithm=m2po"]).algorithm
IMPACT = load_config(["algorithm=impact"]).algorithm
# More than one update a step, a critic and a reference; targets that look ahead over all ranks; a slow target network;
# weights on the host; activations computed again.
SHORT: dict[str, tuple[AlgorithmConfig, dict[str, Any]]] = {
    "ppo, zero 1": (PPO, {"zero_stage": 1}),
    "ppo, zero 3": (PPO, {"zero_stage": 3}),
    "m2po, zero 3": (M2PO, {"zero_stage": 3}),
    "impact, zero 3": (IMPACT, {"zero_stage": 3}),
    "zero 2, optimizer on the host": (AlgorithmConfig(), {"zero_stage": 2, "zero_offload": "cpu"}),
    "zero 3, all on the host": (
        AlgorithmConfig(),
        {"zero_stage": 3, "zero_offload": "cpu_params", "gradient_checkpointing": True},
    ),
    "zero 3, logits of five tokens at a time": (AlgorithmConfig(), {"zero_stage": 3}),
}
SHORT_STEPS = 3


def train(rank: int, folder: Path, stage: int) -> dict[str, Any]:
    trained, given = build(rank, 2, backend="deepspeed", zero_stage=stage), batches()
    first = curve(trained, given[:SAVED_AFTER], rank, 2)
    trained.save(folder)
    saved = weights(trained)
    rest = curve(trained, given[SAVED_AFTER:], rank, 2)
    scores = trained.score([np.array([1, 2, 3, 4]), np.array([5, 6])])
    resumed = build(rank, 2, backend="deepspeed", zero_stage=stage)
    curve(resumed, given[:1], rank, 2)
    resumed.load(folder)
    again = curve(resumed, given[SAVED_AFTER:], rank, 2)
    found = {"curve": first + rest, "resumed": again, "saved": saved, "scores": scores}
    return found | {"skips": skips(trained, rank)}


def job(rank: int, folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {stage: train(rank, folder / str(stage), stage) for stage in STAGES}
    for name, (algorithm, settings) in SHORT.items():
        forward.MAX_LOGITS = 5 * 19 if "five tokens" in name else 2**27
        trained = build(rank, 2, algorithm, backend="deepspeed", **settings)
        found[name] = curve(trained, batches(SHORT_STEPS), rank, 2)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[Any, Any]]:
    """What each of two processes found, for every case."""
    return run_ranks(job, 2, folder)


@pytest.fixture(scope="module")
def alone() -> list[dict[str, float]]:
    """The curve of one rank of plain torch."""
    return curve(build(), batches())


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_make_the_curve_of_one_plain_rank(
    two_ranks: list[dict[Any, Any]], alone: list[dict[str, float]], folder: Path, stage: int
) -> None:
    """Also after a resume; the export is what was published; and the ranks score alike and skip together."""
    for rank in two_ranks:
        assert_curve(rank[stage]["curve"], alone)
        assert [row["learning_rate"] for row in rank[stage]["curve"]] == [row["learning_rate"] for row in alone]
        assert_curve(rank[stage]["resumed"], rank[stage]["curve"][SAVED_AFTER:], rtol=1e-6, atol=1e-7)
        assert rank[stage]["skips"]
    exported = dict(AutoModelForCausalLM.from_pretrained(folder / str(stage) / "model").named_parameters())
    published = two_ranks[0][stage]["saved"]
    assert exported.keys() == published.keys()
    for key, tensor in exported.items():
        assert np.array_equal(tensor.detach().numpy(), published[key]), key
    assert bool(two_ranks[1][stage]["saved"]) == (stage < 3), "only rank 0 holds weights that are sharded"
    for first, second in zip(*(rank[stage]["scores"] for rank in two_ranks), strict=True):
        assert np.array_equal(first, second) and np.isfinite(first).all()


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("name", SHORT)
def test_other_algorithms_and_places_too(two_ranks: list[dict[Any, Any]], name: str) -> None:
    expected = curve(build(algorithm=SHORT[name][0]), batches(SHORT_STEPS))
    for rank in two_ranks:
        assert_curve(rank[name], expected, rtol=2e-3, atol=2e-4)


@pytest.mark.in_turn
@pytest.mark.more
def test_shards_of_other_ranks_or_another_layout_are_refused(two_ranks: list[dict[Any, Any]], folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"those of learner\.ranks=2; they cannot be read with learner\.ranks=1"):
        build(backend="deepspeed", zero_stage=2).load(folder / "2")
    with pytest.raises(CheckpointError, match=r"one of learner\.backend=deepspeed learner\.zero_stage=2, not learner"):
        build().load(folder / "2")


@pytest.mark.in_turn
@pytest.mark.parametrize("stage", [s if s in (0, 3) else pytest.param(s, marks=pytest.mark.thorough) for s in STAGES])
@pytest.mark.more_but("0")
def test_bfloat16_keeps_float32_masters_and_comes_close(stage: int) -> None:
    options = {"learning_rate": 1e-5, "lr_schedule": "constant", "max_grad_norm": 0.0, "token_budget": 40}
    exact = curve(build(**options), batches(1))[0]
    mixed = build(backend="deepspeed", zero_stage=stage, mixed_precision="bfloat16", **options)
    before = weights(mixed)
    found = curve(mixed, batches(1))[0]
    assert_close(found["grad_norm"], exact["grad_norm"], rtol=0.05)
    assert_close(found["entropy"], exact["entropy"], rtol=0.02)
    curve(mixed, batches(1) * 15)
    # Each of these updates is too small for bfloat16; they add up in the masters.
    moved = max(np.abs(tensor - before[name]).max() for name, tensor in weights(mixed).items())
    assert moved > 1e-4
    broken, kept = batches(1)[0], weights(mixed)
    broken.rewards[:] = np.nan
    assert mixed.train_step(broken).skipped
    assert all(np.array_equal(tensor, kept[name]) for name, tensor in weights(mixed).items())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"zero_stage": 2}, r"learner\.zero_stage=2 needs learner\.backend=deepspeed, not torch"),
        ({"zero_offload": "cpu"}, r"learner\.zero_offload=cpu needs learner\.backend=deepspeed"),
        ({"backend": "deepspeed", "zero_stage": 4}, r"learner\.zero_stage=4 is out of range"),
        ({"backend": "deepspeed", "zero_offload": "nvme"}, r"learner\.zero_offload=nvme is not known.*none, cpu"),
        ({"backend": "deepspeed", "zero_offload": "cpu"}, r"needs learner\.zero_stage of at least 1, not 0"),
        ({"backend": "deepspeed", "zero_offload": "cpu_params", "zero_stage": 2}, "of at least 3, not 2"),
        ({"backend": "deepspeed", "mixed_precision": "float16"}, "allowed with deepspeed: none, bfloat16"),
        ({"backend": "deepspeed", "sharding": "fsdp2"}, r"learner\.sharding=fsdp2 needs learner\.backend=torch"),
        ({"backend": "deepspeed", "zero_stage": 3, "compile": True}, r"compile does not work with .*zero_stage=3"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LearnerConfig(**settings)


@pytest.mark.parametrize(
    ("group", "layout"),
    [
        ("torch", "learner.backend=torch"),
        ("deepspeed", "learner.backend=deepspeed learner.zero_stage=2"),
        ("zero3", "learner.backend=deepspeed learner.zero_stage=3"),
        ("fsdp2", "learner.sharding=fsdp2"),
    ],
)
def test_the_groups_of_conf_name_their_layouts(group: str, layout: str) -> None:
    assert load_config([f"learner={group}"]).learner.layout == layout


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package deepspeed, which is not installed"):
        LearnerConfig(backend="deepspeed")
