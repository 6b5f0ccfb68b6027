"""The sizes of the ranks' mesh, what is refused of it, and where parts of one tensor meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.model.tensor_parallel import deal_out_model
from asyncrlhf.learner.ranks import overlaps
from asyncrlhf.learner.settings.learner_config import LearnerConfig


class Sizes:
    """Of a mesh without ranks."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = {"tensor": 1, "expert": 1} | sizes


def test_a_share_of_the_batch_goes_to_all_ranks_that_hold_parts_of_one_model() -> None:
    plain = LearnerConfig(ranks=8, tensor_parallel_size=2)
    assert plain.shares == 4 and plain.sharded and plain.mesh["replicate"] == 4 and plain.mesh["shard"] == 1
    hybrid = LearnerConfig(ranks=16, sharding="fsdp2", dp_replicate_size=2, tensor_parallel_size=2)
    assert hybrid.shares == 8 and list(hybrid.mesh.values()) == [2, 4, 1, 1, 2]
    both = LearnerConfig(ranks=8, sharding="fsdp2", tensor_parallel_size=2, expert_parallel_size=2)
    assert both.shares == both.mesh["shard"] == 2
    assert LearnerConfig(ranks=4).shares == 4 and not LearnerConfig(ranks=4).sharded


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size=2 does not divide learner\.ranks=1"),
        ({"ranks": 6, "tensor_parallel_size": 2, "expert_parallel_size": 6}, r"ranks=6 is not a multiple of 12"),
        ({"ranks": 2, "tensor_parallel_size": 2, "backend": "deepspeed"}, r"size=2 needs learner\.backend=torch"),
        ({"ranks": 4, "dp_replicate_size": 2}, r"dp_replicate_size=2 needs learner\.sharding=fsdp2"),
        (
            {"ranks": 4, "sharding": "fsdp2", "dp_replicate_size": 4, "tensor_parallel_size": 2},
            r"dp_replicate_size=4 does not divide the 2 ranks",
        ),
        ({"ranks": 2, "tensor_parallel_size": 2, "optim": "muon"}, r"muon does not work with .*tensor_parallel_size=2"),
        ({"ranks": 2, "tensor_parallel_size": 2, "mixed_precision": "float16"}, r"float16 needs .* no tensor or exper"),
    ],
)
def test_what_no_mesh_can_be_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LearnerConfig(**settings)


@pytest.mark.parametrize(
    ("kind", "sizes", "sentence"),
    [
        (
            "llama",
            {"tensor": 3},
            r"tensor_parallel_size=3 cannot deal out this model's 4 attention heads and 2 key",
        ),
        (
            "llama",
            {"tensor": 4},
            r"tensor_parallel_size=4 cannot deal out this model's 4 attention heads and 2 key",
        ),
        ("llama", {"expert": 2}, r"no expert-parallel plan for a model of the kind llama"),
        ("gpt2", {"tensor": 2}, r"no tensor-parallel plan for a model of the kind gpt2"),
    ],
)
def test_a_model_that_cannot_be_dealt_out_is_refused(kind: str, sizes: dict[str, int], sentence: str) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 16}
    config = AutoConfig.for_model(kind, **small, **({"num_key_value_heads": 2} if kind == "llama" else {}))
    with pytest.raises(ConfigError, match=sentence):
        deal_out_model(AutoModelForCausalLM.from_config(config), Sizes(**sizes))  # type: ignore[arg-type]


def test_what_two_parts_have_in_common_is_found_in_both() -> None:
    whole = np.arange(6 * 8).reshape(6, 8)
    own = [[[2, 5]], [[0, 2], [4, 6]]]  # rows 2 to 4, columns 0, 1, 4 and 5
    other = [[[0, 3]], [[1, 5]]]

    def part(spans: list[list[list[int]]]) -> np.ndarray:
        rows, columns = ([i for first, last in runs for i in range(first, last)] for runs in spans)
        return whole[np.ix_(rows, columns)]

    found = [(part(own)[here], part(other)[there]) for here, there in overlaps(own, other)]
    assert all(np.array_equal(here, there) for here, there in found)
    assert sorted(int(number) for here, _ in found for number in here.flat) == [17, 20]
