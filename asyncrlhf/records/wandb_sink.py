"""Sends a run's curves to Weights & Biases, offline unless the user is logged in and asked for more."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.records.recorder import plain

GROUPS: dict[str, tuple[str, ...]] = {
    "reward": ("reward_mean", "reward_std", "heldout_accuracy", "zero_spread_groups", "advantage_std"),
    "staleness": (
        "staleness_mean",
        "staleness_max",
        "staleness_in_flight_mean",
        "staleness_in_queue_mean",
        "staleness_bound",
    ),
    "off_policy": (
        "ess_fraction",
        "ess_fraction_seq",
        "behavior_kl",
        "mismatch_kl",
        "clip_fraction",
        "harmful_second_moment",
    ),
    "policy": (
        "loss",
        "grad_norm",
        "learning_rate",
        "effective_learning_rate",
        "entropy",
        "ref_kl",
        "response_length_mean",
    ),
    "critic": ("value_loss", "explained_variance"),
    "time": (
        "wall_time",
        "samples_per_second",
        "tokens_per_second",
        "learner_idle_fraction",
        "generator_idle_fraction",
        "weight_sync_seconds",
        "loop_lag_p99",
    ),
    "buffer": ("buffer_size", "buffer_age", "replayed_fraction", "dropped"),
}
_GROUP_OF = {metric: group for group, metrics in GROUPS.items() for metric in metrics}
_ID_FILE = "run-id.txt"
_QUIET: dict[str, Any] = {"silent": True, "console": "off", "save_code": False}


def grouped_name(metric: str) -> str:
    """The name of a curve in W&B: ``staleness/staleness_max``. A metric with a group of its own, such as
    ``lag_1/ess_fraction``, keeps it; what no group knows is under ``other/``."""
    return metric if metric == "step" or "/" in metric else f"{_GROUP_OF.get(metric, 'other')}/{metric}"


class WandbSink:
    """One W&B run under ``run_dir/wandb``. Trouble with W&B switches the sink off and never ends the run.

    ``note`` is one sentence for the user about what W&B is doing other than asked, or None. A resumed run goes on under
    the id of the first.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], logging: LoggingConfig) -> None:
        self.note: str | None = None
        self._run: Any = None
        self._wandb: Any = None
        if logging.wandb == "disabled":
            return
        self._guard(lambda: self._start(Path(run_dir), config, logging))

    def log(self, metrics: Mapping[str, Any]) -> None:
        """One learner step's metrics; ``step`` is the horizontal axis of every curve."""
        if self._run is None:
            return
        row = {grouped_name(key): value for key, value in plain(metrics).items() if value is not None}
        self._guard(lambda: self._run.log(row))

    def finish(self, summary: Mapping[str, Any] | None = None, exit_code: int = 0) -> None:
        """Write the summary, then end the run and W&B's own process. A second call does nothing."""
        run, wandb = self._run, self._wandb
        self._run = self._wandb = None
        if run is not None:
            self._guard(lambda: run.summary.update(plain(summary or {})))
            self._guard(lambda: run.finish(exit_code=exit_code))
        if wandb is not None:
            self._guard(wandb.teardown)

    def _start(self, run_dir: Path, config: Mapping[str, Any], logging: LoggingConfig) -> None:
        import wandb  # a second of imports that a run without W&B need not pay

        self._wandb = wandb
        wandb.setup(wandb.Settings(**{**_QUIET, "mode": logging.wandb}))
        mode = logging.wandb
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
            self.note = "logging.wandb=online, but no W&B login was found: this run is recorded offline."
        try:
            self._run = _init(wandb, run_dir, config, logging, mode)
        except wandb.Error as error:
            if mode == "offline":
                raise
            self.note = f"W&B could not be reached ({error}): this run is recorded offline."
            wandb.teardown()  # its process holds the run's id until it ends
            self._run = _init(wandb, run_dir, config, logging, "offline")
        for group in (*GROUPS, "other"):
            self._run.define_metric(f"{group}/*", step_metric="step")

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # W&B is another process, with exception types of every kind
            self._run = None
            self.note = f"W&B stopped recording ({type(error).__name__}: {error}); the run goes on without it."


def _init(wandb: Any, run_dir: Path, config: Mapping[str, Any], logging: LoggingConfig, mode: str) -> Any:
    folder = run_dir / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / _ID_FILE
    run_id = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:8]
    id_file.write_text(run_id + "\n")
    return wandb.init(
        project=logging.wandb_project,
        group=logging.wandb_group or None,
        name=f"{run_dir.parent.name}/{run_dir.name}",
        id=run_id,
        resume="allow" if mode == "online" else None,
        dir=str(run_dir),
        config=plain(config),
        mode=mode,
        settings=wandb.Settings(init_timeout=20, finish_timeout=60, **_QUIET),
    )
