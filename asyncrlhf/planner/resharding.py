"""Bytes moved when a model changes from its training layout to its generation layout (HybridFlow, 2409.19256)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

System = Literal["ds-chat", "ungrouped", "hybridflow"]


@dataclass(frozen=True)
class Resharding:
    """Shares of the model's bytes on one GPU: received, held at peak, and held twice (redundant).

    Args:
        holders: number of GPUs of one replica that hold a redundant shard.
    """

    received: Fraction
    peak: Fraction
    redundant: Fraction
    holders: int


def reshard(system: System, pipeline: int, tensor: int, data: int, to_pipeline: int, to_tensor: int) -> Resharding:
    """From training on ``pipeline`` x ``tensor`` x ``data`` GPUs to generation in groups of ``to_pipeline`` x
    ``to_tensor``. Raises ValueError if the second does not divide the first."""
    gpus, shards, wanted = pipeline * tensor * data, pipeline * tensor, to_pipeline * to_tensor
    if pipeline % to_pipeline or tensor % to_tensor:
        raise ValueError(f"generation p={to_pipeline} t={to_tensor} must each divide training p={pipeline} t={tensor}.")
    if system == "ds-chat":
        return Resharding(Fraction(gpus - 1, gpus), Fraction(1), Fraction(1, gpus), shards)
    if system == "ungrouped":
        shard = Fraction(1, shards)
        return Resharding(1 - shard, Fraction(1), shard, _outside(shards, wanted))
    received = Fraction(shards - wanted, wanted * shards)
    return Resharding(received, Fraction(1, wanted), Fraction(0), 0)


def _outside(shards: int, wanted: int) -> int:
    """Number of ranks of one replica whose training shard lies outside their generation shard. Shards follow the order
    of the ranks, and consecutive ranks form a generation group."""
    return sum(rank * wanted // shards != rank % wanted for rank in range(shards))
