"""Random ragged packed batches for the algorithm tests, with poison outside the mask."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.numeric import assert_close
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
    target: NDArray[np.float64]  # a slow network's log-probs
    values: NDArray[np.float64]
    collision: NDArray[np.float64]
    entropy: NDArray[np.float64]  # [T] of the policy, some of them 0
    lag: NDArray[np.int64]  # [T]
    rewards: NDArray[np.float64]  # [N]
    group_ids: NDArray[np.int64]  # [N] no group of one where there are two sequences

    @property
    def num_sequences(self) -> int:
        return len(self.rewards)

    @property
    def trained(self) -> list[int]:
        """The sequences that have a masked token."""
        return sorted(set(self.sequence_ids[self.mask].tolist()))

    def split(self, packed: NDArray[np.float64]) -> Batch:
        """The masked tokens of every trained sequence."""
        return [packed[self.mask & (self.sequence_ids == i)] for i in self.trained]

    def split_all(self, packed: NDArray[np.float64]) -> Batch:
        """The masked tokens of every sequence; some may be empty."""
        return [packed[self.mask & (self.sequence_ids == i)] for i in range(self.num_sequences)]

    def on_policy(self) -> RaggedBatch:
        return replace(self, prox=self.theta, mu=self.theta, target=self.theta)

    def repoisoned(self, filler: float) -> RaggedBatch:
        """The same batch with ``filler`` outside the mask."""
        arrays = {name: x for name, x in vars(self).items() if x.dtype == np.float64 and len(x) == len(self.mask)}
        held = {name: np.where(self.mask, x, filler) for name, x in arrays.items() if name != "rewards"}
        return replace(self, **held)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.mask), torch.from_numpy(self.sequence_ids)


def ragged_batch(
    seed: int, *, min_sequences: int = 1, max_sequences: int = 5, max_tokens: int = 7, spread: float = 0.4
) -> RaggedBatch:
    """At least one sequence has a masked token; masks have holes, and some sequences have none at all."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, max_tokens + 1, size=rng.integers(min_sequences, max_sequences + 1))
    sequence_ids = np.repeat(np.arange(len(lengths)), lengths)
    mask = rng.random(len(sequence_ids)) < 0.7
    mask[rng.integers(len(mask))] = True

    def poisoned(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(mask, values, rng.choice(POISON, size=len(values)))

    theta = -rng.exponential(1.0, size=len(mask)) - 1.0
    prox = theta + spread * rng.standard_normal(len(mask))
    mu = prox + spread * rng.standard_normal(len(mask))
    ref = theta + spread * rng.standard_normal(len(mask))
    groups = rng.integers(1, max(1, len(lengths) // 2) + 1)
    group_of = np.concatenate([np.repeat(np.arange(groups), 2), rng.integers(groups, size=len(lengths))])[
        : len(lengths)
    ]
    entropy = np.random.default_rng(seed).choice([0.0, 0.02, 0.2, 1.0], size=len(mask))  # no draw of `rng` more
    return RaggedBatch(
        mask=mask,
        sequence_ids=sequence_ids,
        theta=poisoned(theta),
        prox=poisoned(prox),
        mu=poisoned(mu),
        ref=poisoned(ref),
        token_advantages=poisoned(rng.standard_normal(len(mask))),
        target=poisoned(prox + spread * rng.standard_normal(len(mask))),
        values=poisoned(rng.standard_normal(len(mask))),
        # Of a distribution: pi^2, and of the other tokens between 0 and (1 - pi)^2.
        collision=poisoned(np.exp(2 * theta) + rng.random(len(mask)) * (1 - np.exp(theta)) ** 2),
        entropy=np.where(mask, entropy, POISON[0]),
        lag=np.where(mask, rng.integers(0, 12, size=len(mask)), rng.integers(-(2**40), 2**40, size=len(mask))),
        rewards=rng.standard_normal(len(lengths)),
        group_ids=rng.permutation(group_of) * 1000 + 7,
    )


def gradient(loss: Tensor, leaf: Tensor) -> NDArray[np.float64]:
    (grad,) = torch.autograd.grad(loss, leaf)
    return grad.numpy()


def assert_same_gradient(found: NDArray[np.float64], expected: NDArray[np.float64], tolerance: float = 1e-9) -> None:
    """Equal up to ``tolerance`` times the largest entry; both may be zero but for rounding."""
    assert_close(found, expected, rtol=0.0, of_largest=tolerance)
