"""Settings of a run's environment: ``cluster.*`` (which parts share devices), ``ray.*`` (which Ray), ``logging.*``
(what is recorded and shown), and ``checkpoint.*`` (when it is saved)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrlhf.validation import MONTH, check, check_choice, check_keywords, check_path, check_settings, setting

PLACEMENTS = ("auto", "flatten", "interleave", "one_gpu", "separate")
WANDB_MODES = ("offline", "online", "disabled")
SINKS = ("wandb", "tensorboard", "mlflow")
KINDS = ("learner", "generator", "reward", "reference", "critic")  # of parts
MAX_PROJECT, NOT_IN_PROJECT = 128, "/\\#?%:"  # by W&B's library
WANDB_KEYWORDS = ("entity", "group", "job_type", "name", "notes", "tags")  # of wandb.init, that are not the run's own
MAX_TAG = 64  # characters of a tag, by W&B's server
PROGRESS_MODES = ("auto", "rich", "plain", "none")


@dataclass(frozen=True)
class ClusterConfig:
    """Which parts share devices."""

    placement: str = setting(
        "auto",
        "Learner and generators on separate devices (separate), the reward workers too (interleave), or learner and "
        "generators in turns on the same devices (flatten) or at the same time on one GPU (one_gpu); auto: Ray decides "
        "on a single node, else separate.",
        choices=PLACEMENTS,
    )
    offload: bool | None = setting(
        None,
        "placement=flatten: a sleeping part moves its weights and states off the shared device into host memory (on "
        "a CPU into an unnamed file); null: on GPUs, if the backend supports it.",
    )
    autoscaling: bool = setting(False, "An autoscaler adds nodes on request: the run waits for missing resources.")
    start_timeout_seconds: float = setting(
        600.0, "Seconds to wait for free devices, and for a part to load its model.", low=1, high=MONTH
    )

    node_labels: Any = setting(
        None,
        "Labels that a node must have for the parts of a kind (learner, generator, reward, reference, critic), such as "
        "{learner: {ray.io/accelerator-type: H100}}; null: any node. Ray gives each node of GPUs that label itself.",
    )

    def __post_init__(self) -> None:
        check_settings("cluster", self)
        given = {} if self.node_labels is None else self.node_labels
        form = "allowed: null, or {KIND: {LABEL: VALUE}} with KIND one of " + ", ".join(KINDS)
        check(isinstance(given, Mapping), f"cluster.node_labels={given} is not a mapping; {form}.")
        for kind, labels in given.items():
            check(kind in KINDS, f"cluster.node_labels.{kind} is no kind of parts; {form}.")
            check(isinstance(labels, Mapping), f"cluster.node_labels.{kind}={labels} is not a mapping; {form}.")
            for label, value in labels.items():
                check(
                    isinstance(label, str) and isinstance(value, str) and label and value,
                    f"cluster.node_labels.{kind}.{label}={value} is not a label with a text as its value; {form}.",
                )

    def labels_for(self, kind: str) -> dict[str, str]:
        """The labels that a node must have for parts of this kind."""
        return dict((self.node_labels or {}).get(kind) or {})


@dataclass(frozen=True)
class RayConfig:
    """Which Ray."""

    address: str = setting(
        "",
        "An existing cluster (auto finds it); empty starts Ray on this machine for the run, unless the variable "
        "RAY_ADDRESS names a cluster.",
    )
    object_store_mb: int = setting(
        512, "Shared memory for Ray's objects, in MiB, if the run starts Ray.", low=80, high=10**8
    )

    def __post_init__(self) -> None:
        check_settings("ray", self)

    @property
    def cluster(self) -> str:
        """The address to join; empty if Ray is started for the run."""
        return self.address or os.environ.get("RAY_ADDRESS", "")


@dataclass(frozen=True)
class LoggingConfig:
    """What is recorded and shown."""

    sinks: list[str] = setting(
        ["wandb"],
        "Where metrics go beside the run directory: wandb, tensorboard, mlflow, or a class of your own, "
        "package.module:Class.",
    )
    wandb: str = setting(
        "offline", "Weights & Biases: recorded on disk, sent, or not at all.", choices=WANDB_MODES, common=True
    )
    wandb_project: str = setting("asyncrlhf", "Project of the W&B run.")
    wandb_kwargs: Any = setting(
        None,
        "More keywords of wandb.init, by name: entity, group, job_type, name, notes, tags; a sweep gives group, name, "
        "job_type and tags to its jobs.",
    )
    wandb_model: bool = setting(False, "Uploads the newest checkpoint's model as an artifact at the end.")
    progress: str = setting(
        "auto", "What the terminal shows: a live panel, plain lines, or nothing; auto is live on a terminal.",
        choices=PROGRESS_MODES,
    )  # fmt: skip
    rollouts: bool = setting(
        True, "Writes rollouts/*.parquet, one row per rollout, and evaluations/*.parquet, one per held-out answer."
    )
    keep_gib: float | None = setting(
        None,
        "Size in GiB of rollouts/, rollout_tokens/ and spans/ from which on the oldest files keep only what `asyncrlhf "
        "verify` needs, at each checkpoint; null: all is kept.",
        low=0,
        exclusive_low=True,
    )
    rollout_tokens: int = setting(
        16, "Rollouts per learner step whose tokens are written to rollout_tokens/*.parquet; 0 writes none.", low=0
    )
    flush_every: int = setting(2048, "Rows of one Parquet file.", low=1)
    report: bool = setting(True, "A finished `asyncrlhf train` writes report/index.html.")

    def __post_init__(self) -> None:
        check_settings("logging", self)
        strange = [c for c in self.wandb_project if c in NOT_IN_PROJECT]
        check(
            self.wandb_project.strip() and not strange and len(self.wandb_project) <= MAX_PROJECT,
            f"logging.wandb_project={self.wandb_project!r} is no name of a W&B project; allowed: 1 to {MAX_PROJECT} "
            "characters other than / \\ # ? % and :.",
        )
        for sink in self.sinks:
            if ":" not in sink:
                check_choice("logging.sinks", sink, (*SINKS, "package.module:Class"))
        check(len({*self.sinks}) == len(self.sinks), f"logging.sinks={self.sinks} names a sink twice.")
        check_keywords("logging.wandb_kwargs", self.wandb_kwargs)
        for name in self.wandb_keywords:
            check_choice("logging.wandb_kwargs", name, WANDB_KEYWORDS)
        for tag in map(str, self.wandb_keywords.get("tags") or ()):
            check(
                0 < len(tag) <= MAX_TAG,
                f"logging.wandb_kwargs.tags: {tag!r} has {len(tag)} characters; allowed: 1 to {MAX_TAG}.",
            )

    @property
    def wandb_keywords(self) -> dict[str, Any]:
        """``wandb_kwargs``, empty if there are none."""
        return dict(self.wandb_kwargs or {})

    @property
    def active_sinks(self) -> list[str]:
        """The ``sinks`` that are switched on."""
        return [sink for sink in self.sinks if sink != "wandb" or self.wandb != "disabled"]


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved, and what it resumes from."""

    every: int = setting(
        0, "Learner steps between two checkpoints; 0: only at the end and an interruption.", low=0, common=True
    )
    at_end: bool | None = setting(
        None,
        "every=0: whether a finished run leaves a checkpoint, with its model; null: yes, except for jobs of a sweep.",
    )
    keep: int = setting(2, "Number of newest checkpoints to keep.", low=1)
    notice_seconds: float = setting(
        30.0,
        "Seconds for the last checkpoint after SIGTERM, SIGUSR1, SIGUSR2, a file `stop` in the run's folder, or when "
        "Ray drains the driver's node.",
        low=1,
        high=MONTH,
    )
    resume: str = setting(
        "no", "What the run resumes from: no, auto (the newest there is), or a checkpoint's folder.", common=True
    )

    def __post_init__(self) -> None:
        check_settings("checkpoint", self)
        check_path("checkpoint.resume", self.resume)
        object.__setattr__(self, "resume", os.path.expanduser(self.resume))
        check(self.resume, "checkpoint.resume is empty; allowed: no, auto, or the folder of a checkpoint.")
