"""Settings of what is around a run: ``cluster.*`` (which parts share devices), ``ray.*`` (which Ray), and ``logging.*``
(what is recorded and shown)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from asyncrlhf.validation import check, check_choice, check_range

PLACEMENTS = ("auto", "flatten", "interleave", "separate")
WANDB_MODES = ("offline", "online", "disabled")
SINKS = ("wandb", "tensorboard", "mlflow")
MAX_TAG = 64  # characters of a tag, by W&B's server
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
    """``progress=auto``: live on a terminal, plain lines elsewhere; ``flush_every``: rows of one Parquet file.

    ``sinks``: where metrics go beside the run directory: wandb, tensorboard, mlflow, or a class of your own as
    ``package.module:Class``. A sweep gives its jobs W&B's group, name, job type and tags, where they are empty here.
    """

    sinks: list[str] = field(default_factory=lambda: ["wandb"])
    wandb: str = "offline"
    wandb_project: str = "asyncrlhf"
    wandb_entity: str = ""  # empty: the user's own
    wandb_group: str = ""
    wandb_name: str = ""  # empty: the last two parts of the run directory
    wandb_job_type: str = ""  # empty: train, sft or reward-model
    wandb_tags: list[str] = field(default_factory=list)
    wandb_notes: str = ""
    wandb_completions: int = 16  # rollouts of each table of completions; 0 is none
    wandb_model: bool = False  # hand in the newest checkpoint's model as an artifact at the end
    progress: str = "auto"
    rollouts: bool = True  # write rollouts/*.parquet
    flush_every: int = 2048
    report: bool = True  # a finished `asyncrlhf train` writes report/index.html

    def __post_init__(self) -> None:
        check_choice("logging.wandb", self.wandb, WANDB_MODES)
        check(self.wandb_project, "logging.wandb_project is empty; give the name of a W&B project.")
        check_choice("logging.progress", self.progress, PROGRESS_MODES)
        check_range("logging.flush_every", self.flush_every, low=1)
        check_range("logging.wandb_completions", self.wandb_completions, low=0)
        for sink in self.sinks:
            if ":" not in sink:
                check_choice("logging.sinks", sink, (*SINKS, "package.module:Class"))
        check(len({*self.sinks}) == len(self.sinks), f"logging.sinks={self.sinks} names a sink twice.")
        for tag in self.wandb_tags:
            check(
                0 < len(tag) <= MAX_TAG,
                f"logging.wandb_tags: {tag!r} has {len(tag)} characters; allowed: 1 to {MAX_TAG}.",
            )

    @property
    def active_sinks(self) -> list[str]:
        """Those of ``sinks`` that are on."""
        return [sink for sink in self.sinks if sink != "wandb" or self.wandb != "disabled"]
