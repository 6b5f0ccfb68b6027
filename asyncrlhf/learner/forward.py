"""Packed forward passes: a batch as tensors, and the module that turns it into log-probs and entropies of responses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from asyncrlhf.algorithms.logprobs import collision_probability, token_logprobs
from asyncrlhf.learner.attention import PackedLayout, use_packed_attention
from asyncrlhf.types import IntArray

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

    @classmethod
    def build(
        cls, token_ids: IntArray, cu_seqlens: IntArray, predicted: np.ndarray, device: torch.device | str = "cpu"
    ) -> PackedInputs:
        """From ``token_ids`` [T], ``cu_seqlens`` [N+1], and ``predicted`` [T]: False on prompts, True behind them."""
        starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
        prompts = lengths - np.add.reduceat(predicted.astype(np.int64), starts)
        owners = _first_with_prompt(token_ids, starts, prompts)
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
        return cls(
            token_ids=torch.from_numpy(token_ids[kept])[None].to(device),
            rows=torch.from_numpy(packed[sources]).to(device),
            targets=torch.from_numpy(token_ids[targets]).to(device),
            layout=PackedLayout.build(lengths - 1, prompts, owners, device),
        )

    @classmethod
    def dummy(cls, device: torch.device | str = "cpu") -> PackedInputs:
        """One predicted token: a rank without data takes part in the gradient reduction with zero times its loss."""
        return cls.build(np.zeros(2, np.int64), np.array([0, 2]), np.array([False, True]), device)


class TokenFacts(NamedTuple):
    """What a policy says of M response tokens."""

    logprobs: torch.Tensor  # [M]
    entropies: torch.Tensor  # [M]
    collision: torch.Tensor  # [M] sum_v pi_v^2, detached; empty unless the policy was built to give it


class SequenceSplit(Protocol):
    """Shares one batch out over ranks, token by token."""

    def stretch(self, inputs: PackedInputs) -> tuple[PackedInputs, torch.Tensor]:
        """This rank's part, and which of the M predictions are made from it: [own] indices."""
        ...

    def together(self, part: torch.Tensor, own: torch.Tensor, count: int) -> torch.Tensor:
        """[count] from each rank's values [own]."""
        ...


class PackedPolicy(nn.Module):
    """A causal language model that maps ``PackedInputs`` to ``TokenFacts``.

    Logits are divided by ``temperature``, as in sampling, so that policy and behavior log-probs speak of the same
    distribution; top-k and top-p are not applied again. Dropout is switched off for the same reason.

    ``chunked`` False holds all logits at once: for weights that each call of the output layer gathers from the ranks,
    which must then make equally many.
    """

    def __init__(
        self, model: PreTrainedModel, *, compile: bool = False, collision: bool = False, chunked: bool = True
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
        self._sequence: SequenceSplit | None = None
        self._chunks = chunked

    def split(self, sequence: SequenceSplit) -> None:
        """Have each of a group of ranks, which are given the same inputs, pass a stretch of them."""
        self._sequence = sequence

    def forward(self, inputs: PackedInputs, temperature: float) -> TokenFacts:
        if self._sequence is None:
            return self.alone(inputs, temperature)
        local, own = self._sequence.stretch(inputs)
        facts = self.alone(local, temperature)
        given, missing = (facts, ()) if self._collision else (facts[:2], facts[2:])
        return TokenFacts(*(self._sequence.together(fact, own, len(inputs.rows)) for fact in given), *missing)

    def alone(self, inputs: PackedInputs, temperature: float) -> TokenFacts:
        """``forward`` without any other rank."""
        if not self._plain_head:
            return self._facts(self._full_logits(inputs), inputs.targets, temperature)
        return self.of_hidden(self._hidden(inputs).index_select(0, inputs.rows), inputs.targets, temperature)

    def of_hidden(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> TokenFacts:
        """Of ``targets`` [M], by the last hidden states [M, H] that predict them."""
        if not self._chunks or len(hidden) * self._vocabulary <= MAX_LOGITS:
            return self._facts(self._head(hidden), targets, temperature)
        return self._chunked(hidden, targets, temperature)

    def _facts(self, logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> TokenFacts:
        logprobs, entropies = token_logprobs(logits, targets, temperature=temperature)
        if not self._collision:
            return TokenFacts(logprobs, entropies, logprobs.new_empty(0))
        return TokenFacts(logprobs, entropies, collision_probability(logits.detach(), temperature=temperature))

    def _chunked(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> TokenFacts:
        def score(rows: torch.Tensor, wanted: torch.Tensor) -> TokenFacts:
            return self._facts(self._head(rows), wanted, temperature)

        size = max(1, MAX_LOGITS // self._vocabulary)
        parts = [
            checkpoint(score, rows, wanted, use_reentrant=False, preserve_rng_state=False)
            for rows, wanted in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        return TokenFacts(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))

    @property
    def _vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] of last hidden states [M, H]; what does more than the output layer is asked of the model's own
        forward, around a trunk that only hands these states over."""
        if self._plain_head:
            logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
            return logits
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
        logits = self.model(
            input_ids=inputs.token_ids,
            position_ids=inputs.layout.position_ids,
            packed_layout=inputs.layout,
            use_cache=False,
            **arguments,
        ).logits[0]
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
    output = backbone(
        input_ids=inputs.token_ids,
        position_ids=inputs.layout.position_ids,
        packed_layout=inputs.layout,
        use_cache=False,
    )
    return output.last_hidden_state[0]


def _first_with_prompt(token_ids: IntArray, starts: IntArray, prompts: IntArray) -> IntArray:
    """For each sequence, the first one with the same prompt: [N]."""
    seen: dict[bytes, int] = {}
    return np.array(
        [
            seen.setdefault(token_ids[start : start + length].tobytes(), index)
            for index, (start, length) in enumerate(zip(starts, prompts, strict=True))
        ]
    )
