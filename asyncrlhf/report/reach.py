"""When a run first reaches a quality: over steps, samples and tokens, and over wall-clock for runs that ran alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrlhf.report.curves import Axis, axis_points
from asyncrlhf.report.load import Group, Run, heldout_measure
from asyncrlhf.report.page import PageAxis
from asyncrlhf.sweeps.results import Cell, Estimate

LEVELS = 25  # qualities to look for
EVALUATIONS = 4  # held-out accuracy is the measure where every run has so many
WINDOW = 10  # otherwise the mean reward of the last steps: a tenth of the run
GOAL_SHARE = 0.9  # of the best quality that a configuration ends with: the table's goal


@dataclass(frozen=True)
class Reached:
    """``curves``: by series and axis, the mean over its seeds of the first time at each of the ``levels`` [K], NaN
    unless all seeds reached it, and its standard error. ``goals``: the same at the ``goal`` alone; ``came``: the series
    of each cell, and how many of its seeds reached the goal."""

    what: str
    levels: np.ndarray
    goal: float
    axes: tuple[PageAxis, ...]
    curves: dict[tuple[int, Axis], tuple[np.ndarray, np.ndarray]]
    goals: dict[tuple[int, Axis], Estimate]
    came: tuple[tuple[int, int], ...]


def reached(cells: Sequence[Cell], groups: Sequence[Group], axes: Sequence[PageAxis]) -> Reached | None:
    """None if no run recorded a quality during training."""
    runs = {run.path.resolve(): (number, run) for number, group in enumerate(groups) for run in group.runs}
    members = [[runs[p.path.resolve()] for p in cell.points if p.path.resolve() in runs] for cell in cells]
    every = [run for found in members for _, run in found]
    heldout = bool(every) and all(_count(run) >= EVALUATIONS for run in every)
    metric = "heldout_accuracy" if heldout else "reward_mean"
    ways = {id(run): way for run in every if (way := _way(run, metric, "step")) is not None}
    if len(ways) < len(every) or not every:
        return None
    ends = [float(np.mean([ways[id(run)][1][-1] for _, run in found])) for found in members]
    highest = max(float(np.max(y)) for _, y in ways.values())
    levels = np.linspace(min(float(y[0]) for _, y in ways.values()), highest, LEVELS)
    goal = GOAL_SHARE * max(ends)
    curves: dict[tuple[int, Axis], tuple[np.ndarray, np.ndarray]] = {}
    goals: dict[tuple[int, Axis], Estimate] = {}
    for cell, found in zip(cells, members, strict=True):
        for axis in axes:
            if axis.name == "wall_time" and not cell.exclusive:
                continue
            lines = [line for _, run in found if (line := _way(run, metric, axis.name)) is not None]
            if len(lines) < len(found):
                continue
            times = np.array([[first(line, level) / axis.scale for level in levels] for line in lines])
            error = times.std(axis=0, ddof=1) / len(lines) ** 0.5 if len(lines) > 1 else np.full(LEVELS, np.nan)
            curves[found[0][0], axis.name] = times.mean(axis=0), error
            at_goal = [first(line, goal) / axis.scale for line in lines]
            if np.isfinite(at_goal).all():
                goals[found[0][0], axis.name] = Estimate.of(at_goal)
    came = tuple((f[0][0], sum(bool(np.isfinite(first(ways[id(run)], goal))) for _, run in f)) for f in members)
    what = f"held-out {heldout_measure(every)}" if heldout else f"reward, mean of the last 1/{WINDOW} of the steps"
    return Reached(what, levels, goal, tuple(axes), curves, goals, came)


def first(line: tuple[np.ndarray, np.ndarray], level: float) -> float:
    """The position on the axis where the line first reaches the level; NaN if never."""
    x, y = line
    at = np.flatnonzero(y >= level)
    return float(x[at[0]]) if len(at) else float("nan")


def _way(run: Run, metric: str, axis: Axis) -> tuple[np.ndarray, np.ndarray] | None:
    """The run's quality along the axis. For rewards the mean of the last steps, from the first full window on."""
    line = axis_points(run, metric, axis)
    if line is None or metric != "reward_mean":
        return line
    x, y = line
    window = max(1, len(y) // WINDOW)
    return x[window - 1 :], np.convolve(y, np.full(window, 1 / window), "valid")


def _count(run: Run) -> int:
    column = run.column("heldout_accuracy")
    return 0 if column is None else int(np.isfinite(column).sum())
