"""The loss of one microbatch: the policy-gradient kernel under the algorithm's switches, KL, entropy, own losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrlhf.algorithms.aggregate import aggregate_loss
from asyncrlhf.algorithms.coefficients import COEFFICIENTS, Coefficient
from asyncrlhf.algorithms.gates import opsm_gate
from asyncrlhf.algorithms.kl import kl_loss
from asyncrlhf.algorithms.losses import policy_loss, value_loss
from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.plan import Microbatch, StepPlan
from asyncrlhf.learner.targets import Targets, correction_weight, proximal_of
from asyncrlhf.learner.user_loss import LossInputs, UserLoss


@dataclass(frozen=True)
class MicrobatchLoss:
    """``loss`` carries the gradient; ``clipped`` [m] is detached: the tokens on which the clip rule or a gate acted."""

    loss: torch.Tensor
    clipped: torch.Tensor


@dataclass(frozen=True)
class _Facts:
    """One microbatch's part of everything that a loss may look at: m tokens, n sequences."""

    policy: torch.Tensor  # [m] with gradient
    entropy: torch.Tensor  # [m] with gradient
    behavior: torch.Tensor  # [m]
    proximal: torch.Tensor  # [m]
    ref: torch.Tensor | None  # [m]
    advantages: torch.Tensor  # [m]
    mask: torch.Tensor  # [m]
    ids: torch.Tensor  # [m] from 0
    rewards: torch.Tensor  # [n]
    group_ids: torch.Tensor  # [n]
    sample_weights: torch.Tensor  # [n]
    version_lag: torch.Tensor  # [m]
    gate: torch.Tensor | None  # [m]
    head_losses: torch.Tensor | None  # [n]


class MicrobatchLosses:
    """Computes the policy's part of each microbatch in the loss of its optimizer update.

    Every loss is divided by ``normaliser``, which is counted over the whole update, so that losses and gradients of
    the microbatches of all ranks add up to the update's.
    """

    def __init__(self, config: AlgorithmConfig, own: UserLoss | None = None) -> None:
        self._config = config
        self._rule = coefficient_rule(config)
        self._own = own

    def __call__(
        self,
        plan: StepPlan,
        microbatch: Microbatch,
        targets: Targets,
        policy: torch.Tensor,
        entropy: torch.Tensor,
        normaliser: torch.Tensor,
    ) -> MicrobatchLoss:
        """``policy`` and ``entropy`` [m] carry the gradient."""
        config = self._config
        facts = _facts(config, plan, microbatch, targets, policy, entropy)
        anchor = {"self": None, "mu": facts.behavior, "ref": None}.get(config.anchor, facts.proximal)
        weight = None
        if config.correction != "none":
            weight = correction_weight(config, facts.proximal, facts.behavior, facts.mask, facts.ids)[0]
        if self._own is not None:
            result = self._own_loss(self._own, facts, normaliser)
        elif config.head != "policy":
            result = self._head_loss(facts, normaliser)
        else:
            result = self._policy_loss(facts, anchor, weight, normaliser)
        loss = result.loss
        if config.kl == "loss":
            loss = loss + config.beta * self._kl(facts, anchor, weight, normaliser)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * self._sum(facts.entropy, facts, normaliser)
        return MicrobatchLoss(loss, result.clipped)

    def _policy_loss(
        self, facts: _Facts, anchor: torch.Tensor | None, weight: torch.Tensor | None, normaliser: torch.Tensor
    ) -> MicrobatchLoss:
        config, gate = self._config, facts.gate
        if config.gate == "opsm":
            gate = opsm_gate(
                facts.policy.detach(),
                facts.behavior,
                facts.advantages,
                facts.mask,
                facts.ids,
                delta=config.off_policy_mask_threshold,
            )
        result = policy_loss(
            facts.policy,
            anchor,
            facts.advantages,
            facts.mask,
            facts.ids,
            coefficient=self._rule,
            normaliser=normaliser,
            level=config.level,
            aggregate=config.aggregate,
            weight=weight,
            sample_weights=facts.sample_weights,
            gate=gate,
            ratio_bound=config.largest_ratio,
        )
        return MicrobatchLoss(result.loss, result.clipped)

    def _head_loss(self, facts: _Facts, normaliser: torch.Tensor) -> MicrobatchLoss:
        """The head's coefficients through the same kernel; the value is replaced by the head's own loss."""
        assert facts.head_losses is not None
        result = policy_loss(
            facts.policy,
            None,
            facts.advantages,
            facts.mask,
            facts.ids,
            coefficient=COEFFICIENTS["one"](),
            normaliser=normaliser,
            aggregate="seq_sum",
            sample_weights=facts.sample_weights,
        )
        value = (facts.head_losses * facts.sample_weights).sum() / normaliser.clamp(min=1.0)
        return MicrobatchLoss(result.loss - result.loss.detach() + value.to(result.loss.dtype), result.clipped)

    def _own_loss(self, own: UserLoss, facts: _Facts, normaliser: torch.Tensor) -> MicrobatchLoss:
        per_token = own(
            LossInputs(
                policy_logprobs=facts.policy,
                behavior_logprobs=facts.behavior,
                proximal_logprobs=facts.proximal,
                ref_logprobs=facts.ref,
                advantages=facts.advantages,
                rewards=facts.rewards,
                loss_mask=facts.mask,
                sequence_ids=facts.ids,
                group_ids=facts.group_ids,
                version_lag=facts.version_lag,
                entropy=facts.entropy,
            )
        )
        return MicrobatchLoss(self._sum(per_token, facts, normaliser), torch.zeros_like(facts.mask))

    def _kl(
        self, facts: _Facts, anchor: torch.Tensor | None, weight: torch.Tensor | None, normaliser: torch.Tensor
    ) -> torch.Tensor:
        """Under the same ratio and weight as the policy loss: its gradient is that of KL(pi || target) on every token
        that neither clips."""
        config = self._config
        target = facts.ref if config.kl_target == "ref" else facts.behavior
        assert target is not None
        return kl_loss(
            facts.policy,
            target,
            anchor,
            facts.mask,
            facts.ids,
            estimator=config.kl_estimator,
            normaliser=normaliser,
            importance_weighted=config.kl_importance_weighted,
            weight=weight,
            aggregate=config.aggregate,
            sample_weights=facts.sample_weights,
            ratio_bound=config.largest_ratio,
        )

    def _sum(self, per_token: torch.Tensor, facts: _Facts, normaliser: torch.Tensor) -> torch.Tensor:
        return aggregate_loss(
            per_token,
            facts.mask,
            facts.ids,
            how=self._config.aggregate,
            normaliser=normaliser,
            sample_weights=facts.sample_weights,
        )


def critic_loss(
    config: AlgorithmConfig,
    plan: StepPlan,
    microbatch: Microbatch,
    targets: Targets,
    values: torch.Tensor,
    normaliser: torch.Tensor,
) -> torch.Tensor:
    """The critic's part of one microbatch, a mean over the update's tokens: 0-dim. ``values`` [m] have the gradient."""
    assert targets.old_values is not None and targets.returns is not None
    span, sequences = microbatch.span, microbatch.sequences
    return value_loss(
        values,
        targets.old_values[span],
        targets.returns[span],
        plan.tokens.loss_mask[span],
        plan.tokens.sequence_ids[span] - sequences.start,
        clip=config.value_clip,
        normaliser=normaliser,
        sample_weights=plan.tokens.weights[sequences],
    )


def coefficient_rule(config: AlgorithmConfig) -> Coefficient:
    """The clip rule that ``algorithm.coef`` and its bounds name."""
    bounds: dict[str, tuple[float, ...]] = {
        "one": (),
        "clip": (config.epsilon, config.epsilon_high, config.dual_clip),
        "cap": (config.cap_low, config.cap_high),
        "band": (config.cap_low, config.cap_high),
        "signed": (config.cap_low, config.cap_high),
        "soft": (config.sapo_temperature_pos, config.sapo_temperature_neg),
        "gamma": (config.vespo_k_pos, config.vespo_lambda_pos, config.vespo_k_neg, config.vespo_lambda_neg),
        "dprob": (config.delta_low, config.delta_high, config.cap_high),
        "geoclip": (config.epsilon, config.epsilon_high),
    }
    return COEFFICIENTS[config.coef](*bounds[config.coef])


def _facts(
    config: AlgorithmConfig,
    plan: StepPlan,
    microbatch: Microbatch,
    targets: Targets,
    policy: torch.Tensor,
    entropy: torch.Tensor,
) -> _Facts:
    span, sequences, tokens = microbatch.span, microbatch.sequences, plan.tokens

    def part(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[span]

    behavior, lag = tokens.behavior[span], tokens.version_lag[span]
    return _Facts(
        policy=policy,
        entropy=entropy,
        behavior=behavior,
        proximal=proximal_of(config, policy, behavior, lag, part(targets.proximal), part(targets.ema)),
        ref=part(targets.ref),
        advantages=targets.advantages[span],
        mask=tokens.loss_mask[span],
        ids=tokens.sequence_ids[span] - sequences.start,
        rewards=targets.rewards[sequences],
        group_ids=tokens.group_ids[sequences],
        sample_weights=tokens.weights[sequences],
        version_lag=lag,
        gate=part(targets.gate),
        head_losses=None if targets.head_losses is None else targets.head_losses[sequences],
    )
