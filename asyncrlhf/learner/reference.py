"""The frozen reference policy apart from the learner: its log-probs of finished rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from asyncrlhf.learner.forward import PackedInputs, PackedPolicy, TokenFacts
from asyncrlhf.learner.rollout_passes import RolloutPasses
from asyncrlhf.rewards.chunked_messages import Chunk, Prefilled
from asyncrlhf.types import FloatArray, Rollout


class ReferencePolicy(RolloutPasses):
    """Gives what the learner's own frozen model would give: the same packed pass, at the same temperature.

    Args:
        model: the frozen causal language model, on its device.
        temperature: the learner's; 0, greedy, counts as 1.
        precision, token_budget: as in :class:`~asyncrlhf.learner.rollout_passes.RolloutPasses`.
    """

    model_name, what, setting = "reference model", "log-probs", "reference.token_budget"

    def __init__(self, model: PreTrainedModel, *, temperature: float, precision: str, token_budget: int) -> None:
        super().__init__(model.device, precision, token_budget)
        self._policy = PackedPolicy(model.eval().requires_grad_(False))
        self._temperature = temperature or 1.0

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released`` and read ``chunks`` ahead; this one reads whole rollouts alone."""
        return Prefilled(False)

    def _flat(self, inputs: PackedInputs) -> torch.Tensor:
        facts: TokenFacts = self._policy(inputs, self._temperature)
        return facts.logprobs

    def _with(self, rollout: Rollout, numbers: FloatArray) -> Rollout:
        return replace(rollout, ref_logprobs=numbers)
