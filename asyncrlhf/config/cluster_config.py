"""Settings of the cluster: ``cluster.*`` (which parts share devices) and ``ray.*`` (which Ray)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncrlhf.validation import check_choice, check_range

PLACEMENTS = ("auto", "flatten", "interleave", "separate")


@dataclass(frozen=True)
class ClusterConfig:
    """``placement``: ``separate`` gives learner ranks and generators devices of their own, and nodes of their own where
    there are enough; ``interleave`` gives reward workers devices of their own, too; ``flatten`` lays learner ranks onto
    the generators' devices, where they take turns. ``auto`` leaves everything to Ray on a single node, or
    where parts ask for fractions of a GPU, and is ``separate`` otherwise."""

    placement: str = "auto"
    autoscaling: bool = False  # nodes come when they are asked for: what the present ones lack is then waited for
    start_timeout_seconds: float = 600.0  # for devices to be free and for a part to load its model

    def __post_init__(self) -> None:
        check_choice("cluster.placement", self.placement, PLACEMENTS)
        check_range("cluster.start_timeout_seconds", self.start_timeout_seconds, low=0, exclusive_low=True)


@dataclass(frozen=True)
class RayConfig:
    """``address``: an existing cluster (``auto`` finds it); empty starts Ray on this machine for the run, unless Ray's
    own variable RAY_ADDRESS names a cluster.

    ``dedicated_learner_cores``: on this machine without GPUs, learner threads get cores of their own where the threads
    of all other parts find enough beside them.
    """

    address: str = ""
    object_store_mb: int = 512
    dedicated_learner_cores: bool = True

    def __post_init__(self) -> None:
        check_range("ray.object_store_mb", self.object_store_mb, low=80)

    @property
    def cluster(self) -> str:
        """The address to join; empty where Ray is started for the run."""
        return self.address or os.environ.get("RAY_ADDRESS", "")
