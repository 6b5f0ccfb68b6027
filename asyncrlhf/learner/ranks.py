"""The learner's ranks: group set-up, sums and gathers; the mesh of ranks; the position of a rank's part within a whole
tensor, and the gathering of sharded weights."""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

Spans = list[list[list[int]]]  # for each dimension the runs of the part, in order
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor of ``shape``: the ``values`` that ``spans`` select, in their order."""

    values: torch.Tensor
    shape: tuple[int, ...]
    spans: Spans


def extent(spans: Spans) -> tuple[int, ...]:
    """The part's own shape."""
    return tuple(sum(last - first for first, last in runs) for runs in spans)


def local_spans(tensor: DTensor) -> Spans:
    """The spans of this rank's part; no communication."""
    return [_runs(tensor, dim) for dim in range(tensor.ndim)]


def _runs(tensor: DTensor, dim: int) -> list[list[int]]:
    """torch divides row numbers in the same way as rows."""
    size = tensor.shape[dim]
    along = [_along_first(placement, dim) for placement in tensor.placements]
    if all(placement.is_replicate() for placement in along):
        return [[0, size]]
    rows = torch.arange(size, device=tensor.device_mesh.device_type)
    own = distribute_tensor(rows, tensor.device_mesh, along, src_data_rank=None).to_local().tolist()
    breaks = [i for i in range(1, len(own)) if own[i] != own[i - 1] + 1]
    return [[own[i], own[j - 1] + 1] for i, j in itertools.pairwise([0, *breaks, len(own)])] if own else []


def _along_first(placement: Any, dim: int) -> Any:
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)


def overlaps(own: Spans, other: Spans) -> Iterator[tuple[Slices, Slices]]:
    """The blocks that two parts of one tensor share: the place of each in ``own`` and in ``other``."""
    along = [list(_common(a, b)) for a, b in zip(own, other, strict=True)]
    for blocks in itertools.product(*along):
        yield tuple(here for here, _ in blocks), tuple(there for _, there in blocks)


def _common(own: list[list[int]], other: list[list[int]]) -> Iterator[tuple[slice, slice]]:
    here = 0
    for first, last in own:
        there = 0
        for start, stop in other:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield (
                    slice(here + low - first, here + high - first),
                    slice(there + low - start, there + high - start),
                )
            there += stop - start
        here += last - first


Item = TypeVar("Item")
Tensor = TypeVar("Tensor", bound=torch.Tensor)
PIECE_BYTES = 2**27  # of whole tensors that a rank holds at once; a single larger tensor is a separate piece


def init_process_group(
    rank: int, ranks: int, address: str, *, device: str = "cpu", timeout_seconds: float = 600
) -> None:
    """Join the learner's group: gloo, and NCCL for tensors on CUDA. ``address`` is ``host:port`` of rank 0."""
    dist.init_process_group(
        backend=_backend(device),
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )


def init_single_process_group(device: str | torch.device) -> None:
    """Form a group of this process alone, for libraries that need one; does nothing if there is a group."""
    if not dist.is_initialized():
        dist.init_process_group(backend=_backend(device), store=dist.HashStore(), rank=0, world_size=1)


def _backend(device: str | torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"


@dataclass(frozen=True)
class Peers:
    """Ranks that act together; ``rank`` is this rank's place among them. ``group=None``: all ranks."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None


def deal_out(rank: int, ranks: int, size: int) -> tuple[Peers, Peers]:
    """(peers with different data, peers with the same data): each ``size`` consecutive ranks have the same data. All
    ranks call it together."""
    if size == 1:
        return Peers(rank, ranks), Peers()
    return peers_along(rank, ranks, ranks // size, size), peers_along(rank, ranks, size)


def peers_along(rank: int, ranks: int, size: int, stride: int = 1) -> Peers:
    """This rank's group of ``size`` ranks that are ``stride`` apart: the ranks between them hold other parts of what it
    holds. All ranks call it together."""
    block = size * stride
    starts = [first + place for first in range(0, ranks, block) for place in range(stride)]
    group, _ = dist.new_subgroups_by_enumeration([list(range(start, start + block, stride)) for start in starts])
    return Peers(rank % block // stride, size, group)


def all_sum(values: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Sum ``values`` over the peers, in place."""
    if peers.ranks > 1:
        dist.all_reduce(values, group=peers.group)
    return values


def all_gather(value: Any, peers: Peers) -> list[Any]:
    """Each peer's picklable ``value``, in the order of their ranks."""
    if peers.ranks == 1:
        return [value]
    gathered: list[Any] = [None] * peers.ranks
    dist.all_gather_object(gathered, value, group=peers.group)
    return gathered


def by_layout(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors grouped by their layout over the ranks."""
    alike: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        alike.setdefault(key, []).append(tensor)
    return list(alike.values())


def padded(items: Sequence[Item], device: torch.device, ranks: int) -> list[Item | None]:
    """``items``, padded with None to the largest number of items on any rank: all ranks then make the same number of
    collective passes."""
    if ranks == 1:
        return list(items)
    longest = torch.tensor(len(items), device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return [*items, *([None] * (int(longest) - len(items)))]


def barrier(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()


class Shards:
    """The policy's tensors if no rank holds them whole. All ranks gather the same names in the same order."""

    def __init__(
        self, model: nn.Module, gathered: Callable[[list[nn.Parameter]], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """``gathered``: a context that gathers these parameters if they are not DTensors (ZeRO-3)."""
        self._model, self._gathered = model, gathered
        self._spans: dict[str, Spans] = {}  # of DTensors: they stay where they are

    def layout(self) -> Mapping[str, torch.Tensor]:
        """Name, shape and dtype of every tensor, on the device ``meta``; nothing is gathered."""
        return {
            name: torch.empty(tuple(getattr(p, "ds_shape", p.shape)), dtype=p.dtype, device="meta")
            for name, p in self._model.named_parameters()
        }

    @contextmanager
    def gather(self, names: tuple[str, ...]) -> Iterator[Mapping[str, torch.Tensor]]:
        """These tensors, whole, on every rank while the context lasts."""
        parameters = dict(self._model.named_parameters())
        with self._gathered([parameters[name] for name in names]):
            yield {name: whole(parameters[name]) for name in names}

    def parts(self) -> dict[str, Part]:
        """The present values of this rank's parts; no communication. Several ranks may have the same part."""
        return {name: self._part(name, parameter) for name, parameter in self._model.named_parameters()}

    def _part(self, name: str, parameter: torch.Tensor) -> Part:
        shape = tuple(parameter.shape)
        if not isinstance(parameter, DTensor):
            return Part(parameter.detach(), shape, [[[0, size]] for size in shape])
        if name not in self._spans:
            self._spans[name] = local_spans(parameter)
        return Part(parameter.to_local().detach(), shape, self._spans[name])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` detached, gathered from all ranks if it is sharded."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()  # type: ignore[attr-defined]


def pieces(layout: Mapping[str, torch.Tensor], limit: int = PIECE_BYTES) -> Iterator[tuple[str, ...]]:
    """The names in order, in runs of at most ``limit`` bytes."""
    piece: list[str] = []
    total = 0
    for name, tensor in layout.items():
        if piece and total + tensor.nbytes > limit:
            yield tuple(piece)
            piece, total = [], 0
        piece.append(name)
        total += tensor.nbytes
    if piece:
        yield tuple(piece)


def gathered(shards: Shards, names: tuple[str, ...] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor (of ``names``) whole, valid until the next one is requested; all ranks must finish the iteration."""
    layout = shards.layout()
    chosen = layout if names is None else {name: layout[name] for name in names}
    for piece in pieces(chosen):
        with shards.gather(piece) as tensors:
            yield from tensors.items()


def on_host(shards: Shards, rank: int, names: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    """Copy the tensors to rank 0's host memory; the other ranks take part and return an empty dictionary."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in gathered(shards, names) if rank == 0}


class Mesh:
    """The ranks arranged by ``LearnerConfig.mesh``. All ranks build it together."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        init_single_process_group(device)
        # torch warns that DTensors over two dimensions are gathered by two collectives.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self.sizes = sizes
        self.whole = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @property
    def data(self) -> DeviceMesh:
        """The ranks that train different shares with the same part of the model: [shard], or [replicate, shard]."""
        return self.whole["replicate", "shard"] if self.sizes["replicate"] > 1 else self.whole["shard"]

    def is_first(self, tensor: DTensor) -> bool:
        """Whether no rank before this one along a dimension that does not divide ``tensor`` has the same part of it."""
        names = tensor.device_mesh.mesh_dim_names
        assert names is not None
        divided = {name for name, at in zip(names, tensor.placements, strict=True) if not at.is_replicate()}
        divided.add("pipeline")  # a stage's tensors are no other stage's
        return all(self.whole.get_local_rank(name) == 0 for name in self.sizes if name not in divided)

    def is_first_of(self, name: str) -> bool:
        """Whether no rank before this one has the same place along ``name``."""
        return all(self.whole.get_local_rank(other) == 0 for other in self.sizes if other != name)

    def groups(self, name: str) -> list[list[int]]:
        """The ranks of every group along one dimension."""
        dim = list(self.sizes).index(name)
        found: list[list[int]] = self.whole.mesh.movedim(dim, -1).reshape(-1, self.sizes[name]).tolist()
        return found

    def peers(self, name: str) -> Peers:
        """This rank's group along one dimension."""
        return Peers(self.whole.get_local_rank(name), self.sizes[name], self.whole.get_group(name))
