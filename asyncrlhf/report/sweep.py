"""The head of a sweep's report: quality against staleness and wall-clock, time to reach a quality, and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrlhf.report.curves import Axis, axis_points
from asyncrlhf.report.load import Group, Run, heldout_measure
from asyncrlhf.report.page import Arrays, Canvas, Chart, PageAxis, Section, Trace, band
from asyncrlhf.report.table import MISSING, Table
from asyncrlhf.sweeps.results import Cell, Estimate, Point, Results

LEVELS = 25  # qualities to look for
EVALUATIONS = 4  # held-out accuracy is the measure where every run has so many
WINDOW = 10  # otherwise the mean reward of the last steps: a tenth of the run
GOAL_SHARE = 0.9  # of the best quality that a configuration ends with: the table's goal

Numbers = dict[Path, int]  # the series of a run, by its folder


def series_of(groups: Sequence[Group]) -> Numbers:
    return {run.path.resolve(): number for number, group in enumerate(groups) for run in group.runs}


def sweep_section(results: Results, groups: Sequence[Group], canvas: Canvas) -> tuple[Section, list[Table]]:
    """The charts of a sweep's jobs, and its tables."""
    numbers, arrays = series_of(groups), canvas.arrays
    cells = [cell for cell in results.cells if _number(cell, numbers) is not None]
    shared = [cell for cell in cells if not cell.exclusive] or cells
    timed = [cell for cell in cells if cell.exclusive]
    charts = []
    if shared:
        title, x = "Quality against staleness", "staleness of the trained data, policy versions"
        traces = _quality(shared, numbers, arrays, lambda point: point.staleness)
        charts.append(Chart(title, results.what, {"": traces}, "mean over seeds; band: one standard error", x))
    if timed:
        traces = _quality(timed, numbers, arrays, lambda point: point.train_seconds, [_front(timed, numbers, arrays)])
        note = "jobs that had the machine alone; ringed: the Pareto front"
        charts.append(Chart("Quality against wall-clock", results.what, {"": traces}, note, "seconds of training"))
    found = reached(cells, groups, canvas.axes)
    if found is not None:
        charts.append(_reach_chart(found, arrays))
    tables = [*sweep_tables(results), *([] if found is None else [_reach_table(found, cells)])]
    return Section(f"Sweep {results.name}", charts), tables


def _number(cell: Cell, numbers: Numbers) -> int | None:
    return next((n for point in cell.points if (n := numbers.get(point.path.resolve())) is not None), None)


def _quality(
    cells: Sequence[Cell],
    numbers: Numbers,
    arrays: Arrays,
    across: Callable[[Point], float],
    behind: Sequence[Trace] = (),
) -> list[Trace]:
    """One line per method in a band of one standard error, each setting with its mark, each seed faint behind them."""
    traces = list(behind)
    for method in dict.fromkeys(cell.method for cell in cells):
        places = {id(c): Estimate.of([across(p) for p in c.points]).mean for c in cells if c.method == method}
        line = sorted((c for c in cells if c.method == method), key=lambda cell: places[id(cell)])
        of = [n for cell in line if (n := _number(cell, numbers)) is not None]
        x = np.array([places[id(cell)] for cell in line])
        y = np.array([cell.quality.mean for cell in line])
        error = np.nan_to_num([cell.quality.error for cell in line])
        if error.any():
            traces += band(of[0], x, y - error, y + error, arrays, of=of)
        points = [(point, n) for cell, n in zip(line, of, strict=True) for point in cell.points]
        seeds: Trace = {"kind": "seeds", "s": of[0], "of": [n for _, n in points]}
        seeds |= {"x": arrays.add([across(p) for p, _ in points]), "y": arrays.add([p.quality for p, _ in points])}
        seeds["text"] = [point.name for point, _ in points]
        traces.append(seeds)
        text = [cell.setting for cell in line]
        traces.append({"kind": "marks", "s": of[0], "of": of, "x": arrays.add(x), "y": arrays.add(y), "text": text})
    return traces


def front(cells: Sequence[Cell]) -> list[Cell]:
    """The Pareto front: fastest cell first, each better than all before."""
    kept: list[Cell] = []
    for cell in sorted(cells, key=lambda c: (c.seconds.mean, -c.quality.mean)):
        if not kept or cell.quality.mean > kept[-1].quality.mean:
            kept.append(cell)
    return kept


def _front(cells: Sequence[Cell], numbers: Numbers, arrays: Arrays) -> Trace:
    best = front(cells)
    x, y = [cell.seconds.mean for cell in best], [cell.quality.mean for cell in best]
    return {"kind": "front", "of": [_number(c, numbers) for c in best], "x": arrays.add(x), "y": arrays.add(y)}


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


def _reach_chart(found: Reached, arrays: Arrays) -> Chart:
    traces: dict[str, list[Trace]] = {}
    for axis in found.axes:
        traces[axis.name] = []
        for (number, name), (mean, error) in found.curves.items():
            if name == axis.name:
                low, high = (mean + sign * np.nan_to_num(error) for sign in (-1, 1))
                known = np.isfinite(mean)
                x = found.levels[known]
                low, high = (low[known], high[known]) if np.nan_to_num(error).any() else (None, None)
                traces[axis.name] += band(number, x, low, high, arrays)
                traces[axis.name].append(
                    {"kind": "line", "s": number, "x": arrays.add(x), "y": arrays.add(mean[known])}
                )
    note = "a line ends at the last point that all seeds reached; over wall-clock: jobs that had the machine alone"
    return Chart("Time to a given quality", "first time that it is reached", traces, note, found.what, swapped=True)


def _reach_table(found: Reached, cells: Sequence[Cell]) -> Table:
    names = [axis.title for axis in found.axes]
    rows = []
    for cell, (number, came) in zip(cells, found.came, strict=True):
        cells_of = [
            MISSING if (estimate := found.goals.get((number, axis.name))) is None else estimate.text(digits=1)
            for axis in found.axes
        ]
        rows.append([cell.method, cell.setting, f"{came} of {len(cell.points)}", *cells_of])
    title = f"Time to a {found.what} of {found.goal:.3f}: {GOAL_SHARE:.0%} of the best at the end"
    return Table(title, ["method", "setting", "seeds that came there", *names], rows)


def sweep_tables(results: Results) -> list[Table]:
    """One row per configuration, with the runs behind its values, and the jobs without a result."""
    header = ["method", "setting", "seeds", results.what, "kept", "staleness", "seconds", "times sync's speed", "runs"]
    rows: list[list[Any]] = [
        [
            cell.method,
            cell.setting,
            str(len(cell.points)),
            cell.quality.text(),
            MISSING if cell.kept is None else cell.kept.text(100, 1, "%"),
            cell.staleness.text(digits=2),
            cell.seconds.text(digits=1) if cell.exclusive else "not alone",
            MISSING if cell.speedup is None else cell.speedup.text(digits=2),
            "; ".join(point.path.name for point in cell.points),
        ]
        for cell in results.cells
    ]
    tables = [Table("Mean over seeds ± one standard error", header, rows)]
    if results.left_out:
        tables.append(Table("Jobs without a result", ["job", "state"], [list(r) for r in results.left_out.items()]))
    return tables
