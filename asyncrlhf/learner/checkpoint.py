"""The files of a learner checkpoint: the model as transformers saves it, the trainer's state, the random states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from asyncrlhf.errors import CheckpointError


def save(folder: Path, model: PreTrainedModel, state: Mapping[str, Any], rank: int) -> None:
    """Rank 0 writes ``model/`` and ``trainer.pt``; every rank writes its own ``rank-R.pt``."""
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        model.save_pretrained(folder / "model")
        torch.save(dict(state), folder / "trainer.pt")
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    torch.save({"cpu": torch.get_rng_state(), "cuda": devices}, folder / f"rank-{rank}.pt")


def load(folder: Path, model: PreTrainedModel, rank: int) -> dict[str, Any]:
    """Fill ``model`` in place, restore the random state, return the trainer's state.

    A rank that was not there when the checkpoint was written keeps its own random state: nothing of the step is drawn.
    Raises CheckpointError with one sentence when a part is missing or of another model.
    """
    for part in ("model", "trainer.pt"):
        if not (folder / part).exists():
            raise CheckpointError(f"{folder / part} is missing: not a whole learner checkpoint.")
    try:
        saved = type(model).from_pretrained(folder / "model", dtype=torch.float32)
        model.load_state_dict(saved.state_dict())
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{folder / 'model'} does not hold this run's model: {error}") from error
    random_state = folder / f"rank-{rank}.pt"
    if random_state.exists():
        states = torch.load(random_state, weights_only=True)
        torch.set_rng_state(states["cpu"])
        if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(states["cuda"])
    return torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
