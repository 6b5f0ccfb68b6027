"""From one loss per token to one number: four aggregations, with a normaliser over the whole optimizer update.

| how | loss |
|---|---|
| ``token`` | sum over all tokens / tokens (DAPO) |
| ``seq_mean`` | mean over sequences of the sequence's token mean (GRPO, GSPO) |
| ``seq_sum`` | mean over sequences of the sequence's token sum (REINFORCE, RLOO) |
| ``const`` | sum over all tokens / (sequences x a constant length) (Dr. GRPO) |

Tokens and sequences are counted on the loss mask, before any rejection; a sequence without a masked token is not
counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrlhf.algorithms.masked import masked_values, segment_sum, sequence_lengths

AGGREGATES = ("token", "seq_mean", "seq_sum", "const")


def normaliser_count(
    how: str, loss_mask: Tensor, sequence_ids: Tensor, *, constant_length: float | None = None
) -> Tensor:
    """This microbatch's, or this rank's, contribution to the normaliser: 0-dim float64.

    ``constant_length``: tokens, for ``const`` only; usually the longest completion allowed.
    """
    if how not in AGGREGATES:
        raise ValueError(f"aggregate={how} is not known; allowed: {', '.join(AGGREGATES)}.")
    if how == "token":
        return loss_mask.sum().double()
    sequences = (segment_sum(loss_mask.long(), sequence_ids, len(loss_mask)) > 0).sum().double()
    if how != "const":
        return sequences
    if constant_length is None or constant_length <= 0:
        raise ValueError(f"aggregate=const needs a constant length in tokens, > 0; it was {constant_length}.")
    return sequences * constant_length


def aggregate_loss(
    per_token: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    how: str,
    normaliser: Tensor | float,
    sample_weights: Tensor | None = None,
) -> Tensor:
    """Sum of ``per_token [T]`` over the mask under ``how``, divided by ``normaliser``: 0-dim; 0 for an empty mask.

    ``normaliser`` is ``normaliser_count`` added over everything that one optimizer update sees. ``sample_weights [N]``
    multiplies sequences and is not normalised.
    """
    kept = masked_values(per_token, loss_mask)
    if how == "seq_mean":
        kept = kept / sequence_lengths(loss_mask, sequence_ids)
    if sample_weights is not None:
        kept = kept * sample_weights.to(kept.dtype)[sequence_ids]
    # A normaliser is a count: it is below 1 only when nothing is masked in, and then the sum is 0 as well.
    count = torch.as_tensor(normaliser, dtype=kept.dtype, device=kept.device).clamp(min=1.0)
    return kept.sum() / count
