"""One batch in two layouts: packed with poison outside the mask for us, padded with zeros for the references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrlhf.algorithms.aggregate import normaliser_count
from asyncrlhf.algorithms.coefficients import Coefficient
from asyncrlhf.algorithms.losses import policy_loss
from tests.unit.algorithms.batches import RaggedBatch, assert_same_gradient, gradient, ragged_batch

Array = NDArray[np.float64]

# Both sides are float64. verl adds 1e-8 to the token counts that it divides by, which is the coarsest difference.
TOLERANCE = 1e-7
SEEDS = range(8)


def batches(spread: float = 0.4) -> Iterator[RaggedBatch]:
    for seed in SEEDS:
        yield ragged_batch(seed, max_sequences=8, max_tokens=9, spread=spread)


def padded(batch: RaggedBatch, packed: NDArray[Any]) -> Array:
    """[T] to [sequences with a masked token, longest]; holes of the mask stay where they are, and hold zero."""
    rows = [np.where(batch.mask, packed, 0)[batch.sequence_ids == i] for i in batch.trained]
    table = np.zeros((len(rows), max(map(len, rows))))
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


def tables(batch: RaggedBatch) -> dict[str, Array]:
    """The arguments that every policy loss of the references takes."""
    return {
        "theta": padded(batch, batch.theta),
        "old": padded(batch, batch.prox),
        "mask": padded(batch, np.ones(len(batch.mask))),
    }


def per_token(batch: RaggedBatch, per_sequence: Array) -> Array:
    """[N] to [T]."""
    return per_sequence[batch.sequence_ids]


def packed(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array)


def our_gradient(
    batch: RaggedBatch,
    coefficient: Coefficient,
    *,
    advantages: Array,
    anchor: Array | None = None,
    aggregate: str = "token",
    normaliser: float | None = None,
    constant_length: float | None = None,
    extra_loss: Callable[[Tensor, Tensor | float], Tensor] | None = None,
    **switches: Any,
) -> Array:
    """Gradient of ``policy_loss`` in theta, padded. ``anchor`` is the batch's prox unless given.

    ``extra_loss`` takes theta and the normaliser, and is added.
    """
    mask, ids = batch.tensors()
    theta = packed(batch.theta).requires_grad_()
    count: Tensor | float
    if normaliser is None:
        count = normaliser_count(aggregate, mask, ids, constant_length=constant_length)
    else:
        count = normaliser
    old = packed(batch.prox if anchor is None else anchor)
    loss = policy_loss(
        theta,
        old,
        packed(advantages),
        mask,
        ids,
        coefficient=coefficient,
        normaliser=count,
        aggregate=aggregate,
        **switches,
    ).loss
    if extra_loss is not None:
        loss = loss + extra_loss(theta, count)
    return padded(batch, gradient(loss, theta))


def assert_equal(ours: Array, theirs: Array) -> None:
    assert_same_gradient(ours, theirs, TOLERANCE)
