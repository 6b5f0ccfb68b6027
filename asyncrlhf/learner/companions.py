"""The models beside the policy: critic, slow EMA copy, and what serves reference and critic elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.learner.attention import use_packed_attention
from asyncrlhf.learner.forward import PackedInputs, PackedPolicy, SequenceSplit, TokenFacts, packed_hidden
from asyncrlhf.learner.rollout_passes import RolloutPasses


class ValueModel(nn.Module):
    """Maps ``PackedInputs`` to the values [M] of the states in which the M response tokens were chosen.

    The trunk starts as a copy of the policy's and then learns on its own, so that the value loss cannot disturb the
    policy. The head starts at zero: the first advantages are those of no baseline. ``keep_policy=False`` takes the
    trunk itself, where no policy is needed beside it.
    """

    def __init__(self, policy: PreTrainedModel, keep_policy: bool = True) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(policy.base_model) if keep_policy else policy.base_model
        weight = policy.get_output_embeddings().weight
        self.head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._sequence: SequenceSplit | None = None

    def split(self, sequence: SequenceSplit) -> None:
        """As ``PackedPolicy.split``."""
        self._sequence = sequence

    def forward(self, inputs: PackedInputs) -> torch.Tensor:
        if self._sequence is None:
            return self._alone(inputs)
        local, own = self._sequence.stretch(inputs)
        return self._sequence.together(self._alone(local), own, len(inputs.rows))

    def _alone(self, inputs: PackedInputs) -> torch.Tensor:
        hidden = packed_hidden(self.trunk, inputs).index_select(0, inputs.rows)
        # No view: FSDP2 puts a hook on what a module returns, which a change in place would take from it.
        return self.head(hidden).float().sum(-1)


class EmaPolicy:
    """A frozen copy of the policy that follows it: target = decay target + (1 - decay) policy, once a learner step.

    The same on every rank, as the policy is; it costs its memory and one forward pass a step (IMPACT, 1912.00167, has
    a target network that is replaced now and then instead).
    """

    def __init__(self, model: PreTrainedModel, decay: float, device: torch.device) -> None:
        self._decay = decay
        self._copy: nn.Module = nn.Module.to(copy.deepcopy(model).eval().requires_grad_(False), device)
        self.policy = PackedPolicy(self._copy)  # type: ignore[arg-type]

    @torch.no_grad()
    def update(self, policy: Iterable[tuple[str, torch.Tensor]]) -> None:
        """``policy``: its named parameters, in the model's order."""
        for target, (_, source) in zip(self._copy.parameters(), policy, strict=True):
            target.lerp_(source.to(target), 1.0 - self._decay)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._copy.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._copy.load_state_dict(state)


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

    def _flat(self, inputs: PackedInputs) -> torch.Tensor:
        facts: TokenFacts = self._policy(inputs, self._temperature)
        return facts.logprobs


class ServedCritic(RolloutPasses):
    """Gives what the learner's own critic of that version would give: the same packed pass.

    Args:
        policy: the model that the learner starts with, on its device; its trunk becomes the critic's.
        precision, token_budget: as in :class:`~asyncrlhf.learner.rollout_passes.RolloutPasses`.
    """

    model_name, what, setting = "critic", "values", "critic.token_budget"

    def __init__(self, policy: PreTrainedModel, *, precision: str, token_budget: int) -> None:
        super().__init__(policy.device, precision, token_budget)
        use_packed_attention(policy)
        self._critic = ValueModel(policy, keep_policy=False).eval()
        self._trained = {name: p.detach() for name, p in self._critic.named_parameters() if p.requires_grad}
        self._critic.requires_grad_(False)
        self.version: int | None = None

    @torch.no_grad()
    def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Be the critic of ``version``. Raises WeightSyncError when the tensors are not those that training changes."""
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
        values: torch.Tensor = self._critic(inputs)
        return values
