"""Reward models that read sequences while they are still being sampled, and have little left at their end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.readahead.messages import Chunk, Prefilled
from asyncrlhf.readahead.passes import Passes, RefusedError, past_refusal
from asyncrlhf.readahead.readings import Reading, Readings
from asyncrlhf.rewards.model import SLOW_PASS, ModelSource, head_of
from asyncrlhf.rewards.model_loading import policy_ids
from asyncrlhf.rewards.reward import Score
from asyncrlhf.rewards.scorer import Scorer
from asyncrlhf.types import RewardResult, Rollout


class ReadingModel(Readings):
    """A causal :class:`ModelSource` that reads ahead: a score is made of the last token's hidden state [H]."""

    def __init__(self, source: ModelSource, passes: Passes, cache_tokens: int, budget: int) -> None:
        """``budget``: new tokens of one pass."""
        super().__init__(passes, source.scores, cache_tokens, budget, source.max_length)
        self._source = source

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return self.answers(rollouts)

    def close(self) -> None:
        self._source.close()

    def _pass(self, batch: Sequence[Reading]) -> None:
        tokens = sum(len(reading.tokens) - reading.cached for reading in batch)
        who = f"A pass of the reward model over {tokens} new tokens of {len(batch)} sequences"
        self._source.thread.call(who, lambda: super(ReadingModel, self)._pass(batch), SLOW_PASS)

    def _answers(self, rollouts: Sequence[Rollout], readings: Sequence[Reading]) -> list[Score]:
        # On a GPU it is here that the passes are waited for.
        who = f"A pass of the reward model over {len(readings)} sequences"
        values = self._source.thread.call(who, lambda: self._head(readings), SLOW_PASS)
        return [v if math.isfinite(v) else RewardError(f"The reward model's score is {v}.") for v in values]

    @torch.inference_mode()
    def _head(self, readings: Sequence[Reading]) -> list[float]:
        hidden = torch.stack([reading.last for reading in readings if reading.last is not None])
        return [float(v) for v in head_of(self._source.model)(hidden)[:, 0].float().cpu()]


def reading_model(source: ModelSource, cache_tokens: int, budget: int) -> ReadingModel | ModelSource:
    """``source`` itself where it reads other tokens than the policy's, or no kind of passes continues its sequences."""
    if source.encoder is policy_ids and source.is_causal and past_refusal(source.model.config) is None:
        for packed in (True, False):
            # The errors of packed attention: for what it does not compute, and for a model that does not hand it on.
            with contextlib.suppress(RefusedError, ConfigError, ValueError):
                made = ReadingModel(source, Passes(source.model, packed), cache_tokens, budget)
                made.try_out(
                    lambda score: score if isinstance(score, float) else math.nan, exact=source.model.dtype.itemsize > 2
                )
                return made
    return source


class ReadingScorer:
    """A scorer, those of whose models that can read ahead; with ``cache_tokens=0`` none does."""

    def __init__(self, scorer: Scorer, cache_tokens: int, budget: int) -> None:
        self._scorer = scorer
        for name, part in scorer.sources.items() if cache_tokens else ():
            if isinstance(part.source, ModelSource):
                scorer.sources[name] = part._replace(source=reading_model(part.source, cache_tokens, budget))
        self.readers = [source for source, _ in scorer.sources.values() if isinstance(source, ReadingModel)]

    def score(self, rollouts: Sequence[Rollout]) -> list[RewardResult]:
        """As :meth:`Scorer.score`; what is scored, or failed by any part, is forgotten."""
        results = self._scorer.score(rollouts)
        for reader in self.readers:
            reader.release(rollout.rollout_id for rollout in rollouts)
        return results

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released``, then let the models that can read ``chunks`` ahead."""
        answers = [reader.prefill(released, chunks) for reader in self.readers]
        return Prefilled(bool(answers), sorted({i for answer in answers for i in answer.evicted}))

    def close(self) -> None:
        self._scorer.close()
