"""Writes the policy as a checkpoint that any ``from_pretrained`` reads, also when its ranks hold shards."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from asyncrlhf.data.adapter import is_adapter, merged_state
from asyncrlhf.learner.shards import Shards, on_host

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
