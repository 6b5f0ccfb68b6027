"""The states after truncated answers, of which a critic says what would have followed."""

from __future__ import annotations

import numpy as np
import torch

from asyncrlhf.data.branches import last_texts
from asyncrlhf.data.packing import microbatch_indices, select
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.step.plan import Microbatch, StepPlan
from asyncrlhf.models.copies import to_device


def cut_answers(plan: StepPlan, token_budget: int, device: torch.device) -> tuple[list[Microbatch], torch.Tensor]:
    """(microbatches, sequences [n]) for the states after truncated answers: a critic's values of the microbatches, laid
    out by ``span`` [n], are those of ``sequences``."""
    chosen = np.flatnonzero(plan.batch.truncated)
    texts = last_texts(select(plan.batch, chosen))
    lengths = np.array([len(text) for text in texts], np.int64)
    microbatches = []
    for run in microbatch_indices(lengths, token_budget):
        part = slice(int(run[0]), int(run[-1]) + 1)
        microbatches.append(Microbatch(PackedInputs.after(texts[part], device), part, part, trains=False))
    return microbatches, to_device(torch.from_numpy(chosen), device)
