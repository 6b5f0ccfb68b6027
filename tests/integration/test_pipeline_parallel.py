"""Ranks that have a run of the layers each: the curve, the weights and the checkpoint of one plain rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.model.pipeline import one_forward_one_backward
from asyncrlhf.learner.ranks import Peers
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from tests.numeric import assert_close
from tests.truncated import with_sets
from tests.unit.learner.ranks import assert_curve, batches, build, curve, run_ranks, weights
from tests.unit.learner.worlds import VOCABULARY

SAVED_AFTER = 6
CASES: dict[str, tuple[AlgorithmConfig, dict[str, Any]]] = {
    "kl": (AlgorithmConfig(kl="loss", beta=0.1, num_iterations=2, entropy_coef=0.01), {"gradient_checkpointing": True}),
    "vcpo": (load_config(["algorithm=vcpo"]).algorithm, {"weight_decay": 0.1}),
}
PROBE = [np.array([1, 2, 3, 4]), np.array([5, 6])]


def short() -> list[Any]:
    plain, *others = batches(3)
    return [plain, *(with_sets(batch, VOCABULARY) for batch in others)]


def job(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    settings, given = {"pipeline_parallel_size": ranks}, batches()
    trained = build(rank, ranks, **settings)
    found: dict[str, Any] = {"own": sum(parameter.numel() for parameter in trained.model.parameters())}
    found["curve"] = curve(trained, given[:SAVED_AFTER], rank, ranks)
    trained.make_room()
    trained.save(folder)
    found["saved"] = weights(trained)
    found["curve"] += curve(trained, given[SAVED_AFTER:], rank, ranks)
    found["weights"], found["scores"] = weights(trained), trained.score(PROBE)
    resumed = build(rank, ranks, **settings)
    curve(resumed, given[:1], rank, ranks)
    resumed.load(folder)
    found["resumed"] = curve(resumed, given[SAVED_AFTER:], rank, ranks)
    for name, (algorithm, more) in CASES.items():
        found[name] = curve(build(rank, ranks, algorithm, **settings, **more), short(), rank, ranks)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_make_the_curve_the_weights_and_the_checkpoint_of_one_rank(ranks: int, tmp_path: Path) -> None:
    alone = build()
    expected = curve(alone, batches())
    stages = run_ranks(job, ranks, ranks, tmp_path)
    for rank in stages:
        assert_curve(rank["curve"], expected)
        assert_curve(rank["resumed"], rank["curve"][SAVED_AFTER:], rtol=1e-6, atol=1e-7)
        for found, wanted in zip(rank["scores"], alone.score(PROBE), strict=True):
            assert_close(found, wanted, atol=1e-4)
    whole = weights(alone)
    assert [*stages[0]["weights"]] == [*whole] and not any(rank["weights"] for rank in stages[1:])
    assert_close(stages[0]["weights"], whole, atol=1e-4)
    size = sum(tensor.size for tensor in whole.values())
    assert sum(rank["own"] for rank in stages) == size + whole["model.embed_tokens.weight"].size  # tied: there twice
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert exported.keys() == whole.keys()
    for key, tensor in exported.items():
        assert np.array_equal(tensor.detach().numpy(), stages[0]["saved"][key]), key
    resumed = build()  # in another layout: one rank that has all layers
    resumed.load(tmp_path)
    assert_curve(curve(resumed, batches()[SAVED_AFTER:]), expected[SAVED_AFTER:])
    for name, (algorithm, more) in CASES.items():
        expected = curve(build(algorithm=algorithm, **more), short())
        for rank in stages:
            assert_curve(rank[name], expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(("stage", "ahead"), [(0, 3), (1, 2), (2, 1)])
def test_a_stage_begins_as_many_as_keep_those_behind_it_at_work(stage: int, ahead: int) -> None:
    begun: list[Any] = []
    recorder: Any = SimpleNamespace(peers=Peers(stage, 3), begin=begun.append)
    given: list[Any] = [object() for _ in range(5)]
    for place in one_forward_one_backward(recorder, given):
        assert begun == given[: place + ahead]
    assert list(one_forward_one_backward(recorder, [])) == [] and len(begun) == 5


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ranks": 3}, r"learner\.pipeline_parallel_size=2 does not divide learner\.ranks=3"),
        ({"ranks": 2, "sharding": "fsdp2"}, r"learner\.sharding=fsdp2 does not work with .* allowed: sharding=none"),
        ({"ranks": 2, "context_parallel_size": 2}, r"learner\.context_parallel_size=2 does not work with"),
        ({"ranks": 2, "compile": True}, r"learner\.compile=True does not work with"),
        ({"ranks": 2, "mixed_precision": "float16"}, r"mixed_precision=float16 does not work with .* bfloat16"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LearnerConfig(pipeline_parallel_size=2, **settings)


@pytest.mark.parametrize("override", ["algorithm=ppo", "algorithm=impact", "model.lora.r=4"])
def test_what_goes_with_the_whole_policy_is_refused(override: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"pipeline_parallel_size=2 does not work with (a critic|algo)|lora\.r=4 does not work with .*pipeline",
    ):
        load_config(["learner.ranks=2", "learner.pipeline_parallel_size=2", override])
