"""A packed batch as the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrlhf.algorithms.logprobs import KeptSets
from asyncrlhf.data.branches import Branches
from asyncrlhf.learner.attention.attention import Layout, PackedLayout
from asyncrlhf.models.copies import to_device
from asyncrlhf.types import IdArray, IntArray, TrainBatch


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
        order: IntArray | None = None,
    ) -> PackedInputs:
        """From ``token_ids`` [T], ``cu_seqlens`` [N+1], and ``predicted`` [T]: the tokens whose log-probs are wanted. A
        sequence's prompt are the tokens before its first predicted one; others may follow it that are not predicted.

        ``sets``: the kept ids and the counts [T] of a batch whose sampling was truncated. ``routes`` [T, E]: the
        experts of each token; prompts are equal if theirs are, too. ``order`` [T]: numbers that give the order of the
        targets, and of the kept ids; None: their places.
        """
        starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(token_ids)) - starts[sequence]
        prompts = np.minimum.reduceat(np.where(predicted, place, lengths[sequence]), starts)
        seen: dict[bytes, int] = {}  # the first sequence with each prompt, which owns it
        facts = [token_ids] if routes is None else [token_ids, routes]
        spans = zip(starts, starts + prompts, strict=True)
        texts = (b"".join(fact[first:end].tobytes() for fact in facts) for first, end in spans)
        owners = np.array([seen.setdefault(text, index) for index, text in enumerate(texts)])
        shared = np.where(owners == np.arange(len(owners)), 0, prompts)  # prompt tokens that are packed with the owner
        kept = (place >= shared[sequence]) & (place < lengths[sequence] - 1)
        packed = np.cumsum(kept) - 1  # [T] the new position of each kept token
        targets = np.flatnonzero(predicted)
        targets = targets if order is None else targets[np.argsort(order[targets])]
        sources = targets - 1
        first = place[targets] == prompts[sequence[targets]]
        owner = owners[sequence[targets[first]]]
        sources[first] = starts[owner] + prompts[owner] - 1
        allowed = None
        if sets is not None:
            ids = to_device(torch.from_numpy(sets[0]), device)
            allowed = KeptSets.of_counts(ids, torch.from_numpy(sets[1][targets]))
        return cls(
            token_ids=to_device(torch.from_numpy(token_ids[kept])[None], device),
            rows=to_device(torch.from_numpy(packed[sources]), device),
            targets=to_device(torch.from_numpy(token_ids[targets]), device),
            layout=PackedLayout.build(
                lengths - 1,
                prompts,
                owners,
                device,
                None if routes is None else to_device(torch.from_numpy(routes[kept].astype(np.int16)), device),
            ),
            kept=allowed,
        )

    @classmethod
    def of_batch(
        cls, batch: TrainBatch, first: int = 0, last: int | None = None, device: torch.device | str = "cpu"
    ) -> PackedInputs:
        """The sequences ``first`` to ``last`` (not included; None: all) of a batch, with predicted sampled tokens: in
        the batch's order, also where sequences fork and each branch is a sequence of the pass."""
        boundaries = batch.cu_seqlens[first : None if last is None else last + 1]
        part = slice(int(boundaries[0]), int(boundaries[-1]))
        sets = None
        if batch.kept_ids is not None and batch.kept_counts is not None:
            start = int(batch.kept_counts[: part.start].sum())
            counts = batch.kept_counts[part]
            sets = (batch.kept_ids[start : start + int(counts.sum())], counts)
        ids, predicted = batch.token_ids[part], batch.response_mask[part]
        routes = None if batch.routed_experts is None else batch.routed_experts[part]
        if batch.follows is None:
            return cls.build(ids, boundaries - part.start, predicted, device, sets, routes)
        texts = Branches.of(batch.follows[part], boundaries - part.start, predicted)
        sets, routes = sets and (sets[0], sets[1][texts.places]), None if routes is None else routes[texts.places]
        own = predicted[texts.places] & texts.own
        return cls.build(ids[texts.places], texts.cu_seqlens, own, device, sets, routes, texts.places)

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
    def after(cls, texts: Sequence[IntArray], device: torch.device | str = "cpu") -> PackedInputs:
        """The states after texts: each predicts a placeholder for the token that was not generated."""
        ends = np.cumsum([len(text) + 1 for text in texts])
        predicted = np.zeros(ends[-1], dtype=np.bool_)
        predicted[ends - 1] = True
        tokens = np.concatenate([np.append(text, 0) for text in texts])
        return cls.build(tokens, np.concatenate([[0], ends]), predicted, device)

    @classmethod
    def dummy(cls, device: torch.device | str = "cpu") -> PackedInputs:
        """One predicted token: a rank without data takes part in the gradient reduction with zero times its loss."""
        return cls.build(np.zeros(2, np.int64), np.array([0, 2]), np.array([False, True]), device)
