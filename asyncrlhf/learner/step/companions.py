"""The models beside the policy: critic, slow EMA copy, and the models of reference and critic services."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import nn

from asyncrlhf.data.branches import pass_length
from asyncrlhf.data.packing import microbatch_indices, pack
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.learner.model.forward import PackedPolicy, use_float32_head
from asyncrlhf.learner.model.halves import Halves, lower
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.model.model_pass import autocast, last_hidden, trunk_of
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.step.passes import FORMATS
from asyncrlhf.learner.step.wall import choose_policy, unlike_autocast
from asyncrlhf.models.plain_pass import set_attention
from asyncrlhf.types import FloatArray, Rollout, TrainSample

if TYPE_CHECKING:
    from asyncrlhf.learner.model.sequence import SequenceParallel


class ValueModel(nn.Module):
    """Maps ``PackedInputs`` to the values [M] of the states in which the M response tokens were chosen.

    The trunk starts as a copy of the policy's and is trained separately, so that the value loss does not affect the
    policy. The head starts at zero, so the first advantages have no baseline. ``keep_policy=False`` uses the policy's
    trunk itself, if the policy is not needed.
    """

    def __init__(self, policy: transformers.PreTrainedModel, keep_policy: bool = True) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(trunk_of(policy)) if keep_policy else trunk_of(policy)
        weight = policy.get_output_embeddings().weight
        self.head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.sequence: SequenceParallel | None = None  # as a ``PackedPolicy``'s

    def forward(self, inputs: PackedInputs) -> torch.Tensor:
        if self.sequence is None:
            return self._alone(inputs)
        local, own = self.sequence.stretch(inputs)
        return self.sequence.together(self._alone(local), own, len(inputs.rows))

    def _alone(self, inputs: PackedInputs) -> torch.Tensor:
        hidden = last_hidden(self.trunk, inputs).index_select(0, inputs.rows)
        # Not a view: FSDP2 puts a hook on a module's outputs, which a change in place would remove.
        return self.head(hidden).float().sum(-1)


def frozen_copy(policy: PackedPolicy, device: torch.device) -> PackedPolicy:
    """A copy of ``policy`` that follows it by :func:`follow`.

    Like the policy it is the same on every rank; it costs its memory and one forward pass per step (IMPACT, 1912.00167,
    replaces its target network from time to time instead).
    """
    model: Any = nn.Module.to(copy.deepcopy(policy.model).eval().requires_grad_(False), device)
    return PackedPolicy(model, packing=policy.packing)


def frozen_reference(
    reference: transformers.PreTrainedModel,
    config: LearnerConfig,
    device: torch.device,
    policy: PackedPolicy,
) -> PackedPolicy:
    """The reference as a policy that passes sequences like ``policy``, on ``device`` unless the updater moves it; in
    the policy's ring, if there is one."""
    frozen = reference.eval().requires_grad_(False)
    if config.float32_head:
        use_float32_head(frozen)
    if not config.sharded:
        nn.Module.to(frozen, device)
    if not policy.packing:
        set_attention(frozen, policy.model.config._attn_implementation)
    reference_policy = PackedPolicy(frozen, packing=policy.packing)
    if config.context_parallel_size > 1:
        reference_policy.sequence = policy.sequence
    return reference_policy


@torch.no_grad()
def follow(target: PackedPolicy, policy: Iterable[tuple[str, torch.Tensor]], decay: float) -> None:
    """target = decay target + (1 - decay) policy, whose named parameters come in the model's order."""
    for mine, (_, source) in zip(target.model.parameters(), policy, strict=True):
        mine.lerp_(source.to(mine), 1.0 - decay)


class RolloutPasses(ABC):
    """A frozen model's numbers for finished rollouts, computed in packed passes like the learner's; a failure affects
    only the rollouts of one pass.

    Args:
        policy: the frozen model, on its device.
        precision: a ``learner.mixed_precision``.
        token_budget: tokens of one forward pass; a longer sequence gets a separate pass.
    """

    model_name: str  # as sentences name it
    what: str  # what it gives
    setting: str  # that holds ``token_budget``

    def __init__(self, policy: PackedPolicy, precision: str, token_budget: int) -> None:
        self._device = policy.model.device
        self._halved = precision == "bfloat16" and not unlike_autocast(policy, torch.bfloat16)
        self._dtype = None if self._halved else FORMATS.get(precision)  # of autocast
        self._budget = token_budget

    @abstractmethod
    def _flat(self, inputs: PackedInputs) -> torch.Tensor:
        """One number per sampled token: [M]."""

    def _make_room(self) -> bool:
        """Free the memory held beside the weights after a pass ran out of it; returns False if there was none."""
        return False

    def answer(self, rollouts: Sequence[Rollout]) -> list[FloatArray | str]:
        """The numbers [L] float32 of each rollout, 0 at observed tokens, or one sentence that says why it has none."""
        refusal = f"The {self.model_name} has nothing to score: prompt or response is empty."
        answers: list[FloatArray | str] = [refusal] * len(rollouts)
        able = [i for i, rollout in enumerate(rollouts) if len(rollout.prompt.token_ids) and rollout.sampled.any()]
        lengths = np.array([pass_length(rollouts[i]) for i in able], np.int64)
        for batch in microbatch_indices(lengths, self._budget):
            chosen = [able[place] for place in batch]
            for i, answer in zip(chosen, self._pass([rollouts[i] for i in chosen]), strict=True):
                answers[i] = answer
        return answers

    def _pass(self, rollouts: Sequence[Rollout]) -> list[FloatArray | str]:
        found: list[FloatArray] | None = None
        # The pass's tensors that the error refers to are freed only after this clause.
        with contextlib.suppress(torch.OutOfMemoryError):
            found = self._numbers(rollouts)
        if found is None and self._make_room():
            return self._pass(rollouts)
        if found is None:
            tokens = max(map(pass_length, rollouts))
            many = f"{len(rollouts)} sequences of up to {tokens} tokens"
            return [f"The {self.model_name} ran out of memory with {many}; lower {self.setting}."] * len(rollouts)
        return [self._checked(numbers) for numbers in found]

    def _checked(self, numbers: FloatArray) -> FloatArray | str:
        return numbers if np.isfinite(numbers).all() else f"The {self.model_name}'s {self.what} are not all finite."

    @torch.no_grad()
    def _numbers(self, rollouts: Sequence[Rollout]) -> list[FloatArray]:
        plain = [replace(r, ref_logprobs=None, values=None, critic_version=None) for r in rollouts]
        batch = pack([TrainSample(rollout, reward=0.0) for rollout in plain])
        inputs = PackedInputs.of_batch(batch, device=self._device)
        with autocast(self._device, self._dtype):
            flat = self._flat(inputs).float().cpu().numpy()
        sampled = np.concatenate([rollout.sampled for rollout in rollouts])
        laid = np.zeros(len(sampled), np.float32)
        laid[sampled] = flat
        return np.split(laid, np.cumsum([len(rollout.response_ids) for rollout in rollouts])[:-1])


class ReferencePolicy(RolloutPasses):
    """Computes log-probs like a frozen model in the learner: by the same packed pass at the same temperature.

    Args:
        model: the frozen causal language model, on its device.
        temperature: the learner's; 0, greedy, counts as 1.
        precision, token_budget: as in :class:`RolloutPasses`.
    """

    model_name, what, setting = "reference model", "log-probs", "reference.token_budget"

    def __init__(
        self, model: transformers.PreTrainedModel, *, temperature: float, precision: str, token_budget: int
    ) -> None:
        self._policy, _ = choose_policy(model.eval().requires_grad_(False))
        super().__init__(self._policy, precision, token_budget)
        if self._halved:
            lower(model, torch.bfloat16)
        self._temperature = temperature or 1.0

    def _flat(self, inputs: PackedInputs) -> torch.Tensor:
        return self._policy(inputs, self._temperature).logprobs


class ServedCritic(RolloutPasses):
    """Computes values like the learner's critic of the same version, by the same packed pass.

    Args:
        policy: the model that the learner starts with, on its device; its trunk becomes the critic's.
        precision, token_budget: as in :class:`RolloutPasses`.
    """

    model_name, what, setting = "critic", "values", "critic.token_budget"

    def __init__(self, policy: transformers.PreTrainedModel, *, precision: str, token_budget: int) -> None:
        super().__init__(choose_policy(policy)[0], precision, token_budget)
        self._critic = ValueModel(policy, keep_policy=False).eval()
        if self._halved:
            Halves(self._critic, self._critic.trunk, torch.bfloat16)
        self._trained = {name: p.detach() for name, p in self._critic.named_parameters() if p.requires_grad}
        self._critic.requires_grad_(False)
        self.version: int | None = None

    @torch.no_grad()
    def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the critic's tensors of ``version``. Raises WeightSyncError if they are not those in training."""
        wrong = sorted(tensors.keys() ^ self._trained.keys())
        if wrong:
            raise WeightSyncError(
                f"The critic of version {version} does not fit its worker: {wrong[0]} is in one alone."
            )
        self.version = None
        for name, tensor in self._trained.items():
            tensor.copy_(tensors[name])
        self.version = version

    def _flat(self, inputs: PackedInputs) -> torch.Tensor:
        if self.version is None:
            raise WeightSyncError("A critic worker was asked for values before it held a version.")
        return self._critic(inputs)
