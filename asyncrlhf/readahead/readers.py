"""Reward models and a reference policy that read sequences while they are still being sampled."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.learner.model.model_pass import autocast
from asyncrlhf.learner.step.companions import ReferencePolicy
from asyncrlhf.readahead.owners import Chunk, Prefilled
from asyncrlhf.readahead.readings import Answer, Reading, Readings, past_refusal, reading_refusal
from asyncrlhf.rewards.model import SLOW_PASS, ModelSource, context_of, head_of, policy_ids
from asyncrlhf.rewards.reward import RewardSource, Score, Scorer
from asyncrlhf.types import FloatArray, IntArray, Rollout


class ReadingModel(Readings, RewardSource):
    """A causal :class:`ModelSource` that reads ahead: a score is computed from the last token's hidden state [H]."""

    def __init__(self, source: ModelSource, cache_tokens: int, budget: int) -> None:
        """``budget``: new tokens of one pass."""
        super().__init__(source.model, source.scores, cache_tokens, budget, source.max_length)
        self._source = source

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return self.answers(rollouts)

    def close(self) -> None:
        self._source.close()

    def _pass(self, batch: Sequence[Reading]) -> None:
        tokens = sum(len(reading.tokens) - reading.cached for reading in batch)
        who = f"A pass of the reward model over {tokens} new tokens of {len(batch)} sequences"
        self._source.thread.call(who, lambda: super(ReadingModel, self)._pass(batch), SLOW_PASS)

    def _answers(self, readings: Sequence[Reading]) -> list[Score]:
        # On a GPU this waits for the passes.
        who = f"A pass of the reward model over {len(readings)} sequences"
        values = self._source.thread.call(who, lambda: self._head(readings), SLOW_PASS)
        return [v if math.isfinite(v) else RewardError(f"The reward model's score is {v}.") for v in values]

    @torch.inference_mode()
    def _head(self, readings: Sequence[Reading]) -> list[float]:
        hidden = torch.stack([reading.last for reading in readings if reading.last is not None])
        return [float(v) for v in head_of(self._source.model)(hidden)[:, 0].float().cpu()]


def reading_model(source: ModelSource, cache_tokens: int, budget: int) -> ReadingModel | ModelSource:
    """``source`` itself if it reads other tokens than the policy's, or its model cannot continue sequences."""
    if source.encoder is policy_ids and source.is_causal and reading_refusal(source.model) is None:
        # Errors of packed attention: unsupported attention, or a model that does not pass it on.
        with contextlib.suppress(ConfigError, ValueError):
            made = ReadingModel(source, cache_tokens, budget)
            return made if made.try_out(exact=source.model.dtype.itemsize > 2) else source
    return source


def read_ahead(scorer: Scorer, cache_tokens: int, budget: int) -> list[ReadingModel]:
    """Let the capable models of a scorer read ahead, and return them; none with ``cache_tokens=0``."""
    for name, part in scorer.sources.items() if cache_tokens else ():
        if isinstance(part.source, ModelSource):
            scorer.sources[name] = part._replace(source=reading_model(part.source, cache_tokens, budget))
    return [part.source for part in scorer.sources.values() if isinstance(part.source, ReadingModel)]


class ReadingReference(ReferencePolicy):
    """A :class:`ReferencePolicy` that reads ahead, with a cache of up to ``cache_tokens`` tokens. With
    ``cache_tokens=0``, or if its model cannot continue sequences, ``readings`` is None and it reads whole rollouts."""

    def __init__(self, model: transformers.PreTrainedModel, *, cache_tokens: int, **options: Any) -> None:
        """``options``: of :class:`ReferencePolicy`."""
        super().__init__(model, **options)
        self.readings: LogprobReadings | None = None
        if cache_tokens and self._policy.packing and past_refusal(model.config) is None:
            made = LogprobReadings(self, super().answer, cache_tokens)
            if made.try_out(exact=model.dtype.itemsize > 2 and self._dtype is None):
                self.readings = made

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released``, then read ``chunks`` ahead."""
        return Prefilled(False) if self.readings is None else self.readings.prefill(released, chunks)

    def answer(self, rollouts: Sequence[Rollout]) -> list[FloatArray | str]:
        if self.readings is None:
            return super().answer(rollouts)
        answers = self.readings.answers(rollouts)
        self.readings.release(rollout.rollout_id for rollout in rollouts)
        return answers

    def _make_room(self) -> bool:
        return self.readings is not None and self.readings.give_all_up()


class LogprobReadings(Readings):
    """Reads response tokens with their log-probs, by the output layer of the learner's packed passes."""

    def __init__(self, reference: ReferencePolicy, whole: Answer, cache_tokens: int) -> None:
        model = reference._policy.model
        super().__init__(model, whole, cache_tokens, reference._budget, context_of(model))
        self._reference = reference

    def _pass(self, batch: Sequence[Reading]) -> None:
        with autocast(self._reference._device, self._reference._dtype):
            super()._pass(batch)

    def _keep(self, batch: Sequence[Reading], hidden: Sequence[torch.Tensor]) -> None:
        rows: list[torch.Tensor] = []
        targets: list[IntArray] = []
        for reading, states in zip(batch, hidden, strict=True):
            if reading.last is not None:  # it predicts the first of the new tokens
                states = torch.cat([reading.last[None], states])
            targets.append(reading.tokens[max(len(reading.tokens) - len(states) + 1, reading.prompt_length) :])
            rows.append(states[-1 - len(targets[-1]) : -1])
        flat, wanted = torch.cat(rows), torch.from_numpy(np.concatenate(targets))
        if len(flat):
            policy, temperature = self._reference._policy, self._reference._temperature
            found = policy.of_hidden(flat, wanted.to(flat.device), temperature).logprobs
            pieces = found.float().cpu().split([len(ids) for ids in targets])
            for reading, new in zip(batch, pieces, strict=True):
                reading.logprobs = np.concatenate([reading.logprobs, new.numpy()])

    def _answers(self, readings: Sequence[Reading]) -> list[FloatArray | str]:
        # As in a whole pass, an observed token has no log-prob.
        kept = (np.where(reading.sampled, reading.logprobs, np.float32(0)) for reading in readings)
        return [self._reference._checked(logprobs) for logprobs in kept]
