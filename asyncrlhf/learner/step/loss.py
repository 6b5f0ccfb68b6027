"""The loss of one microbatch: the policy-gradient kernel under the algorithm's switches, KL, entropy, own losses."""

from __future__ import annotations

from typing import Any

import torch

from asyncrlhf.algorithms.aggregate import aggregate_loss
from asyncrlhf.algorithms.coefficients import COEFFICIENTS, Coefficient
from asyncrlhf.algorithms.gates import GATES, GateInputs
from asyncrlhf.algorithms.kl import kl_loss
from asyncrlhf.algorithms.losses import policy_loss, value_loss
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.step.plan import ResponseTokens
from asyncrlhf.learner.step.targets import correction_weight, proximal_of
from asyncrlhf.learner.step.user_loss import LossInputs, UserLoss

Options = dict[str, Any]


class MicrobatchLosses:
    """Computes each microbatch's term of the policy loss of an optimizer update.

    Every loss is divided by ``normaliser``, which is counted over the whole update, so that losses and gradients of
    the microbatches of all ranks add up to the update's.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._rule = coefficient_rule(config)
        self._own = UserLoss(config.loss.target) if config.loss.target else None

    def __call__(self, tokens: ResponseTokens, normaliser: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, clipped [m]) of a microbatch, whose policy log-probs and entropies carry the gradient. ``clipped`` are
        the tokens on which the clip rule or a gate acted."""
        config = self._config
        where = (tokens.loss_mask, tokens.sequence_ids)
        shared: Options = {"normaliser": normaliser, "sample_weights": tokens.weights}
        tokens.proximal_logprobs = proximal_of(config, tokens)
        anchors = {"self": None, "ref": None, "mu": tokens.behavior_logprobs}
        anchor = anchors.get(config.anchor, tokens.proximal_logprobs)
        weight = None if config.correction == "none" else correction_weight(config, tokens)[0]
        ratio: Options = shared | {"weight": weight, "aggregate": config.aggregate, "ratio_bound": config.largest_ratio}
        clipped = torch.zeros_like(tokens.loss_mask)
        if self._own is not None:
            per_token = self._own(LossInputs(*(getattr(tokens, name) for name in LossInputs._fields)))
            loss = aggregate_loss(per_token, *where, how=config.aggregate, **shared)
        elif config.head != "policy":
            loss = self._head_loss(tokens, shared)
        else:
            loss, clipped = self._policy_loss(tokens, anchor, ratio)
        if config.kl == "loss":
            loss = loss + config.beta * self._kl(tokens, anchor, ratio)
        if config.entropy_coef > 0:
            entropy = aggregate_loss(tokens.entropy, *where, how=config.aggregate, **shared)
            loss = loss - config.entropy_coef * entropy
        return loss, clipped

    def _policy_loss(
        self, tokens: ResponseTokens, anchor: torch.Tensor | None, ratio: Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config, gate = self._config, tokens.gate
        where = (tokens.advantages, tokens.loss_mask, tokens.sequence_ids)
        if config.gate in GATES:
            inputs = GateInputs(*(getattr(tokens, name) for name in GateInputs._fields))
            gate = GATES[config.gate](inputs, config.off_policy_mask_threshold)
        result = policy_loss(
            tokens.policy_logprobs, anchor, *where, coefficient=self._rule, level=config.level, gate=gate, **ratio
        )
        return result.loss, result.clipped

    def _head_loss(self, tokens: ResponseTokens, shared: Options) -> torch.Tensor:
        """The head's coefficients through the same kernel; the value is replaced by the head's own loss."""
        assert tokens.head_losses is not None
        where = (tokens.advantages, tokens.loss_mask, tokens.sequence_ids)
        rule = COEFFICIENTS["one"]()
        kernel = policy_loss(tokens.policy_logprobs, None, *where, coefficient=rule, aggregate="seq_sum", **shared).loss
        value = (tokens.head_losses * tokens.weights).sum() / shared["normaliser"].clamp(min=1.0)
        return kernel - kernel.detach() + value.to(kernel.dtype)

    def _kl(self, tokens: ResponseTokens, anchor: torch.Tensor | None, ratio: Options) -> torch.Tensor:
        """Under the same ratio and weight as the policy loss: its gradient is that of KL(pi || target) on every token
        that neither clips."""
        config = self._config
        target = tokens.ref_logprobs if config.kl_target == "ref" else tokens.behavior_logprobs
        assert target is not None
        how: Options = {"estimator": config.loss_estimator, "importance_weighted": config.kl_importance_weighted}
        return kl_loss(tokens.policy_logprobs, target, anchor, tokens.loss_mask, tokens.sequence_ids, **how, **ratio)


def critic_loss(
    config: AlgorithmConfig, tokens: ResponseTokens, values: torch.Tensor, normaliser: torch.Tensor
) -> torch.Tensor:
    """The critic's term of one microbatch, a mean over the update's tokens: 0-dim. ``values`` [m] have the gradient."""
    assert tokens.values is not None and tokens.returns is not None
    shared: Options = {"normaliser": normaliser, "sample_weights": tokens.weights}
    where = (tokens.loss_mask, tokens.sequence_ids)
    return value_loss(values, tokens.values, tokens.returns, *where, clip=config.value_clip, **shared)


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
        "dprob": (config.epsilon, config.epsilon_high, config.cap_high),
        "geoclip": (config.epsilon, config.epsilon_high),
    }
    return COEFFICIENTS[config.coef](*bounds[config.coef])
