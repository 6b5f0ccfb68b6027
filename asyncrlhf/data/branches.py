"""The branches of sequences that fork: for a forward pass each is a text of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrlhf.turns import followed, lineage
from asyncrlhf.types import IntArray, Rollout, TrainBatch


def follows_of(rollout: Rollout) -> IntArray:
    """[P+L] the place in a rollout's row of the token that each token follows; -1: none."""
    prompt = len(rollout.prompt.token_ids)
    return followed(rollout.forks, prompt, prompt + len(rollout.response_ids))


def last_branch(rollout: Rollout) -> IntArray:
    """The places [n] in a rollout's row of the tokens of its last branch, from the text's first; all of them without
    forks. Who reads a response as one text reads this one."""
    return lineage(follows_of(rollout), len(rollout.prompt.token_ids) + len(rollout.response_ids) - 1)


@dataclass(frozen=True)
class Branches:
    """The texts of N sequences. Every sampled token is an own token of one branch."""

    places: IntArray  # [K] which of the T tokens of the sequences each token of the texts is
    cu_seqlens: IntArray  # [B+1] where each text begins among the K, and K
    own: NDArray[np.bool_]  # [K] False: a token of an earlier branch, which this one follows
    count: IntArray  # [N] tokens of each sequence's texts

    @classmethod
    def of(cls, follows: IntArray, cu_seqlens: IntArray, sampled: NDArray[np.bool_]) -> Branches:
        """``follows`` [T], ``cu_seqlens`` [N+1] as a ``TrainBatch`` has them; ``sampled`` [T]. A branch without a
        sampled token of its own, from which nothing is learned, is left out."""
        texts, owns, count = [np.arange(0)], [np.zeros(0, np.bool_)], []
        for first, end in pairwise(cu_seqlens.tolist()):
            before = len(texts)
            for places, own in _texts(follows[first:end]):
                if sampled[first:end][places[-own:]].any():
                    texts.append(first + places)
                    owns.append(np.arange(len(places)) >= len(places) - own)
            count.append(sum(map(len, texts[before:])))
        lengths = [len(text) for text in texts[1:]]
        return cls(np.concatenate(texts), np.cumsum([0, *lengths]), np.concatenate(owns), np.array(count, np.int64))


def _texts(follows: IntArray) -> Iterator[tuple[IntArray, int]]:
    """The places [n] of each branch's tokens in one sequence, and how many of them, the last ones, are its own. The
    first stretch of tokens that follows a branch's last token continues that branch, which is then passed once."""
    starts = [0, *np.flatnonzero(follows != np.arange(-1, len(follows) - 1)).tolist(), len(follows)]
    tips: dict[int, int] = {}  # own tokens of each branch, by its last token
    for first, end in pairwise(starts):
        tips[end - 1] = tips.pop(int(follows[first]), 0) + end - first
    for tip, own in tips.items():
        yield lineage(follows, tip), own


def pass_lengths(batch: TrainBatch) -> IntArray:
    """The tokens [N] that a forward pass over each sequence has: of one that forks those of all its branches, with the
    tokens that several branches begin with once for each."""
    if batch.follows is None:
        return np.diff(batch.cu_seqlens)
    return Branches.of(batch.follows, batch.cu_seqlens, batch.response_mask).count


def pass_length(rollout: Rollout) -> int:
    """The same of one rollout."""
    prompt, length = len(rollout.prompt.token_ids), len(rollout.response_ids)
    if not rollout.forks:
        return prompt + length
    sampled = np.concatenate([np.zeros(prompt, np.bool_), rollout.sampled])
    return int(Branches.of(follows_of(rollout), np.array([0, prompt + length]), sampled).count[0])


def last_texts(batch: TrainBatch) -> list[IntArray]:
    """The token ids [n] of each sequence's last token and of all that it follows."""
    texts = []
    for first, end in pairwise(batch.cu_seqlens.tolist()):
        ids = batch.token_ids[first:end]
        texts.append(ids if batch.follows is None else ids[lineage(batch.follows[first:end], end - first - 1)])
    return texts
