"""Sequence parallelism: ranks that share one batch each take a stretch of its tokens, and some heads in attention.

Ulysses (Jacobs et al., 2309.14509): every layer but attention works token by token, so a rank needs only its stretch;
for attention an all-to-all turns stretches of all heads into all tokens of some heads, and a second one reverses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.attention.attention import Layout, PackedLayout
from asyncrlhf.learner.attention.tiles import Scoring
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.model.sequence import SequenceParallel, part_of
from asyncrlhf.learner.ranks import Peers
from asyncrlhf.learner.settings.model_fits import check_heads_of_sequence, heads_of


@dataclass(frozen=True, kw_only=True)
class _Stretch(Layout):
    """This rank's tokens of a packed batch; ``position_ids`` are theirs."""

    whole: PackedLayout
    peers: Peers
    exchange: Any  # deepspeed's UlyssesSPAttentionHF around ``_some_heads``

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        heads, kv_heads = self.exchange.attn_head_count, self.exchange.global_kv_head_count
        size = self.exchange.attn_head_size
        wanted = [(heads, size), (kv_heads, size), (kv_heads, size)]
        found = [tuple(x.shape[1::2]) for x in (query, key, value)]
        if found != wanted:
            raise ConfigError(
                f"learner.sequence_parallel_size={self.peers.ranks}: a {type(module).__name__} has {found} heads and "
                f"numbers a head of queries, keys and values; allowed: {wanted} in every layer."
            )
        given = {"position_ids": self.position_ids, "whole": self.whole, "rank": self.peers.rank, "scoring": scoring}
        out, _ = self.exchange(module, query, key, value, None, **given)
        return out.view(1, query.shape[2], query.shape[1], query.shape[3])


class Ulysses(SequenceParallel):
    """``learner.sequence_parallel_size``. Frozen models process the whole share on each of its ranks.

    Raises ConfigError if the attention heads cannot be divided evenly.
    """

    def __init__(self, model: transformers.PreTrainedModel, peers: Peers) -> None:
        """DeepSpeed's communication must be initialised."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # takes seconds

        super().__init__(peers)
        config = model.config.get_text_config()
        check_heads_of_sequence(model.config, peers.ranks)
        heads, kv_heads = heads_of(model.config)
        self._exchange = UlyssesSPAttentionHF(
            attn=_some_heads,
            batch_size=1,
            attn_head_count=heads,
            attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kv_head_count=kv_heads,
            num_hidden_layers=config.num_hidden_layers,
            process_group=peers.group,
            seq_length_is_variable=True,
        )

    def stretch(self, inputs: PackedInputs) -> tuple[PackedInputs, torch.Tensor]:
        count = inputs.token_ids.shape[1]
        size = -(-count // self._peers.ranks)
        first = self._peers.rank * size

        def part(values: torch.Tensor) -> torch.Tensor:
            return F.pad(values, (0, size * self._peers.ranks - count))[:, first : first + size]

        own = torch.nonzero((inputs.rows >= first) & (inputs.rows < first + size)).squeeze(1)
        whole = inputs.layout
        assert isinstance(whole, PackedLayout), "a stretch is cut of a whole batch"
        routes = None if whole.routes is None else part(whole.routes.T).T
        places = part(whole.position_ids)
        layout = _Stretch(position_ids=places, whole=whole, peers=self._peers, exchange=self._exchange, routes=routes)
        rows = inputs.rows[own] - first
        return part_of(inputs, own, token_ids=part(inputs.token_ids), rows=rows, layout=layout), own


def _some_heads(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    whole: PackedLayout,
    rank: int,
    scoring: Scoring,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over all tokens and this rank's heads: [1, heads, padded T, D] to [1, padded T, heads, D]."""
    count, padded = whole.position_ids.shape[1], query.shape[2]
    if scoring.sinks is not None:  # of these heads
        scoring = scoring._replace(sinks=scoring.sinks[rank * query.shape[1] : (rank + 1) * query.shape[1]])
    q, k, v = (x[:, :, :count] for x in (query, key, value))
    return F.pad(whole.attend(module, q, k, v, scoring), (0, 0, 0, 0, 0, padded - count)), None
