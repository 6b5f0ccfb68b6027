"""Settings of what a run records and shows: ``logging.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check, check_choice, check_range

WANDB_MODES = ("offline", "online", "disabled")
PROGRESS_MODES = ("auto", "rich", "plain", "none")


@dataclass(frozen=True)
class LoggingConfig:
    """``progress=auto``: live on a terminal, plain lines elsewhere; ``flush_every``: rows of one Parquet file."""

    wandb: str = "offline"
    wandb_project: str = "asyncrlhf"
    wandb_group: str = ""
    progress: str = "auto"
    rollouts: bool = True  # write rollouts/*.parquet
    flush_every: int = 2048
    report: bool = True  # a finished `asyncrlhf train` writes report/index.html

    def __post_init__(self) -> None:
        check_choice("logging.wandb", self.wandb, WANDB_MODES)
        check(self.wandb_project, "logging.wandb_project is empty; give the name of a W&B project.")
        check_choice("logging.progress", self.progress, PROGRESS_MODES)
        check(isinstance(self.rollouts, bool), "logging.rollouts must be true or false.")
        check(isinstance(self.report, bool), "logging.report must be true or false.")
        check_range("logging.flush_every", self.flush_every, low=1)
