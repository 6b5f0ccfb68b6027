"""A reference policy that reads sequences while they are still being sampled, and has little left at their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.pretrained import load_shape
from asyncrlhf.learner.companions import ReferencePolicy
from asyncrlhf.learner.forward import PackedInputs, PackedPolicy
from asyncrlhf.rewards.chunked_messages import Chunk, Prefilled
from asyncrlhf.rewards.chunked_passes import ChunkingRefusedError, PackedPasses, first_right, past_refusal
from asyncrlhf.rewards.model import context_of
from asyncrlhf.rewards.readings import Readings, Stretch
from asyncrlhf.types import FloatArray, IntArray, Rollout


def chunk_refusal(model: ModelConfig) -> str | None:
    """What the config of a reference model alone says against chunks, as the end of a sentence."""
    return past_refusal(load_shape(model))


@dataclass(frozen=True)
class Told:
    """What the reference said of a sequence so far."""

    logprobs: FloatArray  # of the response tokens that were read
    last: torch.Tensor  # [H] the hidden state of the last token, which predicts the one to come


class LogprobReadings(Readings[Told]):
    """Reads response tokens with their log-probs, by the output layer of the learner's packed passes."""

    # The last one's hidden state predicts the first response token.
    own_prompt_tokens = 1

    def __init__(
        self,
        policy: PackedPolicy,
        *,
        temperature: float,
        autocast: Callable[[], AbstractContextManager[Any]],
        cache_tokens: int,
        token_budget: int,
    ) -> None:
        """Raises ChunkingRefusedError for a model that cannot be continued from its keys and values."""
        model = policy.model
        refusal = past_refusal(model.config)
        if refusal is not None:
            raise ChunkingRefusedError(refusal)
        embeddings: Any = model.get_input_embeddings()
        self._policy = policy
        self._temperature = temperature
        self._autocast = autocast
        super().__init__(
            first_right(model, (PackedPasses,), self._both_ways),
            cache_tokens=cache_tokens,
            max_batch_tokens=token_budget,
            vocabulary=int(embeddings.num_embeddings),
            max_length=context_of(model),
        )

    def _both_ways(
        self, texts: Sequence[IntArray], hidden: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ends = np.cumsum([len(ids) for ids in texts])
        starts = np.concatenate([[0], ends])
        predicted = ~np.isin(np.arange(ends[-1]), starts)
        inputs = PackedInputs.build(np.concatenate(texts), starts, predicted, hidden[0].device)
        pieces = torch.cat([states[:-1] for states in hidden])
        whole = self._policy.alone(inputs, self._temperature)
        return whole.logprobs, self._policy.of_hidden(pieces, inputs.targets, self._temperature).logprobs

    @torch.inference_mode()
    def _pass(self, batch: Sequence[Stretch[Told]]) -> list[Told]:
        with self._autocast():
            hidden = self._passes.extend([stretch.extension for stretch in batch])
            rows: list[torch.Tensor] = []
            targets: list[IntArray] = []
            for stretch, states in zip(batch, hidden, strict=True):
                # Each token is predicted by the one before it: the first of these by what was read last.
                first = max(stretch.start, stretch.prompt_length)
                if stretch.made is not None and first == stretch.start:
                    rows.append(stretch.made.last[None])
                rows.append(states[max(first - 1 - stretch.start, 0) : -1])
                targets.append(stretch.token_ids[first:])
            found = np.split(self._logprobs(torch.cat(rows), targets), np.cumsum([len(ids) for ids in targets])[:-1])
            # Copies: a view would keep the hidden states of the whole pass.
            last = torch.stack([states[-1] for states in hidden])
        before = [stretch.made.logprobs if stretch.made is not None else found[0][:0] for stretch in batch]
        return [Told(np.concatenate([old, new]), state) for old, new, state in zip(before, found, last, strict=True)]

    def _logprobs(self, rows: torch.Tensor, targets: Sequence[IntArray]) -> FloatArray:
        """[M] float32 of M tokens, by the hidden states [M, H] that predict them."""
        if not len(rows):
            return np.empty(0, np.float32)
        wanted = torch.from_numpy(np.concatenate(targets)).to(rows.device)
        found: FloatArray = self._policy.of_hidden(rows, wanted, self._temperature).logprobs.float().cpu().numpy()
        return found

    def has_begun(self, rollout: Rollout) -> bool:
        """Whether its first tokens were read and are cached."""
        reading = self._readings.get(rollout.rollout_id)
        prompt, ids = len(rollout.prompt.token_ids), _ids(rollout)
        return reading is not None and len(ids) > prompt > 0 and reading.begins(prompt, ids)

    @torch.inference_mode()
    def ends(self, rollouts: Sequence[Rollout]) -> list[FloatArray]:
        """The log-probs [L] of rollouts that have begun. Raises torch.OutOfMemoryError."""
        if not rollouts:
            return []
        read = [self._to_read(rollout) for rollout in rollouts]
        told = self._finished(
            [(r.rollout_id, len(r.prompt.token_ids), ids) for r, ids in zip(rollouts, read, strict=True)]
        )
        with self._autocast():
            last = self._logprobs(torch.stack([t.last for t in told]), [r.response_ids[-1:] for r in rollouts])
        return [
            np.append(t.logprobs, end)[: len(r.response_ids)] for t, end, r in zip(told, last, rollouts, strict=True)
        ]

    def _to_read(self, rollout: Rollout) -> IntArray:
        """All but the last token, which predicts nothing, unless that was read as well."""
        ids = _ids(rollout)
        return ids if self._readings[rollout.rollout_id].cached == len(ids) else ids[:-1]


class ChunkedReference(ReferencePolicy):
    """A :class:`ReferencePolicy` that reads chunks ahead, with a KV cache of up to ``cache_tokens``.

    Raises ChunkingRefusedError for a model that cannot be continued. What it answers is what its parent would: a
    rollout of which nothing was read, or whose cache had to give way, is left to that.
    """

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, precision: str, token_budget: int, cache_tokens: int
    ) -> None:
        super().__init__(model, temperature=temperature, precision=precision, token_budget=token_budget)
        self.readings = LogprobReadings(
            self._policy,
            temperature=self._temperature,
            autocast=self._autocast,
            cache_tokens=cache_tokens,
            token_budget=token_budget,
        )

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        self.readings.release(released)
        return Prefilled(True, sorted(set(self.readings.prefill(chunks))))

    def answer(self, rollouts: Sequence[Rollout]) -> list[Rollout | str]:
        answers = self._read_on(rollouts)
        left = [i for i in range(len(rollouts)) if i not in answers]
        answers.update(zip(left, super().answer([rollouts[i] for i in left]), strict=True))
        self.readings.release(rollout.rollout_id for rollout in rollouts)
        return [answers[i] for i in range(len(rollouts))]

    def _read_on(self, rollouts: Sequence[Rollout]) -> dict[int, Rollout | str]:
        """Of those that have begun, by their place; of none where memory runs out."""
        begun = [i for i, rollout in enumerate(rollouts) if self.readings.has_begun(rollout)]
        try:
            found = self.readings.ends([rollouts[i] for i in begun])
        except torch.OutOfMemoryError:
            self.readings.give_all_up()
            return {}
        return {i: self._checked(rollouts[i], numbers) for i, numbers in zip(begun, found, strict=True)}

    def _make_room(self) -> bool:
        return bool(self.readings.give_all_up())


def build_reference(
    model: PreTrainedModel, *, temperature: float, precision: str, token_budget: int, cache_tokens: int = 0
) -> ReferencePolicy:
    """With ``cache_tokens`` one that reads ahead, where the model can be continued."""
    options: dict[str, Any] = {"temperature": temperature, "precision": precision, "token_budget": token_budget}
    if cache_tokens:
        try:
            return ChunkedReference(model, **options, cache_tokens=cache_tokens)
        except ChunkingRefusedError:
            pass
    return ReferencePolicy(model, **options)


def _ids(rollout: Rollout) -> IntArray:
    return np.concatenate([rollout.prompt.token_ids, rollout.response_ids]).astype(np.int64)
