"""The frozen reference policy apart from the learner: its log-probs of finished rollouts, in passes of few tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrlhf.data.packing import pack
from asyncrlhf.learner.forward import PackedInputs, PackedPolicy, TokenFacts
from asyncrlhf.learner.passes import AUTOCAST
from asyncrlhf.rewards.model import padded_batches
from asyncrlhf.types import FloatArray, Rollout, TrainSample


class ReferencePolicy:
    """Gives what the learner's own frozen model would give: the same packed pass, at the same temperature.

    Args:
        model: the frozen causal language model, on its device.
        temperature: the learner's; 0, greedy, counts as 1.
        precision: a ``learner.mixed_precision``.
        token_budget: padded tokens of one forward pass; a longer sequence is a pass of its own.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float, precision: str, token_budget: int) -> None:
        self._policy = PackedPolicy(model.eval().requires_grad_(False))
        self._temperature = temperature or 1.0
        self._dtype = AUTOCAST.get(precision)
        self._budget = token_budget
        self._device = model.device

    def answer(self, rollouts: Sequence[Rollout]) -> list[Rollout | str]:
        """Each rollout with its ``ref_logprobs`` [L] float32, or one sentence that says why it has none."""
        answers: list[Rollout | str] = [_refusal(rollout) or rollout for rollout in rollouts]
        able = [i for i, answer in enumerate(answers) if isinstance(answer, Rollout)]
        lengths = np.array([len(rollouts[i].prompt.token_ids) + len(rollouts[i].response_ids) for i in able], np.int64)
        for batch in padded_batches(lengths, self._budget):
            chosen = [able[place] for place in batch]
            for i, answer in zip(chosen, self._pass([rollouts[i] for i in chosen]), strict=True):
                answers[i] = answer
        return answers

    def _pass(self, rollouts: Sequence[Rollout]) -> list[Rollout | str]:
        try:
            found = self._logprobs(rollouts)
        except torch.OutOfMemoryError:
            tokens = max(len(r.prompt.token_ids) + len(r.response_ids) for r in rollouts)
            sentence = (
                f"The reference model ran out of memory with {len(rollouts)} sequences of up to {tokens} tokens; "
                "lower reference.token_budget."
            )
            return [sentence] * len(rollouts)
        return [
            replace(rollout, ref_logprobs=logprobs)
            if np.isfinite(logprobs).all()
            else "The reference model's log-probs are not all finite."
            for rollout, logprobs in zip(rollouts, found, strict=True)
        ]

    @torch.no_grad()
    def _logprobs(self, rollouts: Sequence[Rollout]) -> list[FloatArray]:
        batch = pack([TrainSample(replace(rollout, ref_logprobs=None), reward=0.0) for rollout in rollouts])
        inputs = PackedInputs.build(batch.token_ids, batch.cu_seqlens, batch.response_mask, self._device)
        autocast = contextlib.nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)
        with autocast:
            facts: TokenFacts = self._policy(inputs, self._temperature)
        flat = facts.logprobs.float().cpu().numpy()
        return np.split(flat, np.cumsum([len(rollout.response_ids) for rollout in rollouts])[:-1])


def _refusal(rollout: Rollout) -> str | None:
    if len(rollout.prompt.token_ids) == 0 or len(rollout.response_ids) == 0:
        return "The reference model has nothing to score: prompt or response is empty."
    return None
