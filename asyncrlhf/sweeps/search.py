"""Searches: Optuna chooses each trial's settings from the objectives of earlier trials."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrlhf.config.sweep_config import SweepConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from asyncrlhf.sweeps.space import Axis

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

    from asyncrlhf.sweeps.job import Job, JobRecord

TAIL = 10  # the objective is the mean of a metric over the last tenth of the steps
_SEEDS_APART = 100_003  # between the samplers of two searches, so that neighbours share no suggestions


@dataclass(frozen=True)
class Trial:
    """One configuration, which runs once per seed. ``note``: the reason if it cannot run."""

    values: dict[str, str]
    jobs: tuple[Job, ...]
    note: str = ""


@dataclass
class Search:
    """The trials of a search so far. ``make`` turns a trial's number and its overrides into jobs, one per seed, or
    raises ConfigError if the settings contradict each other; searches with equal ``identity`` are the same."""

    axes: Sequence[Axis]
    settings: SweepConfig
    seed: int
    identity: Any
    make: Callable[[int, Sequence[str]], list[Job]]
    trials: list[Trial] = field(default_factory=list)

    def restore(self, trials: Sequence[Mapping[str, str]]) -> None:
        """Restore the trials that an earlier command suggested."""
        for values in trials:
            self._add(dict(values))

    @property
    def jobs(self) -> list[Job]:
        return list({job.hash: job for trial in self.trials for job in trial.jobs}.values())

    def plain(self) -> dict[str, Any]:
        """The trials for ``sweep.json``."""
        goal = {"objective": self.settings.objective, "direction": self.settings.direction}
        return {**goal, "trials": [trial.values for trial in self.trials]}

    def more(self, records: Mapping[str, JobRecord], folder: Path, width: int) -> list[Job]:
        """The jobs of the next ``width`` trials; empty when all have been suggested. A trial's settings depend on the
        seed and on the trials that have ended, so that an interrupted search continues as if uninterrupted."""
        new: list[Job] = []
        while not new and len(self.trials) < self.settings.trials:
            study = self._study(records, folder)
            before = {job.hash for job in self.jobs}
            for _ in range(min(width, self.settings.trials - len(self.trials))):
                chosen = study.ask(self._distributions()).params
                self._add({axis.key: axis.text(chosen[axis.key]) for axis in self.axes})
            new = [job for job in self.jobs if job.hash not in before]
        return new

    def _add(self, values: dict[str, str]) -> None:
        number = len(self.trials)
        try:
            jobs, note = self.make(number, [f"{key}={value}" for key, value in values.items()]), ""
        except ConfigError as error:
            jobs, note = [], str(error)
        self.trials.append(Trial(values, tuple(jobs), note))

    def _study(self, records: Mapping[str, JobRecord], folder: Path) -> Study:
        import optuna
        from optuna.trial import TrialState, create_trial

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.seed * _SEEDS_APART + len(self.trials))
        study = optuna.create_study(
            direction="maximize" if self.settings.direction == "maximize" else "minimize", sampler=sampler
        )
        distributions = self._distributions()
        for trial in self.trials:
            value = self._value(trial, records, folder)
            state = TrialState.PRUNED if value is None else TrialState.COMPLETE  # pruned: Optuna avoids its like
            params = {axis.key: axis.value(trial.values[axis.key]) for axis in self.axes}
            study.add_trial(create_trial(params=params, distributions=distributions, value=value, state=state))
        return study

    def _value(self, trial: Trial, records: Mapping[str, JobRecord], folder: Path) -> float | None:
        """The mean objective over the seeds; None unless every seed's job finished."""
        found = []
        for job in trial.jobs:
            record = records[job.hash]
            if record.state == "done":
                found.append(objective(folder / record.folder, self.settings.objective))
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known and len(known) == len(trial.jobs) else None

    def _distributions(self) -> dict[str, BaseDistribution]:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        made: dict[str, BaseDistribution] = {}
        for axis in self.axes:
            if axis.choices:
                made[axis.key] = CategoricalDistribution(axis.choices)
            elif axis.step:
                made[axis.key] = IntDistribution(int(axis.low), int(axis.high), log=axis.log, step=axis.step)
            else:
                made[axis.key] = FloatDistribution(axis.low, axis.high, log=axis.log)
        return made


def objective(run_dir: Path, name: str) -> float | None:
    """The objective of a finished run: the held-out accuracy after training, or a metric's mean over the last tenth of
    the steps; None if the run has none."""
    from asyncrlhf.sweeps.job import read_summary

    summary = read_summary(run_dir) or {}
    if name == "heldout_accuracy":
        after = (summary.get("heldout_accuracy") or {}).get("after")
        return None if after is None else float(after)
    lines = [line for line in read_metrics(run_dir / METRICS_FILE) if line.get(name) is not None]
    tail = lines[-max(1, len(lines) // TAIL) :]
    return statistics.fmean(float(line[name]) for line in tail) if tail else None
