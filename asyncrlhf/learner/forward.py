"""Packed forward passes: a batch as tensors, the module that gives log-probs and entropies, a float32 head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from asyncrlhf.algorithms.logprobs import KeptSets, collision_probability, kept_mass, token_logprobs
from asyncrlhf.data.vocabulary import sampled_ids
from asyncrlhf.learner.attention import Layout, PackedLayout, use_packed_attention
from asyncrlhf.learner.model_pass import last_hidden, predicting_logits, silence_dropout, trunk_of
from asyncrlhf.types import IdArray, IntArray, TrainBatch

if TYPE_CHECKING:
    from asyncrlhf.learner.sequence import SequenceParallel

# Logits kept for the backward pass: beyond this number, rows pass the output layer in chunks that are recomputed.
MAX_LOGITS = 2**27
# Operations of a linear layer and of selecting rows before it: a model that does more to its logits is not plain.
PLAIN_OPERATIONS = {
    "aten::alias", "aten::detach", "aten::view", "aten::_unsafe_view", "aten::slice", "aten::select", "aten::zeros",
    "aten::t", "aten::transpose", "aten::mm", "aten::addmm", "aten::expand", "aten::bmm", "aten::linear",
    "aten::_to_copy", "aten::empty", "aten::unsqueeze",
}  # fmt: skip


@dataclass(frozen=True)
class PackedInputs:
    """The inputs of one forward pass. M is the number of predicted tokens.

    The last token of a sequence predicts nothing, so it is left out. Equal prompts (those of a group) are computed
    once: the log-probs and their gradients are the same, and a group of G saves G - 1 prompts. K tokens remain.
    """

    token_ids: torch.Tensor  # [1, K]
    rows: torch.Tensor  # [M] the position whose hidden state predicts each target
    targets: torch.Tensor  # [M]
    layout: Layout
    kept: KeptSets | None = None  # of the M targets, where sampling was truncated

    @classmethod
    def build(
        cls,
        token_ids: IntArray,
        cu_seqlens: IntArray,
        predicted: np.ndarray,
        device: torch.device | str = "cpu",
        sets: tuple[IdArray, IdArray] | None = None,
        routes: np.ndarray | None = None,
    ) -> PackedInputs:
        """From ``token_ids`` [T], ``cu_seqlens`` [N+1], and ``predicted`` [T]: False on prompts, True after them.

        ``sets``: the kept ids and the counts [T] of a batch whose sampling was truncated. ``routes`` [T, E]: the
        experts of each token; prompts are equal if theirs are, too.
        """
        starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
        prompts = lengths - np.add.reduceat(predicted.astype(np.int64), starts)
        seen: dict[bytes, int] = {}  # the first sequence with each prompt, which owns it
        facts = [token_ids] if routes is None else [token_ids, routes]
        spans = zip(starts, starts + prompts, strict=True)
        texts = (b"".join(fact[first:end].tobytes() for fact in facts) for first, end in spans)
        owners = np.array([seen.setdefault(text, index) for index, text in enumerate(texts)])
        shared = np.where(owners == np.arange(len(owners)), 0, prompts)  # prompt tokens that are packed with the owner
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(token_ids)) - starts[sequence]
        kept = (place >= shared[sequence]) & (place < lengths[sequence] - 1)
        packed = np.cumsum(kept) - 1  # [T] the new position of each kept token
        targets = np.flatnonzero(predicted)
        sources = targets - 1
        first = place[targets] == prompts[sequence[targets]]
        owner = owners[sequence[targets[first]]]
        sources[first] = starts[owner] + prompts[owner] - 1
        allowed = None
        if sets is not None:
            allowed = KeptSets.of_counts(torch.from_numpy(sets[0]).to(device), torch.from_numpy(sets[1][targets]))
        return cls(
            token_ids=torch.from_numpy(token_ids[kept])[None].to(device),
            rows=torch.from_numpy(packed[sources]).to(device),
            targets=torch.from_numpy(token_ids[targets]).to(device),
            layout=PackedLayout.build(
                lengths - 1,
                prompts,
                owners,
                device,
                None if routes is None else torch.from_numpy(routes[kept].astype(np.int16)).to(device),
            ),
            kept=allowed,
        )

    @classmethod
    def of_batch(
        cls, batch: TrainBatch, first: int = 0, last: int | None = None, device: torch.device | str = "cpu"
    ) -> PackedInputs:
        """The sequences ``first`` to ``last`` (not included; None: all) of a batch, whose responses are predicted."""
        boundaries = batch.cu_seqlens[first : None if last is None else last + 1]
        part = slice(int(boundaries[0]), int(boundaries[-1]))
        sets = None
        if batch.kept_ids is not None and batch.kept_counts is not None:
            start = int(batch.kept_counts[: part.start].sum())
            counts = batch.kept_counts[part]
            sets = (batch.kept_ids[start : start + int(counts.sum())], counts)
        ids, predicted = batch.token_ids[part], batch.response_mask[part]
        routes = None if batch.routed_experts is None else batch.routed_experts[part]
        return cls.build(ids, boundaries - part.start, predicted, device, sets, routes)

    @classmethod
    def of_texts(
        cls, texts: Sequence[np.ndarray], device: torch.device | str = "cpu"
    ) -> tuple[PackedInputs, list[int]]:
        """Texts of which all tokens but the first are predicted, and their numbers."""
        ends = np.cumsum([len(text) for text in texts])
        predicted = np.ones(ends[-1], dtype=np.bool_)
        predicted[np.concatenate([[0], ends[:-1]])] = False
        tokens = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
        inputs = cls.build(tokens, np.concatenate([[0], ends]), predicted, device)
        return inputs, [len(text) - 1 for text in texts]

    @classmethod
    def dummy(cls, device: torch.device | str = "cpu") -> PackedInputs:
        """One predicted token: a rank without data takes part in the gradient reduction with zero times its loss."""
        return cls.build(np.zeros(2, np.int64), np.array([0, 2]), np.array([False, True]), device)


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
        self._hidden = self._trunk
        self._plain_head, self._sampled = self._head_is_plain(), sampled_ids(model)
        self.collision = collision
        self.sequence: SequenceParallel | None = None  # with it, each rank passes a part of the same inputs
        self._chunks = chunked

    def compile_trunk(self) -> None:
        # A function, not a submodule: the trunk's parameters must not be registered a second time.
        self._hidden = torch.compile(self._trunk, dynamic=True)

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
        hidden = self._hidden(inputs).index_select(0, inputs.rows)
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
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: float, kept: KeptSets | None
    ) -> TokenFacts:
        ids = self._sampled
        logprobs, entropies = token_logprobs(logits, targets, temperature=temperature, kept=kept, vocabulary=ids)
        collision = mass = logprobs.new_empty(0)
        if self.collision:
            collision = collision_probability(logits.detach()[:, :ids], temperature=temperature, kept=kept)
        if kept is not None:
            mass = kept_mass(logits.detach()[:, :ids], kept, temperature=temperature)
        return TokenFacts(logprobs, entropies, collision, mass)

    def _chunked(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        kept: KeptSets | None,
    ) -> TokenFacts:
        def score(first: int, rows: torch.Tensor, wanted: torch.Tensor) -> TokenFacts:
            sets = None if kept is None else kept.rows(first, first + len(rows))
            return self._facts(head(rows), wanted, temperature, sets)

        size = max(1, MAX_LOGITS // self._vocabulary)
        parts = [
            checkpoint(
                score, start, hidden[start : start + size], targets[start : start + size],
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
