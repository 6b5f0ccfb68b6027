"""Searches: Optuna chooses each trial's settings from the objectives of earlier trials, out of choices in Hydra's
grammar: ``a,b``, ``range(1,5)``, ``interval(0,1)``, ``tag(log,...)``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from asyncrlhf.config.compose import hydra_sentence, sweep_jobs
from asyncrlhf.config.sweep_config import SweepConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics, read_summary
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

    from asyncrlhf.sweeps.job import Job, JobRecord

DIGITS = 4  # of a number that a search chooses: names stay short
TAIL = 10  # the objective is the mean of a metric over the last tenth of the steps
_SEEDS_APART = 100_003  # between the samplers of two searches, so that neighbours share no suggestions


@dataclass(frozen=True)
class Axis:
    """One setting of several values: ``choices``, or numbers from ``low`` to ``high`` (whole ones with ``step``)."""

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: int | None = None
    log: bool = False
    interval: bool = False

    @property
    def first(self) -> str:
        return self.choices[0] if self.choices else self.text(self.low)

    def value(self, text: str) -> str | int | float:
        """The value for Optuna of an override's ``text``."""
        return text if self.choices else int(text) if self.step else float(text)

    def text(self, value: Any) -> str:
        """``value`` as an override writes it."""
        return str(value) if self.choices else str(round(value)) if self.step else f"{value:.{DIGITS}g}"

    def plain(self) -> str:
        """In readable form: ``learning_rate: 1e-06 to 0.001 (log)``."""
        if self.choices:
            return f"{self.key}: {', '.join(self.choices)}"
        return f"{self.key}: {self.text(self.low)} to {self.text(self.high)}{' (log)' if self.log else ''}"


def split_space(overrides: Sequence[str]) -> tuple[list[str], list[Axis]]:
    """The overrides with one value, and the axes of the others."""
    fixed, axes = [], []
    for override in overrides:
        try:
            parsed = OverridesParser.create().parse_override(override)
        except HydraException as error:
            raise ConfigError(hydra_sentence(error)) from error
        if parsed.is_sweep_override():
            axes.append(_axis(parsed, override))
        else:
            fixed.append(override)
    return fixed, axes


def _axis(parsed: Override, override: str) -> Axis:
    key, given = str(parsed.get_key_element()), parsed.value()
    if isinstance(given, IntervalSweep):
        assert given.start is not None and given.end is not None, "Hydra's grammar asks for both"
        low, high, log = given.start, given.end, "log" in given.tags
        check(low < high, f"{override}: an interval needs its lower end first.")
        check(not log or low > 0, f"{override}: a logarithmic interval needs a lower end above 0.")
        whole = isinstance(low, int) and isinstance(high, int)
        return Axis(key, low=low, high=high, step=1 if whole else None, log=log, interval=True)
    if isinstance(given, RangeSweep):
        start, stop, step = given.start, given.stop, given.step
        if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int) and step > 0 and start < stop:
            return Axis(key, low=start, high=range(start, stop, step)[-1], step=step)
    return Axis(key, tuple(job[0].partition("=")[2] for job in sweep_jobs([override])))


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
    summary = read_summary(run_dir) or {}
    if name == "heldout_accuracy":
        after = (summary.get("heldout_accuracy") or {}).get("after")
        return None if after is None else float(after)
    lines = [line for line in read_metrics(run_dir / METRICS_FILE) if line.get(name) is not None]
    tail = lines[-max(1, len(lines) // TAIL) :]
    return statistics.fmean(float(line[name]) for line in tail) if tail else None
