"""The files of a learner checkpoint that are the same for all backends: model, trainer's state, random states."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.ranks import Shards, on_host
from asyncrlhf.learner.state.state_file import read_state
from asyncrlhf.learner.state.state_writer import StateWriter
from asyncrlhf.models.adapter import merged_state

MODEL, TRAINER = "model", "trainer.safetensors"
STAGES = "pipeline"  # the optimizer's states by parameter, one file per rank of a pipeline that is the first with some
FILE_BYTES = 5 * 10**9  # rank 0 holds only a few such files in host memory at a time if it has to gather them


def write(folder: Path, state: Mapping[str, Any], rank: int, writer: StateWriter) -> None:
    """Rank 0 writes ``trainer.safetensors``; every rank writes its own ``rank-R.safetensors``."""
    if rank == 0:
        writer.write_state(folder / TRAINER, state)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    writer.write_state(_random_states(folder, rank), {"cpu": torch.get_rng_state(), "cuda": devices})


def read_head(folder: Path) -> dict[str, Any]:
    """The trainer's state, without the tensors; raises CheckpointError with one sentence if it is incomplete."""
    for part in (MODEL, TRAINER):
        if not (folder / part).exists():
            raise CheckpointError(f"{folder / part} is missing: not a whole learner checkpoint.")
    state = read_state(folder / TRAINER, tensors=False)
    if not isinstance(state, dict) or not {"layout", "version", "critic", "ema"} <= state.keys():
        raise CheckpointError(f"{folder / TRAINER} does not hold a learner's state.")
    return state


def check_fits(folder: Path, state: Mapping[str, Any], layout: str, parts: Mapping[str, tuple[str, bool]]) -> None:
    """Raise CheckpointError if the trainer's ``state`` does not fit this run.

    Args:
        layout: ``LearnerConfig.layout`` of this run.
        parts: further models by name: the setting of ``algorithm`` that requests it, and whether this run has it.
    """
    if state["layout"] != layout:
        raise CheckpointError(
            f"{folder}: the checkpoint is one of {state['layout']}, not {layout}; "
            f"its weights alone can be taken up with model.path={folder / MODEL}."
        )
    for name, (setting, present) in parts.items():
        if (state[name] is not None) != present:
            raise CheckpointError(
                f"{folder}: the checkpoint and algorithm.{setting} disagree on whether there is a {name} model."
            )


def read(folder: Path, layout: str, parts: Mapping[str, tuple[str, bool]]) -> dict[str, Any]:
    """The trainer's state; raises CheckpointError with one sentence if it is incomplete or, by :func:`check_fits`, does
    not fit this run."""
    check_fits(folder, read_head(folder), layout, parts)
    state: dict[str, Any] = read_state(folder / TRAINER)
    return state


def restore_random_state(folder: Path, rank: int) -> None:
    """Restore the rank's random state. A rank that the checkpoint lacks keeps its own state: a step uses no random
    numbers."""
    path = _random_states(folder, rank)
    if not path.exists():
        return
    states = read_state(path)
    torch.set_rng_state(states["cpu"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _random_states(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"


def export_model(
    model: transformers.PreTrainedModel, folder: Path, shards: Shards | None, rank: int, writer: StateWriter
) -> None:
    """Write ``folder`` like ``save_pretrained``. With ``shards`` all ranks take part, otherwise only rank 0 acts.

    If transformers renames or splits a model's tensors when it saves them (fused experts), rank 0 holds the whole model
    in host memory.
    """
    renamed = getattr(model, "_weight_conversions", None) or model.is_remote_code()
    if (shards is None and rank > 0) or (writer.rehearsing and (shards is not None or renamed)):
        return
    if renamed:
        whole = merged_state(model) if shards is None else on_host(shards, rank)
        if rank == 0:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in whole.items()}
            writer.submit(lambda: model.save_pretrained(folder, state_dict=tensors))
    else:
        _write_model(model, folder, shards, rank, writer)


def _write_model(
    model: transformers.PreTrainedModel, folder: Path, shards: Shards | None, rank: int, writer: StateWriter
) -> None:
    state = dict(shards.layout()) if shards is not None else _once(merged_state(model))
    pattern = SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors")
    plan = split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=FILE_BYTES)
    for file, names in plan.filename_to_tensors.items():
        if shards is None:
            writer.write_tensors(folder / file, {name: state[name] for name in names}, {"format": "pt"})
        elif rank == 0:
            writer.write_gathered(folder / file, partial(on_host, shards, rank, tuple(names)), {"format": "pt"})
        else:
            on_host(shards, rank, tuple(names))
    if rank > 0:
        return
    config = copy.deepcopy(model.config)
    config.dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]

    def describe() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)

    writer.submit(describe)


def _once(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with tied ones under their first name only, as ``from_pretrained`` expects."""
    first = {(t.data_ptr(), t.shape): name for name, t in reversed(list(state.items())) if t.numel()}
    kept = set(first.values())
    return {name: tensor for name, tensor in state.items() if name in kept or not tensor.numel()}
