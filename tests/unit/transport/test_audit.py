"""The audit: figures against closed forms, verdicts with names and figures, and the tensor that differs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.audit import (
    AuditResult,
    compare,
    differing_tensors,
    judge,
    probe_tokens,
    tensor_digests,
)
from asyncrlhf.transport.weights_config import Tolerance, choose_tolerance
from tests.numeric import assert_close


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_figures_match_the_definitions() -> None:
    learner = [floats(-1.0, -2.0), floats(-0.5)]
    engine = [floats(-1.5, -2.0), floats(-0.25)]
    result = compare(learner, engine)
    k3 = [math.exp(d) - 1 - d for d in (0.5, 0.0, -0.25)]
    assert_close(result.mean_abs, 0.25)
    assert_close(result.max_abs, 0.5)
    assert_close(result.mismatch_kl, sum(k3) / 3)
    assert result.tokens == 3


def test_k3_estimates_the_kl_of_the_engine_from_its_own_samples() -> None:
    generator = np.random.default_rng(0)
    engine, learner = generator.dirichlet(np.ones(6)), generator.dirichlet(np.ones(6))
    drawn = generator.choice(6, size=200_000, p=engine)
    exact = float(np.sum(engine * np.log(engine / learner)))
    result = compare([np.log(learner)[drawn].astype(np.float32)], [np.log(engine)[drawn].astype(np.float32)])
    assert result.mismatch_kl == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("engine", [[floats(-1.0)], [floats(-1.0, -1.0), floats()], []])
def test_texts_of_other_lengths_are_refused(engine: list[np.ndarray]) -> None:
    with pytest.raises(WeightSyncError, match="compares nothing"):
        compare([floats(-1.0), floats(-1.0)], engine)


HALF = choose_tolerance(0.0, exact=False)


def test_verdict_names_receiver_version_figures_and_tensors() -> None:
    result = AuditResult(0.25, 0.5, 0.04, 3)
    with pytest.raises(WeightSyncError, match=r"generator-1 at version 7.*0\.25.*0\.5.*allowed 0\.1.*differ: b, c\."):
        judge(result, HALF, ["b", "c"], "generator-1", 7)
    with pytest.raises(WeightSyncError, match=r"differ: 0, 1, 2, 3, 4 and 2 more\."):
        judge(result, HALF, [str(i) for i in range(7)], "generator-1", 7)


def test_rounding_passes_in_half_precision_only_and_up_to_a_bound() -> None:
    coarse = AuditResult(0.12, 0.4, 0.02, 60)
    judge(coarse, HALF, [], "generator-0", 3)
    for tolerance in (choose_tolerance(0.0, exact=True), choose_tolerance(0.05, exact=False)):
        with pytest.raises(WeightSyncError, match="all tensors arrived"):
            judge(coarse, tolerance, [], "generator-0", 3)
    with pytest.raises(WeightSyncError, match="all tensors arrived"):
        judge(AuditResult(1.5, 4.0, 2.0, 60), HALF, [], "generator-0", 3)


@pytest.mark.parametrize("broken", [-np.inf, np.nan, -1e5])
def test_broken_engine_never_passes(broken: float) -> None:
    with pytest.raises(WeightSyncError):
        judge(compare([floats(-1.0, -1.0)], [floats(-1.0, broken)]), HALF, [], "generator-0", 1)


def test_probe_is_fixed_and_inside_the_vocabulary() -> None:
    probe = probe_tokens(13, 500, seed=1)
    assert np.array_equal(probe, probe_tokens(13, 500, seed=1))
    assert not np.array_equal(probe, probe_tokens(13, 500, seed=2))
    assert set(probe.tolist()) == set(range(13))


def test_an_explicit_tolerance_has_no_exceptions() -> None:
    assert choose_tolerance(0.3, exact=False) == Tolerance(0.3, 0.3)


def test_digests_of_the_learner_are_those_of_an_engine_in_half_precision() -> None:
    master = {"a": torch.randn(5, 3), "b": torch.randn(7)}
    loaded = {name: tensor.to(torch.bfloat16) for name, tensor in master.items()}
    assert tensor_digests(master, torch.bfloat16) == tensor_digests(loaded)
    loaded["b"][2] += 1
    assert differing_tensors(tensor_digests(master, torch.bfloat16), tensor_digests(loaded)) == ["b"]


def test_half_updated_model_is_named() -> None:
    learner = {f"layer{i}": torch.full((4, 4), float(i)) for i in range(4)}
    engine = {name: tensor.clone() for name, tensor in learner.items()}
    assert differing_tensors(tensor_digests(learner), tensor_digests(engine)) == []
    engine["layer2"][0, 0] += 0.5
    engine["layer3"] += 1
    assert differing_tensors(tensor_digests(learner), tensor_digests(engine)) == ["layer2", "layer3"]


def test_missing_unknown_and_reshaped_tensors_are_named() -> None:
    one = tensor_digests({"a": torch.zeros(2), "b": torch.zeros(2)})
    assert differing_tensors(one, tensor_digests({"a": torch.zeros(2)})) == ["b"]
    assert differing_tensors(tensor_digests({"a": torch.zeros(2)}), one) == ["b"]
    assert differing_tensors(one, tensor_digests({"a": torch.zeros(2), "b": torch.zeros(2, 1)})) == ["b"]
    # The bytes are equal here: the digest knows dtype and shape too.
    assert differing_tensors(one, tensor_digests({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int32)})) == [
        "b"
    ]


def test_digest_reads_values_not_memory_layout() -> None:
    tensor = torch.randn(3, 5)
    parameter = torch.nn.Parameter(tensor.clone())
    assert tensor_digests({"a": tensor.t()}) == tensor_digests({"a": tensor.t().contiguous()})
    assert tensor_digests({"a": parameter}) == tensor_digests({"a": tensor})
    assert tensor_digests({"a": torch.tensor(1.5, dtype=torch.bfloat16)})
