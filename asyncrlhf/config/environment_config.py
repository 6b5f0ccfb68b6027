"""Settings of what is around a run: ``cluster.*`` (which parts share devices), ``ray.*`` (which Ray), and ``logging.*``
(what is recorded and shown)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncrlhf.validation import check, check_choice, check_range

PLACEMENTS = ("auto", "flatten", "interleave", "separate")
WANDB_MODES = ("offline", "online", "disabled")
PROGRESS_MODES = ("auto", "rich", "plain", "none")


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


@dataclass(frozen=True)
class LoggingConfig:
    """``progress=auto``: live on a terminal, plain lines elsewhere; ``flush_every``: rows of one Parquet file."""

    wandb: str = "offline"
    wandb_project: str = "asyncrlhf"
    wandb_group: str = ""
    progress: str = "auto"
    rollouts: bool = True  # write rollouts/*.parquet
    spans: bool = True  # write spans/*.parquet, the timeline
    rollout_tokens: int = 16  # rollouts a learner step of which rollout_tokens/*.parquet has every token; 0: none
    flush_every: int = 2048
    report: bool = True  # a finished `asyncrlhf train` writes report/index.html

    def __post_init__(self) -> None:
        check_choice("logging.wandb", self.wandb, WANDB_MODES)
        check(self.wandb_project, "logging.wandb_project is empty; give the name of a W&B project.")
        check_choice("logging.progress", self.progress, PROGRESS_MODES)
        check_range("logging.flush_every", self.flush_every, low=1)
        check_range("logging.rollout_tokens", self.rollout_tokens, low=0)
