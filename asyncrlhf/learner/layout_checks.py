"""Checks which layouts of the learner over its ranks can be combined."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asyncrlhf.validation import check

if TYPE_CHECKING:
    from asyncrlhf.learner.learner_config import LearnerConfig

# Sizes of groups of ranks that are given the same share of a batch.
PARALLEL = (
    "sequence_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size",
    "tensor_parallel_size",
)  # fmt: skip


def check_layout(config: LearnerConfig) -> None:
    """Raise ConfigError for sizes that do not fit the ranks or each other."""
    _check_pipeline(config)
    _check_mesh(config)
    if config.packing is False:
        check_whole_sequences(config, "learner.packing=false")


def check_whole_sequences(config: LearnerConfig, why: str) -> None:
    """Raise ConfigError for settings that need packed sequences. ``why`` the run has none, as a part of a sentence."""
    for key in PARALLEL:
        size = getattr(config, key)
        check(
            size == 1,
            f"learner.{key}={size} needs packed sequences, but they pass this model one at a time ({why}); "
            f"allowed: {key}=1, or learner.sharding=fsdp2 or learner.zero_stage=3 for a model of this size.",
        )
    check(
        not config.routing_replay,
        f"learner.routing_replay needs packed sequences, but they pass this model one at a time ({why}); "
        "allowed: false.",
    )


def _check_pipeline(config: LearnerConfig) -> None:
    size = config.pipeline_parallel_size
    others = {
        "backend": "torch", "sharding": "none", "sequence_parallel_size": 1, "context_parallel_size": 1,
        "compile": False, "optim": "adamw",
    }  # fmt: skip
    for key, allowed in others.items() if size > 1 else ():
        value = getattr(config, key)
        check(
            value == allowed,
            f"learner.{key}={value} does not work with learner.pipeline_parallel_size={size}; "
            f"allowed: {key}={allowed}.",
        )
    check(
        size == 1 or config.mixed_precision != "float16",
        f"learner.mixed_precision=float16 does not work with learner.pipeline_parallel_size={size}; "
        "allowed: none, bfloat16.",
    )


def _check_mesh(config: LearnerConfig) -> None:
    for key in PARALLEL:
        size = getattr(config, key)
        check(
            config.ranks % size == 0,
            f"learner.{key}={size} does not divide learner.ranks={config.ranks}; "
            "so many ranks at a time take one share of the batch.",
        )
    together = math.prod(getattr(config, key) for key in PARALLEL)
    check(
        config.ranks % together == 0,
        f"learner.ranks={config.ranks} is not a multiple of {together}, the product of {config.dealt_out}: "
        "so many ranks at a time take one share of the batch.",
    )
    check(
        config.sharding == "fsdp2" or config.dp_replicate_size == 1,
        f"learner.dp_replicate_size={config.dp_replicate_size} needs learner.sharding=fsdp2; without sharding each "
        "of the ranks' groups holds a copy.",
    )
    check(
        config.copies % config.dp_replicate_size == 0,
        f"learner.dp_replicate_size={config.dp_replicate_size} does not divide the {config.copies} ranks over which "
        f"learner.ranks={config.ranks} deal out the tokens of a batch.",
    )
