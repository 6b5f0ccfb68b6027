"""A reference policy that reads sequences while they are still being sampled, and has little left at their end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrlhf.learner.companions import ReferencePolicy
from asyncrlhf.readahead.messages import Chunk, Prefilled
from asyncrlhf.readahead.passes import Passes, RefusedError, past_refusal
from asyncrlhf.readahead.readings import Reading, Readings
from asyncrlhf.rewards.model import context_of
from asyncrlhf.types import FloatArray, IntArray, Rollout


class ReadingReference(ReferencePolicy):
    """A :class:`ReferencePolicy` that reads ahead, with a cache of up to ``cache_tokens`` tokens. With
    ``cache_tokens=0``, or where its model cannot be continued, ``readings`` is None and it reads whole rollouts."""

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, precision: str, token_budget: int, cache_tokens: int
    ) -> None:
        super().__init__(model, temperature=temperature, precision=precision, token_budget=token_budget)
        self.readings: LogprobReadings | None = None
        if cache_tokens and past_refusal(model.config) is None:
            with contextlib.suppress(RefusedError):
                made = LogprobReadings(self, model, super().answer, cache_tokens)
                made.try_out(
                    lambda answer: getattr(answer, "ref_logprobs", np.nan),
                    exact=model.dtype.itemsize > 2 and self._dtype is None,
                )
                self.readings = made

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released``, then read ``chunks`` ahead."""
        return Prefilled(False) if self.readings is None else self.readings.prefill(released, chunks)

    def answer(self, rollouts: Sequence[Rollout]) -> list[Rollout | str]:
        if self.readings is None:
            return super().answer(rollouts)
        answers = self.readings.answers(rollouts)
        self.readings.release(rollout.rollout_id for rollout in rollouts)
        return answers

    def _make_room(self) -> bool:
        return self.readings is not None and self.readings.give_all_up()


class LogprobReadings(Readings):
    """Reads response tokens with their log-probs, by the output layer of the learner's packed passes."""

    predicts = 1

    def __init__(
        self,
        reference: ReferencePolicy,
        model: PreTrainedModel,
        whole: Callable[[Sequence[Rollout]], list[Any]],
        cache_tokens: int,
    ) -> None:
        super().__init__(Passes(model), whole, cache_tokens, reference._budget, context_of(model))
        self._reference = reference

    def _pass(self, batch: Sequence[Reading]) -> None:
        with self._reference._autocast():
            super()._pass(batch)

    def _keep(self, batch: Sequence[Reading], hidden: Sequence[torch.Tensor]) -> None:
        rows: list[torch.Tensor] = []
        targets: list[IntArray] = []
        for reading, states in zip(batch, hidden, strict=True):
            if reading.last is not None:  # it predicts the first of the new tokens
                states = torch.cat([reading.last[None], states])
            targets.append(reading.tokens[max(len(reading.tokens) - len(states) + 1, reading.prompt_length) :])
            rows.append(states[-1 - len(targets[-1]) : -1])
        for reading, new in zip(batch, self._logprobs(torch.cat(rows), targets), strict=True):
            reading.logprobs = np.concatenate([reading.logprobs, new])

    def _logprobs(self, rows: torch.Tensor, targets: Sequence[IntArray]) -> list[FloatArray]:
        """[n] float32 of each sequence's tokens [n], all of which the hidden states [M, H] predict in order."""
        policy, temperature = self._reference._policy, self._reference._temperature
        wanted = torch.from_numpy(np.concatenate(targets)).to(rows.device)
        flat = policy.of_hidden(rows, wanted, temperature).logprobs.float().cpu().numpy() if len(rows) else np.empty(0)
        return np.split(flat.astype(np.float32), np.cumsum([len(ids) for ids in targets])[:-1])

    @torch.inference_mode()
    def _answers(self, rollouts: Sequence[Rollout], readings: Sequence[Reading]) -> list[Rollout | str]:
        with self._reference._autocast():
            rows = torch.stack([reading.last for reading in readings if reading.last is not None])
            ends = self._logprobs(rows, [rollout.response_ids[-1:] for rollout in rollouts])
        return [
            self._reference._checked(rollout, np.append(reading.logprobs, end)[: len(rollout.response_ids)])
            for rollout, reading, end in zip(rollouts, readings, ends, strict=True)
        ]
