"""What the forward passes of one learner step found, kept for the lookahead and the metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrlhf.learner.forward import TokenFacts


@dataclass
class StepRecord:
    """Detached values of the M response tokens of a rank."""

    policy: torch.Tensor  # [M] of the last pass
    proximal: torch.Tensor  # [M] of the first pass, before any update
    entropy: torch.Tensor  # [M] of the last pass
    collision: torch.Tensor  # [M] of the last pass, where the policy gives it
    clipped: torch.Tensor  # [M] share of the passes in which the clip rule or a gate acted
    kept_mass: torch.Tensor  # [M] of the first pass, where sampling was truncated; 0 before it

    @classmethod
    def empty(cls, tokens: int, device: torch.device) -> StepRecord:
        return cls(*(torch.zeros(tokens, device=device) for _ in range(6)))

    def keep(self, span: slice, facts: TokenFacts) -> None:
        self.policy[span] = facts.logprobs.detach()
        self.entropy[span] = facts.entropies.detach()
        if len(facts.collision):
            self.collision[span] = facts.collision
        if len(facts.kept_mass):
            first = self.kept_mass[span]
            self.kept_mass[span] = torch.where(first > 0, first, facts.kept_mass.to(first))

    def facts(self, span: slice) -> TokenFacts:
        """What was kept, without gradient."""
        return TokenFacts(self.policy[span], self.entropy[span], self.collision[span], self.kept_mass[span])
