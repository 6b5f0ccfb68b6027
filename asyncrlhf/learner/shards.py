"""Reading and exporting weights of which each rank holds a shard: piece by piece, never all of them on one device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from asyncrlhf.data.adapter import is_adapter, merged_state

PIECE_BYTES = 2**27  # of whole tensors that a rank holds at once; a single larger tensor is a piece of its own


class Shards:
    """The policy's tensors where no rank holds them whole. All ranks gather the same names in the same order."""

    def __init__(
        self, model: nn.Module, gathered: Callable[[list[nn.Parameter]], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """``gathered``: makes these parameters whole while it lasts, where they are no DTensors (ZeRO-3)."""
        self._model, self._gathered = model, gathered

    def layout(self) -> Mapping[str, torch.Tensor]:
        """Name, shape and dtype of every tensor, on the device ``meta``; nothing is gathered."""
        return {
            name: torch.empty(tuple(getattr(p, "ds_shape", p.shape)), dtype=p.dtype, device="meta")
            for name, p in self._model.named_parameters()
        }

    @contextmanager
    def gather(self, names: tuple[str, ...]) -> Iterator[Mapping[str, torch.Tensor]]:
        """These tensors whole, on every rank, as long as the context lasts."""
        parameters = dict(self._model.named_parameters())
        with self._gathered([parameters[name] for name in names]):
            yield {name: whole(parameters[name]) for name in names}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` detached, gathered from all ranks if it is sharded."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


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
    """Each tensor (of ``names``) whole, good until the next is asked for; all ranks must come to the end."""
    layout = shards.layout()
    chosen = layout if names is None else {name: layout[name] for name in names}
    for piece in pieces(chosen):
        with shards.gather(piece) as tensors:
            yield from tensors.items()


def on_host(shards: Shards, rank: int, names: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    """Copies in rank 0's host memory; the other ranks take part and get nothing."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in gathered(shards, names) if rank == 0}


FILE_BYTES = 5 * 10**9  # rank 0 holds one file in host memory at a time


def export_model(model: PreTrainedModel, folder: Path, shards: Shards | None, rank: int) -> None:
    """``folder`` as ``save_pretrained`` writes it. With ``shards`` all ranks take part, otherwise rank 0 alone acts.

    A model whose tensors transformers renames or splits on the way to disk (fused experts) must be whole for that, in
    rank 0's host memory.
    """
    if shards is None:
        if rank == 0:
            adapted = is_adapter(dict(model.named_parameters()))
            model.save_pretrained(folder, state_dict=merged_state(model) if adapted else None)
    elif getattr(model, "_weight_conversions", None) or model.is_remote_code():
        tensors = on_host(shards, rank)
        if rank == 0:
            model.save_pretrained(folder, state_dict=tensors)
    else:
        _stream(model, folder, shards, rank)


def _stream(model: PreTrainedModel, folder: Path, shards: Shards, rank: int) -> None:
    layout = dict(shards.layout())
    pattern = SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors")
    plan = split_torch_state_dict_into_shards(layout, filename_pattern=pattern, max_shard_size=FILE_BYTES)
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in plan.filename_to_tensors.items():
        tensors = on_host(shards, rank, tuple(names))
        if rank == 0:
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if rank > 0:
        return
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    model.config.dtype = str(next(iter(layout.values())).dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
