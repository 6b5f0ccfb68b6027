"""Forward passes over planned microbatches: records, and dummy passes if all ranks must take part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from asyncrlhf.data.packing import microbatch_indices
from asyncrlhf.learner.model.forward import TokenFacts
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.model.model_pass import autocast
from asyncrlhf.learner.step.cut_answers import cut_answers
from asyncrlhf.learner.step.plan import Microbatch, ResponseTokens, StepPlan
from asyncrlhf.types import FloatArray

FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class ForwardPasses:
    """``updater``: an ``Updater``, which imports this room. ``precision``: a ``learner.mixed_precision``, by
    autocast or because the weights have it. Policies come from ``updater`` or are modules with the same interface."""

    def __init__(
        self, updater: Any, temperature: float, precision: str, by_autocast: bool, device: torch.device
    ) -> None:
        self._updater, self._temperature, self._device = updater, temperature, device
        self._dtype = FORMATS.get(precision) if by_autocast else None
        self.dtype = FORMATS.get(precision, torch.float32)  # of the passes
        self._dummy = PackedInputs.dummy(device)

    def facts(self, policy: Any, microbatch: Microbatch | None) -> TokenFacts:
        """The facts of the microbatch's response tokens; of a dummy for None."""
        with autocast(self._device, self._dtype):
            return policy(self._dummy if microbatch is None else microbatch.inputs, self._temperature)

    def values(self, critic: Any, microbatch: Microbatch | None) -> torch.Tensor:
        with autocast(self._device, self._dtype):
            return critic(self._dummy if microbatch is None else microbatch.inputs)

    @torch.no_grad()
    def look(self, microbatches: Sequence[Microbatch], tokens: ResponseTokens) -> None:
        """Record the present policy's log-probs of the microbatches."""
        for microbatch in self._updater.looks(self._updater.policy, microbatches):
            facts = self.facts(self._updater.policy, microbatch)
            if microbatch is not None:
                tokens.part([microbatch]).keep(facts)

    def all_logprobs(self, plan: StepPlan, policy: Any) -> torch.Tensor:
        """A frozen policy's log-probs of the rank's response tokens: [M]."""
        count = len(plan.tokens.loss_mask)
        return self._all(policy, plan.microbatches, count, lambda part: self.facts(policy, part).logprobs)

    def all_values(self, plan: StepPlan) -> torch.Tensor:
        """The critic's values of the rank's response tokens: [M]."""
        return self._critics(plan.microbatches, len(plan.tokens.loss_mask))

    def final_values(self, plan: StepPlan, token_budget: int) -> torch.Tensor:
        """The present critic's value of the state after each truncated answer, 0 after a complete one: [N]."""
        microbatches, sequences = cut_answers(plan, token_budget, self._device)
        found = self._critics(microbatches, len(sequences))
        return torch.zeros(len(plan.tokens.rewards), device=self._device).index_put((sequences,), found)

    def _critics(self, microbatches: Sequence[Microbatch], count: int) -> torch.Tensor:
        critic = self._updater.critic
        return self._all(critic, microbatches, count, lambda part: self.values(critic, part))

    @torch.no_grad()
    def _all(
        self, module: Any, microbatches: Sequence[Microbatch], count: int, said: Callable[[Any], torch.Tensor]
    ) -> torch.Tensor:
        """The values of all microbatches, each in its place: [count]."""
        result = torch.zeros(count, device=self._device)
        for microbatch in self._updater.looks(module, microbatches):
            found = said(microbatch)
            if microbatch is not None:
                result[microbatch.span] = found.float()
        return result

    @torch.no_grad()
    def score(self, policy: Any, texts: Sequence[np.ndarray], token_budget: int) -> list[FloatArray]:
        """Log-probs [len-1] of each token of each text given those before it, at temperature 1."""
        found = [np.zeros(0, dtype=np.float32) for _ in texts]
        long = np.array([place for place, text in enumerate(texts) if len(text) > 1], np.int64)
        for run in microbatch_indices(np.array([len(texts[place]) for place in long], np.int64), token_budget):
            inputs, lengths = PackedInputs.of_texts([texts[place] for place in long[run]], self._device)
            with autocast(self._device, self._dtype):
                flat = policy(inputs, 1.0).logprobs.float().cpu().numpy()
            for place, own in zip(long[run], np.split(flat, np.cumsum(lengths)[:-1]), strict=True):
                found[place] = own
        return found
