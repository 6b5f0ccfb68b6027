"""Random ragged packed batches for the algorithm tests, with poison outside the mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.reference import Batch

POISON = (float("nan"), float("-inf"), float("inf"))


@dataclass(frozen=True)
class RaggedBatch:
    """Packed arrays (float64) of ``num_sequences`` sequences; outside the mask they hold NaN and infinities."""

    mask: NDArray[np.bool_]  # [T]
    sequence_ids: NDArray[np.int64]  # [T]
    theta: NDArray[np.float64]  # [T], and so on
    prox: NDArray[np.float64]
    mu: NDArray[np.float64]
    ref: NDArray[np.float64]
    token_advantages: NDArray[np.float64]
    sequence_advantages: NDArray[np.float64]  # [N]

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_advantages)

    @property
    def trained(self) -> list[int]:
        """The sequences that have a masked token."""
        return sorted(set(self.sequence_ids[self.mask].tolist()))

    def split(self, packed: NDArray[np.float64]) -> Batch:
        """The masked tokens of every trained sequence."""
        return [packed[self.mask & (self.sequence_ids == i)] for i in self.trained]

    def per_token(self, per_sequence: NDArray[np.float64]) -> NDArray[np.float64]:
        return per_sequence[self.sequence_ids]

    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.mask), torch.from_numpy(self.sequence_ids)


def ragged_batch(seed: int, *, max_sequences: int = 5, max_tokens: int = 7, spread: float = 0.4) -> RaggedBatch:
    """At least one sequence has a masked token; masks have holes, and some sequences have none at all."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, max_tokens + 1, size=rng.integers(1, max_sequences + 1))
    sequence_ids = np.repeat(np.arange(len(lengths)), lengths)
    mask = rng.random(len(sequence_ids)) < 0.7
    mask[rng.integers(len(mask))] = True

    def poisoned(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(mask, values, rng.choice(POISON, size=len(values)))

    theta = -rng.exponential(1.0, size=len(mask)) - 1.0
    prox = theta + spread * rng.standard_normal(len(mask))
    mu = prox + spread * rng.standard_normal(len(mask))
    ref = theta + spread * rng.standard_normal(len(mask))
    return RaggedBatch(
        mask=mask,
        sequence_ids=sequence_ids,
        theta=poisoned(theta),
        prox=poisoned(prox),
        mu=poisoned(mu),
        ref=poisoned(ref),
        token_advantages=poisoned(rng.standard_normal(len(mask))),
        sequence_advantages=rng.standard_normal(len(lengths)),
    )


def gradient(loss: Tensor, leaf: Tensor) -> NDArray[np.float64]:
    (grad,) = torch.autograd.grad(loss, leaf)
    return grad.numpy()


def relative_error(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Norm of the difference over the norm of ``expected``; absolute where that is zero."""
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / (size if size > 0 else 1.0)
