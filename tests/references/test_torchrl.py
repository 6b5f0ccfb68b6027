"""GAE and V-trace against torchrl's functional ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrlhf.algorithms.advantages import gae, vtrace
from tests.references.isolated import Peers, named, require
from tests.references.layout import assert_equal, batches, packed
from tests.unit.algorithms.batches import RaggedBatch

pytestmark = pytest.mark.more


@pytest.fixture(autouse=True)
def installed() -> None:
    require("torchrl")


def trajectories(batch: RaggedBatch) -> dict[str, Any]:
    """The masked tokens as one row, with its trajectories' ends; past an end the value is 0."""
    ids, values = batch.sequence_ids[batch.mask], batch.values[batch.mask]
    done = np.append(ids[1:] != ids[:-1], True)
    return {
        "rewards": batch.token_advantages[batch.mask],
        "values": values,
        "next_values": np.where(done, 0.0, np.append(values[1:], 0.0)),
        "done": done,
    }


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8)], ids=[named("torchrl", "gae_1_1"), named("torchrl", "gae_.9_.8")]
)
def test_gae(ask: Peers, gamma: float, lam: float) -> None:
    for batch in batches():
        theirs = ask("torchrl", "gae", **trajectories(batch), gamma=gamma, lam=lam)
        ours = gae(packed(batch.token_advantages), packed(batch.values), *batch.tensors(), gamma=gamma, lam=lam)
        for found, expected in zip(ours, theirs, strict=True):
            assert_equal(found.numpy()[batch.mask], expected)


@pytest.mark.parametrize(
    ("gamma", "rho_bar", "c_bar"),
    [(1.0, 1.0, 1.0), (0.9, 1.5, 0.8)],
    ids=[named("torchrl", "vtrace_1_1_1"), named("torchrl", "vtrace_.9_1.5_.8")],
)
def test_vtrace(ask: Peers, gamma: float, rho_bar: float, c_bar: float) -> None:
    """torchrl has no lambda, so that ours is 1."""
    for batch in batches():
        theirs = ask(
            "torchrl",
            "vtrace",
            log_pi=batch.prox[batch.mask],
            log_mu=batch.mu[batch.mask],
            **trajectories(batch),
            gamma=gamma,
            rho_bar=rho_bar,
            c_bar=c_bar,
        )
        ours = vtrace(
            packed(batch.token_advantages),
            packed(batch.values),
            packed(batch.prox) - packed(batch.mu),
            *batch.tensors(),
            gamma=gamma,
            rho_bar=rho_bar,
            c_bar=c_bar,
        )
        for found, expected in zip(ours, theirs, strict=True):
            assert_equal(found.numpy()[batch.mask], expected)
