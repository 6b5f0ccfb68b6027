"""Packed forward passes: a batch as tensors, the module that gives log-probs and entropies, a float32 head."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncrlhf.algorithms.logprobs import KeptSets, collision_probability, kept_mass, token_logprobs
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.attention import PackedLayout, use_packed_attention
from asyncrlhf.types import IdArray, IntArray, TrainBatch

if TYPE_CHECKING:
    from asyncrlhf.learner.ulysses import SequenceParallel

# Logits held for the backward pass: beyond this many, rows go through the output layer in chunks that are recomputed.
MAX_LOGITS = 2**27


@dataclass(frozen=True)
class PackedInputs:
    """What one forward pass needs. M is the number of predicted tokens.

    The last token of a sequence predicts nothing, so it is left out. Equal prompts (those of a group) are computed
    once: the log-probs and their gradients are the same, and a group of G saves G - 1 prompts. K tokens remain.
    """

    token_ids: torch.Tensor  # [1, K]
    rows: torch.Tensor  # [M] the position whose hidden state predicts each target
    targets: torch.Tensor  # [M]
    layout: PackedLayout
    kept: KeptSets | None = None  # of the M targets, where sampling was truncated

    @classmethod
    def build(
        cls,
        token_ids: IntArray,
        cu_seqlens: IntArray,
        predicted: np.ndarray,
        device: torch.device | str = "cpu",
        sets: tuple[IdArray, IdArray] | None = None,
    ) -> PackedInputs:
        """From ``token_ids`` [T], ``cu_seqlens`` [N+1], and ``predicted`` [T]: False on prompts, True behind them.

        ``sets``: the kept ids and the counts [T] of a batch whose sampling was truncated.
        """
        starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
        prompts = lengths - np.add.reduceat(predicted.astype(np.int64), starts)
        seen: dict[bytes, int] = {}  # the first sequence with each prompt, which owns it
        texts = (token_ids[first:end].tobytes() for first, end in zip(starts, starts + prompts, strict=True))
        owners = np.array([seen.setdefault(text, index) for index, text in enumerate(texts)])
        shared = np.where(owners == np.arange(len(owners)), 0, prompts)  # prompt tokens that lie with the owner
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(token_ids)) - starts[sequence]
        kept = (place >= shared[sequence]) & (place < lengths[sequence] - 1)
        packed = np.cumsum(kept) - 1  # [T] where each kept token went
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
            layout=PackedLayout.build(lengths - 1, prompts, owners, device),
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
        return cls.build(ids, boundaries - part.start, predicted, device, sets)

    @classmethod
    def dummy(cls, device: torch.device | str = "cpu") -> PackedInputs:
        """One predicted token: a rank without data takes part in the gradient reduction with zero times its loss."""
        return cls.build(np.zeros(2, np.int64), np.array([0, 2]), np.array([False, True]), device)


class TokenFacts(NamedTuple):
    """What a policy says of M response tokens."""

    logprobs: torch.Tensor  # [M]
    entropies: torch.Tensor  # [M]
    collision: torch.Tensor  # [M] sum_v pi_v^2, detached; empty unless the policy was built to give it
    kept_mass: torch.Tensor  # [M] of the whole distribution, detached; empty unless the inputs have kept sets


class PackedPolicy(nn.Module):
    """A causal language model that maps ``PackedInputs`` to ``TokenFacts``.

    Logits are divided by ``temperature``, as in sampling, so that policy and behavior log-probs speak of the same
    distribution; where sampling was truncated, both are renormalised on the set that the sampler kept. Dropout is
    switched off for the same reason.

    ``chunked`` False holds all logits at once: for weights that each call of the output layer gathers from the ranks,
    which must then make equally many.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        *,
        compile: bool = False,
        collision: bool = False,
        chunked: bool = True,
    ) -> None:
        super().__init__()
        use_packed_attention(model)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.model = model
        # A function, not a submodule: the trunk's parameters must not be registered a second time.
        self._hidden = torch.compile(self._trunk, dynamic=True) if compile else self._trunk
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._plain_head = self._head_is_plain()
        self._collision = collision
        self.sequence: SequenceParallel | None = None  # with it, ranks pass a stretch each of the same inputs
        self._chunks = chunked

    def forward(self, inputs: PackedInputs, temperature: float) -> TokenFacts:
        if self.sequence is None:
            return self.alone(inputs, temperature)
        local, own = self.sequence.stretch(inputs)
        facts = self.alone(local, temperature)
        given = (True, True, self._collision, inputs.kept is not None)
        return TokenFacts(
            *(
                self.sequence.together(fact, own, len(inputs.rows)) if there else fact
                for fact, there in zip(facts, given, strict=True)
            )
        )

    def alone(self, inputs: PackedInputs, temperature: float) -> TokenFacts:
        """``forward`` without any other rank."""
        if not self._plain_head:
            return self._facts(self._full_logits(inputs), inputs.targets, temperature, inputs.kept)
        hidden = self._hidden(inputs).index_select(0, inputs.rows)
        return self.of_hidden(hidden, inputs.targets, temperature, inputs.kept)

    def of_hidden(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, kept: KeptSets | None = None
    ) -> TokenFacts:
        """Of ``targets`` [M], by the last hidden states [M, H] that predict them."""
        if not self._chunks or len(hidden) * self._vocabulary <= MAX_LOGITS:
            return self._facts(self._head(hidden), targets, temperature, kept)
        return self._chunked(hidden, targets, temperature, kept)

    def _facts(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: float, kept: KeptSets | None
    ) -> TokenFacts:
        logprobs, entropies = token_logprobs(logits, targets, temperature=temperature, kept=kept)
        collision = mass = logprobs.new_empty(0)
        if self._collision:
            collision = collision_probability(logits.detach(), temperature=temperature, kept=kept)
        if kept is not None:
            mass = kept_mass(logits.detach(), kept, temperature=temperature)
        return TokenFacts(logprobs, entropies, collision, mass)

    def _chunked(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, kept: KeptSets | None
    ) -> TokenFacts:
        def score(first: int, rows: torch.Tensor, wanted: torch.Tensor) -> TokenFacts:
            sets = None if kept is None else kept.rows(first, first + len(rows))
            return self._facts(self._head(rows), wanted, temperature, sets)

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
        """Logits [M, V] of last hidden states [M, H]; what does more than the output layer is asked of the model's own
        forward, around a trunk that only hands these states over."""
        if self._plain_head:
            return self.model.get_output_embeddings()(hidden)
        from transformers.modeling_outputs import BaseModelOutputWithPast

        trunk: Any = self.model.base_model
        states: Any = hidden[None]
        before = vars(trunk).get("forward")
        trunk.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=states)
        try:
            placeholder = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
            own: torch.Tensor = self.model(input_ids=placeholder, use_cache=False).logits[0]
        finally:
            if before is None:
                del trunk.forward
            else:
                trunk.forward = before
        return own

    def _trunk(self, inputs: PackedInputs) -> torch.Tensor:
        return packed_hidden(self.model.base_model, inputs)

    def _full_logits(self, inputs: PackedInputs) -> torch.Tensor:
        """[M, V] by the model's own forward, which may scale or cap its logits."""
        arguments: dict[str, Any] = {"logits_to_keep": inputs.rows} if self._keeps_rows else {}
        logits = _call(self.model, inputs, **arguments).logits[0]
        return logits if self._keeps_rows else logits.index_select(0, inputs.rows)

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        """Whether the output layer alone gives the model's logits: asked of the model, whatever its family."""
        head = self.model.get_output_embeddings()
        if head is None:
            return False
        inputs = PackedInputs.build(
            np.arange(4, dtype=np.int64), np.array([0, 4]), np.array([False, True, True, True]), head.weight.device
        )
        logits = head(packed_hidden(self.model.base_model, inputs).index_select(0, inputs.rows))
        return torch.allclose(logits, self._full_logits(inputs), rtol=1e-3, atol=1e-4)


def packed_hidden(backbone: Any, inputs: PackedInputs) -> torch.Tensor:
    """The last hidden states [K, hidden] of ``inputs``."""
    return _call(backbone, inputs).last_hidden_state[0]


def _call(model: Any, inputs: PackedInputs, **more: Any) -> Any:
    places, layout = inputs.layout.position_ids, inputs.layout
    return model(input_ids=inputs.token_ids, position_ids=places, packed_layout=layout, use_cache=False, **more)


class Float32Linear(nn.Linear):
    """A linear layer whose product, sum and result are float32, under autocast and with lower weights as well."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(input.float(), self.weight.float(), bias)


def use_float32_head(model: transformers.PreTrainedModel) -> None:
    """Let the output layer of ``model`` work in float32, in place; copies of the model made later do, too.

    Logits of bfloat16 keep 8 bits: at 20 they are rounded by up to 0.06, and so are log-probs. Raises ConfigError for a
    model whose output layer is no plain linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head) not in (nn.Linear, Float32Linear):
        raise ConfigError(
            f"learner.float32_head=true: the output layer of a {type(model).__name__} is a {type(head).__name__}; "
            "allowed: a plain linear layer without an adapter, or float32_head=false."
        )
    head.__class__ = Float32Linear
