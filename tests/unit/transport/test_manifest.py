"""Flat buckets: the layout's rules, round trips of every kind of tensor, and refusals that name the tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import (
    ALIGNMENT,
    COPY_PIECE_BYTES,
    FlatBuckets,
    build_manifest,
    manifest_difference,
    manifest_digest,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.tuples(shapes, st.sampled_from(DTYPES), st.integers(0, 99)).map(
    lambda t: torch.randint(0, 2, t[0], generator=torch.Generator().manual_seed(t[2])).to(t[1])
)
param_sets = st.lists(tensors, min_size=1, max_size=8).map(lambda ts: {f"p{i}": t for i, t in enumerate(ts)})


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@settings(max_examples=60, deadline=None)
@given(params=param_sets, bucket_bytes=st.integers(1, 512))
def test_layout_is_aligned_disjoint_and_bounded(params: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    manifest = build_manifest(params, bucket_bytes)
    assert [entry.name for entry in manifest.tensors] == list(params)
    for bucket, total in enumerate(manifest.bucket_bytes):
        inside = [entry for entry in manifest.tensors if entry.bucket == bucket]
        end = 0
        for entry in inside:
            assert entry.offset % ALIGNMENT == 0
            assert entry.offset >= end
            end = entry.offset + size_of(params[entry.name])
        assert end <= total < end + ALIGNMENT
        filled = [entry for entry in inside if size_of(params[entry.name])]
        assert total <= bucket_bytes or len(filled) == 1


@settings(max_examples=60, deadline=None)
@given(params=param_sets, bucket_bytes=st.integers(1, 512))
def test_round_trip_keeps_every_bit(params: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    buckets = FlatBuckets(build_manifest(params, bucket_bytes))
    buckets.copy_from(params)
    for name, view in buckets.views().items():
        assert view.dtype == params[name].dtype
        assert torch.equal(view, params[name])


def test_views_share_the_buckets_memory() -> None:
    params = {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    buckets = FlatBuckets(build_manifest(params, 1 << 20))
    views = buckets.views()
    buckets.copy_from(params)
    assert views["b"].eq(1).all()
    start, end = buckets.tensors[0].data_ptr(), buckets.tensors[0].data_ptr() + buckets.tensors[0].numel()
    assert all(start <= view.data_ptr() < end for view in views.values())


def test_threads_copy_the_same_bytes_as_one() -> None:
    threads = torch.get_num_threads()
    big = torch.arange(3 * COPY_PIECE_BYTES // 8 + 5)
    params = {"big": big, "transposed": torch.randn(7, 5).t(), "gradient": torch.randn(4, requires_grad=True)}
    buckets = FlatBuckets(build_manifest(params, 1 << 20))
    try:
        torch.set_num_threads(3)
        buckets.copy_from(params)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(view, params[name]) for name, view in buckets.views().items())


@pytest.mark.parametrize(
    ("given_params", "problem"),
    [
        ({"a": torch.zeros(3)}, "'b' is missing"),
        ({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, "'c' is unknown"),
        ({"a": torch.zeros(3), "b": torch.zeros(3)}, "'b' is float32"),
        ({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)}, "'b' is bfloat16"),
    ],
)
def test_parameters_that_do_not_fit_are_named(given_params: dict[str, torch.Tensor], problem: str) -> None:
    buckets = FlatBuckets(build_manifest({"a": torch.zeros(3), "b": torch.zeros(2)}, 64))
    with pytest.raises(WeightSyncError, match=problem):
        buckets.copy_from(given_params)


def test_nothing_to_publish_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="no parameters"):
        build_manifest({}, 64)


def test_difference_and_digest_tell_layouts_apart() -> None:
    params = {"a": torch.zeros(8), "b": torch.zeros(8)}
    one, same, other = build_manifest(params, 64), build_manifest(params, 64), build_manifest(params, 32)
    assert manifest_difference(one, same) is None
    assert manifest_digest(one) == manifest_digest(same) != manifest_digest(other)
    assert "elsewhere" in str(manifest_difference(one, other))
    with pytest.raises(WeightSyncError, match="do not fit"):
        FlatBuckets(one).copy_buckets(FlatBuckets(other).tensors)
