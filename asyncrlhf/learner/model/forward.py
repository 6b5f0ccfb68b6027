"""Packed forward passes: a batch as tensors, the module that gives log-probs and entropies, a float32 head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from asyncrlhf.algorithms.logprobs import KeptSets, collision_probability, kept_mass, token_logprobs
from asyncrlhf.learner.attention.attention import use_packed_attention
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.model.model_pass import last_hidden, predicting_logits, silence_dropout, trunk_of
from asyncrlhf.models.vocabulary import sampled_ids

if TYPE_CHECKING:
    from asyncrlhf.learner.model.sequence import SequenceParallel
from asyncrlhf.errors import ConfigError

# Logits kept for the backward pass: beyond this number, rows pass the output layer in chunks that are recomputed.
MAX_LOGITS = 2**27
# Operations of a linear layer and of selecting rows before it: a model that does more to its logits is not plain.
PLAIN_OPERATIONS = {
    "aten::alias", "aten::detach", "aten::view", "aten::_unsafe_view", "aten::slice", "aten::select", "aten::zeros",
    "aten::t", "aten::transpose", "aten::mm", "aten::addmm", "aten::expand", "aten::bmm", "aten::linear",
    "aten::_to_copy", "aten::empty", "aten::unsqueeze",
}  # fmt: skip


class TokenFacts(NamedTuple):
    """A policy's log-probs and entropies of M response tokens."""

    logprobs: torch.Tensor  # [M]
    entropies: torch.Tensor  # [M]
    collision: torch.Tensor  # [M] sum_v pi_v^2, detached; empty unless the policy was built to give it
    kept_mass: torch.Tensor  # [M] of the whole distribution, detached; empty unless the inputs have kept sets

    def stacked(self) -> torch.Tensor:
        """The facts that are present as one tensor [2 to 4, M], as a module must return if ZeRO-3 hooks its outputs."""
        return torch.stack([fact for fact in self if len(fact)])

    @classmethod
    def unstacked(cls, facts: torch.Tensor, truncated: bool) -> TokenFacts:
        """The inverse of :meth:`stacked`; ``truncated``: the inputs have kept sets."""
        logprobs, entropies, *rest = facts.unbind(0)
        none = logprobs.new_empty(0)
        mass = rest.pop().detach() if truncated else none
        return cls(logprobs, entropies, rest[0].detach() if rest else none, mass)


@dataclass
class Known:
    """What the backward pass need not compute again of a chunk of logits that it does compute again."""

    logprobs: list[torch.Tensor] = field(default_factory=list)  # see ``token_logprobs``
    others: list[torch.Tensor] = field(default_factory=list)  # collision and kept mass


class PackedPolicy(nn.Module):
    """A causal language model that maps ``PackedInputs`` to ``TokenFacts``.

    Logits are divided by ``temperature``, as in sampling, so that policy and behavior log-probs refer to the same
    distribution; where sampling was truncated, both are renormalised on the set that the sampler kept. Dropout is
    switched off for the same reason.

    ``packing`` False passes one sequence after the other by the model's own forward: slower, and right for every
    family (``packing.choose_policy`` chooses).

    Logits beyond ``MAX_LOGITS`` are computed in chunks inside one call of the output layer, so that ranks that gather
    its weight in each call make the same number of calls. ``chunked`` False: a model that changes its output layer's
    logits computes all of them at once, because its own forward would be called for each chunk.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        *,
        packing: bool = True,
        collision: bool = False,
        chunked: bool = True,
    ) -> None:
        super().__init__()
        if packing:
            use_packed_attention(model)
        silence_dropout(model)
        self.model, self.packing = model, packing
        self._plain_head, self._sampled = self._head_is_plain(), sampled_ids(model)
        self.collision = collision
        self.compiled = False  # also what is computed from the logits
        self.entropy_trains = True  # False: the gradient does not pass through the entropies
        self.sequence: SequenceParallel | None = None  # with it, each rank passes a part of the same inputs
        self._chunks = chunked

    def forward(self, inputs: PackedInputs, temperature: float) -> TokenFacts:
        if self.sequence is None:
            return self.alone(inputs, temperature)
        local, own = self.sequence.stretch(inputs)
        facts = self.alone(local, temperature)
        given = (True, True, self.collision, inputs.kept is not None)
        return TokenFacts(
            *(
                self.sequence.together(fact, own, len(inputs.rows)) if there else fact
                for fact, there in zip(facts, given, strict=True)
            )
        )

    def alone(self, inputs: PackedInputs, temperature: float) -> TokenFacts:
        """``forward`` on this rank only."""
        small = len(inputs.rows) * self._vocabulary <= MAX_LOGITS
        if not self._plain_head and (small or not self._chunks):
            return self._facts(predicting_logits(self.model, inputs), inputs.targets, temperature, inputs.kept)
        hidden = self._trunk(inputs).index_select(0, inputs.rows)
        return self.of_hidden(hidden, inputs.targets, temperature, inputs.kept)

    def of_hidden(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, kept: KeptSets | None = None
    ) -> TokenFacts:
        """The facts of ``targets`` [M], from the last hidden states [M, H] that predict them."""
        if len(hidden) * self._vocabulary <= MAX_LOGITS:
            return self._facts(self._head(hidden), targets, temperature, kept)
        if not self._plain_head:
            return self._chunked(self._head, hidden, targets, temperature, kept)
        head: Any = self.model.get_output_embeddings()
        own = head.forward
        with _replaced(head, lambda rows: self._chunked(own, rows, targets, temperature, kept).stacked()):
            facts = head(hidden)
        return TokenFacts.unstacked(facts, kept is not None)

    def _facts(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        kept: KeptSets | None,
        known: Known | None = None,
    ) -> TokenFacts:
        """``known``: what an earlier call for these logits found, or, from the first on, will have found."""
        ids, said = self._sampled, Known() if known is None else known
        options: dict[str, Any] = {"vocabulary": ids, "known": said.logprobs, "compiled": self.compiled}
        logprobs, entropies = token_logprobs(logits, targets, temperature=temperature, kept=kept, **options)
        entropies = entropies if self.entropy_trains else entropies.detach()
        if not said.others:
            collision = mass = logprobs.new_empty(0)
            if self.collision:
                collision = collision_probability(logits.detach()[:, :ids], temperature=temperature, kept=kept)
            if kept is not None:
                mass = kept_mass(logits.detach()[:, :ids], kept, temperature=temperature)
            said.others += (collision, mass)
        return TokenFacts(logprobs, entropies, *said.others)

    def _chunked(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        kept: KeptSets | None,
    ) -> TokenFacts:
        def score(first: int, rows: torch.Tensor, wanted: torch.Tensor, known: Known) -> TokenFacts:
            sets = None if kept is None else kept.rows(first, first + len(rows))
            return self._facts(head(rows), wanted, temperature, sets, known)

        size = max(1, MAX_LOGITS // self._vocabulary)
        parts = [
            checkpoint(
                score, start, hidden[start : start + size], targets[start : start + size], Known(),
                use_reentrant=False, preserve_rng_state=False,
            )
            for start in range(0, len(hidden), size)
        ]  # fmt: skip
        return TokenFacts(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))

    @property
    def _vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] of last hidden states [M, H]."""
        if self._plain_head:
            return self.model.get_output_embeddings()(hidden)
        return self._full_head(hidden)

    def _full_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """As :meth:`_head`, by the model's own forward with a trunk that only returns these states."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        trunk = trunk_of(self.model)
        states: Any = hidden[None]
        with _replaced(trunk, lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=states)):
            placeholder = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
            own: torch.Tensor = self.model(input_ids=placeholder, use_cache=False).logits[0]
        return own

    def _trunk(self, inputs: PackedInputs) -> torch.Tensor:
        return last_hidden(trunk_of(self.model), inputs)

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        """Whether only the output layer computes the model's logits, found by running the model."""
        head = self.model.get_output_embeddings()
        if head is None:
            return False
        if head.weight.is_meta:
            with _Operations() as operations:
                self._full_head(torch.empty((2, head.weight.shape[1]), dtype=head.weight.dtype, device="meta"))
            return operations.names <= PLAIN_OPERATIONS
        inputs = PackedInputs.build(
            np.arange(4, dtype=np.int64), np.array([0, 4]), np.array([False, True, True, True]), head.weight.device
        )
        hidden = self._trunk(inputs).index_select(0, inputs.rows)
        # Another width or type: the model changes its hidden states before the output layer.
        fits = (hidden.shape[1], hidden.dtype) == (head.weight.shape[1], head.weight.dtype)
        return fits and torch.allclose(
            head(hidden).float(), predicting_logits(self.model, inputs).float(), rtol=1e-3, atol=1e-4
        )


class _Operations(TorchDispatchMode):
    """Records the names of torch's operations while the context lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Calls of ``module`` run ``forward`` inside the module's hooks."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


class Float32Linear(nn.Linear):
    """A linear layer whose product, sum and result are float32, under autocast and with lower weights as well."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(input.float(), self.weight.float(), bias)


def use_float32_head(model: transformers.PreTrainedModel) -> None:
    """Let the output layer of ``model`` work in float32, in place; copies of the model made later do, too.

    Logits of bfloat16 keep 8 bits: at 20 they are rounded by up to 0.06, and so are log-probs. Raises ConfigError for a
    model whose output layer is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head) not in (nn.Linear, Float32Linear):
        raise ConfigError(
            f"learner.float32_head=true: the output layer of a {type(model).__name__} is a {type(head).__name__}; "
            "allowed: a plain linear layer without an adapter, or float32_head=false."
        )
    head.__class__ = Float32Linear
