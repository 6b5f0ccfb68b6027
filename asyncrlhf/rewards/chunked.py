"""A causal reward model that reads sequences while they are still being sampled, and has little left at their end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from asyncrlhf.errors import RewardError
from asyncrlhf.rewards.chunked_passes import ChunkingRefusedError, Passes, build_passes
from asyncrlhf.rewards.model import SLOW_PASS, ModelSource, head_of
from asyncrlhf.rewards.model_loading import policy_ids
from asyncrlhf.rewards.readings import Readings, Stretch
from asyncrlhf.rewards.reward import RewardSource, Score, StuckError
from asyncrlhf.types import IntArray, Rollout


class ChunkedSource(Readings[torch.Tensor]):
    """A :class:`ModelSource` that reads ahead: of a sequence it keeps the last token's hidden state [H], which is what
    a score is made of."""

    def __init__(self, source: ModelSource, passes: Passes, cache_tokens: int, max_batch_tokens: int) -> None:
        super().__init__(
            passes,
            cache_tokens=cache_tokens,
            max_batch_tokens=max_batch_tokens,
            vocabulary=source.vocabulary,
            max_length=source.max_length,
        )
        self.source = source

    def _pass(self, batch: Sequence[Stretch[torch.Tensor]]) -> list[torch.Tensor]:
        tokens = sum(len(stretch.token_ids) - stretch.start for stretch in batch)
        who = f"A pass of the reward model over {tokens} new tokens of {len(batch)} sequences"
        return self.source.thread.call(who, partial(self._last, batch), SLOW_PASS)

    @torch.inference_mode()
    def _last(self, batch: Sequence[Stretch[torch.Tensor]]) -> list[torch.Tensor]:
        hidden = self._passes.extend([stretch.extension for stretch in batch])
        # Copies: a view would keep the hidden states of the whole pass.
        return list(torch.stack([states[-1] for states in hidden]))

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        encoded = [self.source.encoder(rollout) for rollout in rollouts]
        scores: list[Score] = [self.source.refusal(ids) or 0.0 for ids in encoded]
        fitting = [i for i, score in enumerate(scores) if not isinstance(score, RewardError)]
        try:
            values = self._values(
                [(rollouts[i].rollout_id, len(rollouts[i].prompt.token_ids), encoded[i]) for i in fitting]
            )
        except torch.OutOfMemoryError as error:
            self.give_all_up()
            raise RewardError(
                f"The reward model ran out of memory with {len(fitting)} sequences of up to "
                f"{max(map(len, encoded))} tokens; lower reward.max_batch_tokens or fusion.cache_tokens."
            ) from error
        except StuckError:
            self.give_all_up()
            raise
        for i, value in zip(fitting, values, strict=True):
            scores[i] = value if math.isfinite(value) else RewardError(f"The reward model's score is {value}.")
        return scores

    @torch.inference_mode()
    def _values(self, sequences: Sequence[tuple[int, int, IntArray]]) -> list[float]:
        if not sequences:
            return []
        hidden = torch.stack(self._finished(sequences))
        # On a GPU it is here that the passes are waited for.
        who = f"A pass of the reward model over {len(sequences)} sequences"
        return self.source.thread.call(who, partial(_head_scores, self.source.model, hidden), SLOW_PASS)

    def close(self) -> None:
        self.clear()
        self.source.close()


@torch.inference_mode()
def _head_scores(model: PreTrainedModel, hidden: torch.Tensor) -> list[float]:
    """The scores of N hidden states [N, H]."""
    return [float(v) for v in head_of(model)(hidden)[:, 0].float().cpu()]


def chunked(source: ModelSource, cache_tokens: int, max_batch_tokens: int) -> RewardSource:
    """``source`` with a cache, or as it is where it reads other tokens than the policy's or cannot be continued."""
    if source.encoder is not policy_ids:
        return source
    try:
        passes = source.thread.call_without_limit(lambda: build_passes(source.model))
    except ChunkingRefusedError:
        return source
    return ChunkedSource(source, passes, cache_tokens, max_batch_tokens)
