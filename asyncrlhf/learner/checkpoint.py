"""The files of a learner checkpoint that every backend writes alike: the trainer's state, and the random states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrlhf.errors import CheckpointError

MODEL, TRAINER = "model", "trainer.pt"


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
