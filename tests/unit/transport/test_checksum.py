"""Checksums: they know every byte and its place, and the accelerator's sum agrees with plain integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport import manifest as layout
from asyncrlhf.transport.manifest import (
    FlatBuckets,
    bucket_checksum,
    build_manifest,
    changed_buckets,
    manifest_checksums,
    positional_sum,
)
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.receiver import Staging


def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"p{i}": torch.randn(5 + i, 3, generator=generator) for i in range(6)}


def test_a_bucket_is_the_bytes_of_its_tensors_in_order() -> None:
    weights = params()
    manifest = build_manifest(weights, 128)
    buckets = FlatBuckets(manifest)
    buckets.copy_from(weights)
    found = manifest_checksums(manifest, buckets.views())
    assert len(found) == len(manifest.bucket_bytes) > 1
    for bucket, value in enumerate(found):
        names = [entry.name for entry in manifest.tensors if entry.bucket == bucket]
        assert value == xxhash.xxh3_64(b"".join(weights[name].numpy().tobytes() for name in names)).intdigest()


@pytest.mark.parametrize("place", [0, 7, 59])
def test_one_bit_changes_its_bucket_alone(place: int) -> None:
    weights = params()
    manifest = build_manifest(weights, 128)
    before = manifest_checksums(manifest, weights)
    weights["p2"].view(torch.uint8).view(-1)[place] ^= 1
    (entry,) = [entry for entry in manifest.tensors if entry.name == "p2"]
    assert changed_buckets(before, manifest_checksums(manifest, weights)) == [entry.bucket]


def reference_sum(data: bytes, chunk: int) -> int:
    """``positional_sum`` as its docstring says it, in unbounded integers."""

    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    def weight(place: int) -> int:
        value = signed(place * 2862933555777941757 + 3037000493)
        return (value ^ (value >> 29)) | 1

    whole = len(data) // 8 * 8
    words = np.frombuffer(data[:whole], np.int64).tolist()
    total = 0
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk]
        total = total * 6364136223846793005 + sum(w * weight(i) for i, w in enumerate(part))
    total = total * 6364136223846793005 + sum(b * weight(i) for i, b in enumerate(data[whole:]))
    return total % 2**64


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 1027])
def test_the_accelerators_sum_is_that_of_plain_integers(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CHUNK_WORDS", 32)
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert positional_sum(torch.from_numpy(data)) == reference_sum(data.tobytes(), 32)


def test_the_accelerators_sum_knows_bytes_and_places() -> None:
    tensor = torch.randn(1000)
    before = positional_sum(tensor)
    swapped = tensor[torch.tensor([2, 1, 0, *range(3, 1000)])]
    assert positional_sum(swapped) != before != positional_sum(tensor + 1e-6)
    assert positional_sum(tensor.clone()) == before


def test_a_difference_names_bucket_tensors_version_and_receiver() -> None:
    weights = {f"layer{i}": torch.zeros(1) for i in range(12)}
    manifest = build_manifest(weights, 1 << 20)
    good = bucket_checksum(manifest.tensors, weights)
    staging, ticket = Staging("g3"), Ticket(7, 0, manifest, checksums=(good,))
    held, _ = staging.begin(ticket)
    held.copy_from(weights)
    staging.verify(ticket, 0)
    staging.begin(ticket)
    held.views()["layer5"].add_(1)
    with pytest.raises(WeightSyncError, match=r"Bucket 0 of version 7 arrived at g3 .*layer0, layer1.* and 2 more\."):
        staging.verify(ticket, 0)


def test_everything_has_changed_where_nothing_is_known() -> None:
    assert changed_buckets((), (1, 2)) == [0, 1]
    assert changed_buckets((1, 2), (1, 3)) == [1]
