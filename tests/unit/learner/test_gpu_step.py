"""What a learner's step asks of a GPU: launches, waits of the host, casts, bytes. See ``tests/pretended_gpu.py``.

The counts are those of now. Who lowers one lowers its limit here and the row of docs/performance.md; a count that rises
by a tenth fails.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from asyncrlhf.bench.checkpoint import SHAPES, batch, build
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner import rank_models
from asyncrlhf.learner.model import activations, forward
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from tests.pretended_gpu import Counts, learner_on_gpu
from tests.unit.learner.worlds import backend

TOKENS = 4096


@cache
def counted(sequences: int = 8, precision: str = "bfloat16", budget: int = TOKENS) -> Counts:
    """Of a step of two layers of SmolLM2-135M's, after one that allocates what stays."""
    with torch.device("meta"):
        model = build("135m, two layers")
    given = batch("135m, two layers", TOKENS, sequences)
    config = LearnerConfig(token_budget=budget, gpus=1, mixed_precision=precision)
    with learner_on_gpu([model], AlgorithmConfig(), config) as (gpu, trained):
        trained.train_step(given)
        counts = gpu.fresh()
        trained.train_step(given)
    return counts


@pytest.fixture(autouse=True)
def shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "135m, two layers", (576, 2, *SHAPES["135m"][2:]))


# precision: launches, GB moved by elementwise operations, peak GB
NOW = {"bfloat16": (524, 14.7, 2.12), "none": (471, 16.1, 2.45)}


@pytest.mark.parametrize("precision", NOW)
def test_no_count_of_a_step_has_risen(precision: str) -> None:
    counts = counted(8, precision)
    found = (counts.launched, counts.bytes["elementwise"] / 1e9, counts.peak / 1e9)
    assert all(0.9 * limit <= count <= 1.1 * limit for count, limit in zip(found, NOW[precision], strict=True)), found
    assert counts.waits == 1, counts.syncs


@pytest.mark.parametrize("precision", NOW)
def test_launches_do_not_grow_with_the_number_of_sequences(precision: str) -> None:
    few, many = (counted(size, precision).launched for size in (8, 64))
    assert abs(many - few) <= 0.05 * few


def test_weights_are_cast_once_an_update_not_once_a_microbatch() -> None:
    """What a microbatch more costs in casts are the norms' and its gradients on their way to the float32 weights."""
    one, four = (counted(budget=budget) for budget in (TOKENS, TOKENS // 4))
    with torch.device("meta"):
        parameters = len(list(build("135m, two layers").parameters()))
    norms = 4 * 5 + 2  # to float32 and back, forward and backward; the last one's input is a hidden state of each
    assert four.casts - one.casts <= 3 * (parameters + norms + 20)
    assert one.casts >= 2 * parameters


@pytest.mark.in_turn
@pytest.mark.parametrize(("gigabytes", "repeated"), [(9.0, 0), (4.5, 1), (3.2, 4)])
@pytest.mark.more_but(every=2)
def test_layers_are_repeated_as_the_free_memory_asks_for(
    gigabytes: float, repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight layers and a small vocabulary, so that most of a pass's memory is theirs."""
    monkeypatch.setitem(SHAPES, "eight layers", (576, 8, 1536, 9, 3, 4096))
    monkeypatch.setattr(rank_models, "free_bytes", lambda _: gigabytes * 1e9)
    monkeypatch.setattr(activations, "MAX_LOGITS", 2**24)
    monkeypatch.setattr(forward, "MAX_LOGITS", 2**24)
    with torch.device("meta"):
        model = build("eight layers")
    config = LearnerConfig(token_budget=16384, gpus=1, mixed_precision="bfloat16", gradient_checkpointing=None)
    with learner_on_gpu([model], AlgorithmConfig(), config) as (gpu, trained):
        weights = 4 * sum(parameter.numel() for parameter in model.parameters())
        found = sum(layer.gradient_checkpointing for layer in model.model.layers)
        for _ in range(2):
            trained.train_step(batch("eight layers", 16384, 32))
    assert abs(found - repeated) <= 1 and (f"{found} of 8 layers" in trained.note) == bool(found), found
    assert gpu.counts.peak - weights <= gigabytes * 1e9


def test_without_a_gpu_nothing_is_repeated() -> None:
    trained = backend(learner=LearnerConfig(gradient_checkpointing=None))
    assert not any(layer.gradient_checkpointing for layer in trained.model.model.layers) and not trained.note


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"sharding": "fsdp2"}, "learner.sharding=fsdp2"),
        ({"context_parallel_size": 2}, "learner.context_parallel_size=2"),
    ],
)
def test_ranks_that_must_repeat_the_same_layers_are_refused(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"gradient_checkpointing=null does not work with ranks .*\({said}\)"):
        LearnerConfig(gradient_checkpointing=None, ranks=2, **layout)
