"""Sharded weights reach a sender's buckets bit for bit, and no more than one bucket of them is whole at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.audit import differing_tensors, tensor_digests
from asyncrlhf.transport.build_transport import build_sender, lay_out
from asyncrlhf.transport.manifest import ShardedParams, bucket_names, take_part
from asyncrlhf.transport.sender import WeightSender
from asyncrlhf.transport.weights_config import WeightsConfig

SIZES = {"embed": (50, 4), "a.weight": (8, 8), "a.bias": (8,), "b.weight": (30, 8), "counts": (5,)}
BUCKET_BYTES = 1024


class Parts:
    """Weights that count how much of them was whole at once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tensors = {name: torch.randn(shape) for name, shape in SIZES.items()}
        self.tensors["counts"] = torch.arange(5)
        self.asked: list[tuple[str, ...]] = []
        self.largest = 0
        self._open = 0

    def layout(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.to("meta") for name, tensor in self.tensors.items()}

    @contextmanager
    def gather(self, names: tuple[str, ...]) -> Iterator[Mapping[str, torch.Tensor]]:
        self.asked.append(names)
        self._open += sum(self.tensors[name].nbytes for name in names)
        self.largest = max(self.largest, self._open)
        copies = {name: self.tensors[name].clone() for name in names}
        yield copies
        for tensor in copies.values():
            tensor.fill_(-1)  # whoever reads it now reads what is no weight any more
        self._open -= sum(self.tensors[name].nbytes for name in names)


def holder(config: WeightsConfig, params: ShardedParams) -> WeightSender:
    sender = build_sender(config, "local", params)
    assert isinstance(sender, WeightSender)
    return sender


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_snapshot_gathers_bucket_by_bucket(dtype: str) -> None:
    parts = Parts()
    config = WeightsConfig(bucket_mb=BUCKET_BYTES / 2**20, dtype=dtype)
    sender = holder(config, ShardedParams(parts))
    sender.snapshot(3, ShardedParams(parts))
    cast = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    expected = {n: t.to(cast) if t.is_floating_point() else t for n, t in parts.tensors.items()}
    assert differing_tensors(tensor_digests(expected), tensor_digests(sender.tensors())) == []
    assert parts.asked == bucket_names(sender.manifest) and len(parts.asked) > 1
    # In memory a bucket may be larger than on the wire, by the ratio of the types.
    limit = BUCKET_BYTES * 4 // cast.itemsize
    assert 0 < parts.largest <= limit < sum(tensor.nbytes for tensor in parts.tensors.values())


def test_ranks_without_a_sender_gather_the_same_in_the_same_order() -> None:
    config = WeightsConfig(bucket_mb=BUCKET_BYTES / 2**20)
    first, other = Parts(), Parts()
    sender = holder(config, ShardedParams(first))
    sender.snapshot(1, ShardedParams(first))
    take_part(lay_out(config, ShardedParams(other)), ShardedParams(other))
    assert first.asked == other.asked


def _missing(parts: Parts) -> None:
    del parts.tensors["a.bias"]


def _other_shape(parts: Parts) -> None:
    parts.tensors["a.bias"] = torch.zeros(9)


@pytest.mark.parametrize(("change", "sentence"), [(_missing, "'a.bias' is missing"), (_other_shape, r"\[9\], not")])
def test_weights_that_changed_their_layout_are_refused(change: Callable[[Parts], None], sentence: str) -> None:
    parts = Parts()
    sender = holder(WeightsConfig(), ShardedParams(parts))
    change(parts)
    with pytest.raises(WeightSyncError, match=sentence):
        sender.snapshot(1, ShardedParams(parts))
    assert not parts.asked, "nothing is gathered for weights that do not fit"
