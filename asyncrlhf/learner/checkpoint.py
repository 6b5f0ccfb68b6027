"""The files of a learner checkpoint that all backends write alike: model, trainer's state, random states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from asyncrlhf.data.adapter import is_adapter, merged_state
from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.distributed import Shards, on_host

MODEL, TRAINER = "model", "trainer.pt"
FILE_BYTES = 5 * 10**9  # rank 0 holds one file in host memory at a time


def write(folder: Path, state: Mapping[str, Any], rank: int) -> None:
    """Rank 0 writes ``trainer.pt``; every rank writes its own ``rank-R.pt``."""
    if rank == 0:
        torch.save(dict(state), folder / TRAINER)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    torch.save({"cpu": torch.get_rng_state(), "cuda": devices}, folder / f"rank-{rank}.pt")


def read(folder: Path, layout: str, parts: Mapping[str, tuple[str, bool]]) -> dict[str, Any]:
    """The trainer's state; raises CheckpointError with one sentence when it is not whole or not this run's.

    Args:
        layout: what ``LearnerConfig.layout`` is in this run.
        parts: beside the policy, by name: the setting of ``algorithm`` that asks for it, and whether this run has it.
    """
    for part in (MODEL, TRAINER):
        if not (folder / part).exists():
            raise CheckpointError(f"{folder / part} is missing: not a whole learner checkpoint.")
    state: dict[str, Any] = torch.load(folder / TRAINER, map_location="cpu", weights_only=True)
    written = state.get("layout", "learner.backend=torch")
    if written != layout:
        raise CheckpointError(
            f"{folder}: the checkpoint is one of {written}, not {layout}; "
            f"its weights alone can be taken up with model.path={folder / MODEL}."
        )
    for name, (setting, present) in parts.items():
        if (state.get(name) is not None) != present:
            raise CheckpointError(
                f"{folder}: the checkpoint and algorithm.{setting} disagree on whether there is a {name} model."
            )
    return state


def restore_random_state(folder: Path, rank: int) -> None:
    """A rank that was not there when the checkpoint was written keeps its own: nothing of the step is drawn."""
    random_state = folder / f"rank-{rank}.pt"
    if not random_state.exists():
        return
    states = torch.load(random_state, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def export_model(model: transformers.PreTrainedModel, folder: Path, shards: Shards | None, rank: int) -> None:
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


def _stream(model: transformers.PreTrainedModel, folder: Path, shards: Shards, rank: int) -> None:
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
