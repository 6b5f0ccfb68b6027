"""bfloat16 passes over float32 weights in every layout: the same steps as one rank's, wherever the weights are cast."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from tests.unit.learner.ranks import batches, build, curve, run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"sharding": "fsdp2"},
    "pipeline": {"pipeline_parallel_size": 2},
    "tensor parallel": {"tensor_parallel_size": 2},
    "ring": {"context_parallel_size": 2},
}
if importlib.util.find_spec("deepspeed"):
    LAYOUTS |= {f"zero{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in range(4)}
# With a reference, whose weights are cast too; no clip or mask, which a token may pass by rounding.
KL = AlgorithmConfig(kl="loss", beta=0.1, num_iterations=2, anchor="self", coef="one", correction="none")
HALF = {"mixed_precision": "bfloat16", "learning_rate": 0.0, "token_budget": 40}


def job(rank: int, ranks: int) -> dict[str, list[dict[str, float]]]:
    found = {}
    for name, settings in LAYOUTS.items():
        trained = build(rank, ranks, KL, **settings, **HALF)
        found[name] = curve(trained, batches(2), rank, ranks)
        assert "autocast" not in trained.note
    return found


@pytest.mark.thorough
def test_two_ranks_make_the_steps_of_one() -> None:
    alone = curve(build(algorithm=KL, **HALF), batches(2))
    exact = curve(build(algorithm=KL, **(HALF | {"mixed_precision": "none"})), batches(2))
    for rank in run_ranks(job, 2, 2):
        for name, steps in rank.items():
            for found, *others in zip(steps, alone, exact, strict=True):
                for metric, within in (("entropy", 0.01), ("grad_norm", 0.05), ("ref_kl", 0.5)):
                    for other in others:
                        apart = abs(found[metric] - other[metric])
                        assert apart <= within * abs(other[metric]) + 1e-4, (name, metric, found[metric], other[metric])
