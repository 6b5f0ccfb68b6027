"""The user's own loss: the argument of ``algorithm.loss.target``, its return value, and the checks of both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from asyncrlhf.algorithms.masked import masked_values
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.plugins import guarded, load_function


class LossInputs(NamedTuple):
    """The one argument of a user's loss: one microbatch of whole sequences, T response tokens and N sequences.

    A group's siblings may be in other microbatches: comparisons of siblings belong in the advantage. Log-probs are
    taken at the sampling temperature, and are 0 outside ``loss_mask``; only the first and the last tensor have a
    gradient.
    """

    policy_logprobs: torch.Tensor  # [T] log pi_theta, with gradient
    behavior_logprobs: torch.Tensor  # [T] log mu: the policy that sampled each token
    proximal_logprobs: torch.Tensor  # [T] the policy before this step's first update (the target network: anchor=ema)
    ref_logprobs: torch.Tensor | None  # [T] the reference policy, with algorithm.kl other than none
    advantages: torch.Tensor  # [T] under algorithm.advantage
    rewards: torch.Tensor  # [N]
    loss_mask: torch.Tensor  # [T] bool: the tokens that count
    sequence_ids: torch.Tensor  # [T] int64, 0 to N-1, sorted
    group_ids: torch.Tensor  # [N] int64
    version_lag: torch.Tensor  # [T] int64: learner steps since the token was sampled
    entropy: torch.Tensor  # [T] entropy of the policy's distribution in nats, with gradient


LossFunction = Callable[[LossInputs], torch.Tensor]


class UserLoss:
    """Calls the function and checks what it returns.

    Raises ConfigError with one sentence when the target cannot be imported, is not callable or does not take exactly
    one argument.
    """

    def __init__(self, target: str) -> None:
        self._where = f"algorithm.loss.target={target}"
        self._function = load_loss(target)

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """The loss per token [T], with gradient. Raises AsyncRLHFError for a wrong type or shape, no gradient, and
        values that are not finite although all inputs are."""
        mask = inputs.loss_mask
        names = ("policy_logprobs", "behavior_logprobs", "proximal_logprobs", "advantages")
        clean = inputs._replace(**{name: masked_values(getattr(inputs, name), mask) for name in names})
        returned = self._function(clean)
        self._check(returned, clean)
        return returned

    def _check(self, returned: Any, inputs: LossInputs) -> None:
        tokens = len(inputs.loss_mask)
        if not isinstance(returned, torch.Tensor):
            raise AsyncRLHFError(
                f"{self._where} returned {type(returned).__name__}; allowed: a tensor of one loss a token."
            )
        if returned.shape != (tokens,):
            raise AsyncRLHFError(
                f"{self._where} returned a tensor of shape {list(returned.shape)} for {tokens} tokens; "
                f"allowed: [{tokens}], one loss a token, which is averaged here."
            )
        if inputs.policy_logprobs.requires_grad and not returned.requires_grad:
            raise AsyncRLHFError(
                f"{self._where} returned a loss without gradient; allowed: one computed from inputs.policy_logprobs."
            )
        broken = ~torch.isfinite(masked_values(returned.detach(), inputs.loss_mask))
        given = inputs.policy_logprobs.detach() + inputs.behavior_logprobs + inputs.advantages
        if bool(broken.any()) and bool(torch.isfinite(given).all()):
            raise AsyncRLHFError(
                f"{self._where} returned values that are not finite for {int(broken.sum())} of {len(broken)} tokens "
                "although log-probs and advantages are; allowed: finite numbers wherever loss_mask is true."
            )


def check_loss(target: str, with_reference: bool) -> None:
    """Call the loss once on two sequences of two tokens; raises ConfigError for a loss that cannot be trained with."""
    loss, where = UserLoss(target), f"algorithm.loss.target={target}"
    ones, whole = torch.full((4,), -1.0), torch.tensor([0, 0, 1, 1])
    inputs = LossInputs(
        policy_logprobs=ones.clone().requires_grad_(),
        behavior_logprobs=ones,
        proximal_logprobs=ones,
        ref_logprobs=ones if with_reference else None,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        rewards=torch.tensor([1.0, 0.0]),
        loss_mask=torch.ones(4, dtype=torch.bool),
        sequence_ids=whole,
        group_ids=torch.zeros(2, dtype=torch.int64),
        version_lag=torch.zeros(4, dtype=torch.int64),
        entropy=torch.ones(4, requires_grad=True),
    )
    try:
        guarded(f"{where} fails on two sequences of two tokens", lambda: loss(inputs))
    except AsyncRLHFError as error:
        raise ConfigError(str(error)) from error


def load_loss(target: str) -> LossFunction:
    """The function that ``package.module:function`` names; the working directory is searched too."""
    where, function = f"algorithm.loss.target={target}", load_function("algorithm.loss.target", target)
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} cannot be called with one argument ({error}); write it as f(inputs), where inputs is a "
            "learner.user_loss.LossInputs."
        ) from error
    return function
