"""What a frozen model says of finished rollouts, in passes of few tokens; the failures are the rollouts' own."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch

from asyncrlhf.data.packing import pack
from asyncrlhf.learner.forward import PackedInputs
from asyncrlhf.learner.passes import AUTOCAST
from asyncrlhf.rewards.model import padded_batches
from asyncrlhf.types import FloatArray, Rollout, TrainSample


class RolloutPasses(ABC):
    """Packed passes as the learner makes them.

    Args:
        device: of the model.
        precision: a ``learner.mixed_precision``.
        token_budget: padded tokens of one forward pass; a longer sequence is a pass of its own.
    """

    model_name: str  # as sentences name it
    what: str  # what it gives
    setting: str  # that holds ``token_budget``

    def __init__(self, device: torch.device, precision: str, token_budget: int) -> None:
        self._device = device
        self._dtype = AUTOCAST.get(precision)
        self._budget = token_budget

    @abstractmethod
    def _flat(self, inputs: PackedInputs) -> torch.Tensor:
        """One number a response token: [M]."""

    def _make_room(self) -> bool:
        """Free what is held beside the weights, for a pass that ran out of memory; false when there was nothing."""
        return False

    def answer(self, rollouts: Sequence[Rollout]) -> list[FloatArray | str]:
        """The numbers [L] float32 of each rollout, or one sentence that says why it has none."""
        answers: list[FloatArray | str] = [self._refusal(rollout) or "" for rollout in rollouts]
        able = [i for i, refusal in enumerate(answers) if not refusal]
        lengths = np.array([len(rollouts[i].prompt.token_ids) + len(rollouts[i].response_ids) for i in able], np.int64)
        for batch in padded_batches(lengths, self._budget):
            chosen = [able[place] for place in batch]
            for i, answer in zip(chosen, self._pass([rollouts[i] for i in chosen]), strict=True):
                answers[i] = answer
        return answers

    def _pass(self, rollouts: Sequence[Rollout]) -> list[FloatArray | str]:
        found: list[FloatArray] | None = None
        # What the error holds of the pass is free again only behind this clause.
        with contextlib.suppress(torch.OutOfMemoryError):
            found = self._numbers(rollouts)
        if found is None and self._make_room():
            return self._pass(rollouts)
        if found is None:
            tokens = max(len(r.prompt.token_ids) + len(r.response_ids) for r in rollouts)
            sentence = (
                f"The {self.model_name} ran out of memory with {len(rollouts)} sequences of up to {tokens} tokens; "
                f"lower {self.setting}."
            )
            return [sentence] * len(rollouts)
        return [self._checked(numbers) for numbers in found]

    def _checked(self, numbers: FloatArray) -> FloatArray | str:
        return numbers if np.isfinite(numbers).all() else f"The {self.model_name}'s {self.what} are not all finite."

    @torch.no_grad()
    def _numbers(self, rollouts: Sequence[Rollout]) -> list[FloatArray]:
        plain = [replace(r, ref_logprobs=None, values=None, critic_version=None) for r in rollouts]
        batch = pack([TrainSample(rollout, reward=0.0) for rollout in plain])
        inputs = PackedInputs.of_batch(batch, device=self._device)
        with self._autocast():
            flat = self._flat(inputs).float().cpu().numpy()
        return np.split(flat, np.cumsum([len(rollout.response_ids) for rollout in rollouts])[:-1])

    def _autocast(self) -> AbstractContextManager:
        return contextlib.nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def _refusal(self, rollout: Rollout) -> str | None:
        if len(rollout.prompt.token_ids) == 0 or len(rollout.response_ids) == 0:
            return f"The {self.model_name} has nothing to score: prompt or response is empty."
        return None
