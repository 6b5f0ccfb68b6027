"""Prepares each run's numbers for drawing: over steps, samples, tokens or wall-clock, smoothed, and with bands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from asyncrlhf.report.load import SAMPLES, TOKENS, Group, Run
from asyncrlhf.report.panels import Panel, is_sparse

Axis = Literal["step", "samples_trained", "tokens_trained", "wall_time"]
AXES: tuple[Axis, ...] = ("step", SAMPLES, TOKENS, "wall_time")
GRID_POINTS = 200  # of a common axis on which seeds are averaged
SMOOTH_FROM = 40  # steps; shorter runs are drawn as they are
MOST_POINTS = 300  # of one line; longer ones are thinned after they were smoothed

Points = tuple[np.ndarray, np.ndarray]  # x, y [K]


@dataclass(frozen=True)
class Curve:
    """One line to draw: ``x``, ``y`` [K], its raw values or the single seeds, and its band."""

    x: np.ndarray
    y: np.ndarray
    faint: tuple[Points, ...] = ()
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def curve(
    group: Group, metric: str, axis: Axis, scale: float = 1.0, band: tuple[str, str] | None = None
) -> Curve | None:
    """The group's line for one metric, or None without data. ``scale`` divides the axis (60: minutes).

    One run: its values, smoothed by a running mean if it is long, with the raw values faint. Several: the mean and one
    sample standard deviation over the runs, on the steps (or the range of the axis) that all of them reached. ``band``
    names metrics to use as its edges instead, drawn in the same way.
    """
    drawn = _curve(group, metric, axis, scale)
    if drawn is None or band is None:
        return drawn
    edges = [_curve(group, name, axis, scale) for name in band]
    if any(edge is None or len(edge.x) != len(drawn.x) for edge in edges):
        return drawn
    low, high = (edge.y for edge in edges if edge is not None)
    return replace(drawn, faint=(), low=low, high=high)


def _curve(group: Group, metric: str, axis: Axis, scale: float) -> Curve | None:
    lines = [line for run in group.runs if (line := axis_points(run, metric, axis, scale)) is not None]
    if not lines:
        return None
    sparse = is_sparse(metric)
    if len(lines) == 1:
        x, y = lines[0]
        window = 1 if sparse else smoothing_window(len(y))
        return Curve(x, running_mean(y, window), faint=((x, y),) if window > 1 else ())
    if sparse and axis != "step":
        return _mean_of_points(lines)
    grid = _common_grid(lines, axis)
    if len(grid) == 0:
        return Curve(*lines[0], faint=tuple(lines[1:]))
    stacked = np.stack([np.interp(grid, x, y) for x, y in lines])  # [runs, K]
    short = min(len(x) for x, _ in lines) < SMOOTH_FROM  # the grid of times is fine whatever the runs are
    window = 1 if sparse or short else smoothing_window(len(grid))
    middle = running_mean(stacked.mean(axis=0), window)
    spread = running_mean(stacked.std(axis=0, ddof=1), window)
    return Curve(grid, middle, faint=tuple(lines) if sparse else (), low=middle - spread, high=middle + spread)


def thinned(drawn: Curve) -> Curve:
    """At most MOST_POINTS of each line, evenly chosen, including its ends."""
    keep = _kept(len(drawn.x))
    low, high = (None if edge is None else edge[keep] for edge in (drawn.low, drawn.high))
    faint = tuple((x[_kept(len(x))], y[_kept(len(x))]) for x, y in drawn.faint)
    return Curve(drawn.x[keep], drawn.y[keep], faint, low, high)


def _kept(length: int) -> np.ndarray:
    return np.unique(np.linspace(0, length - 1, min(length, MOST_POINTS)).round().astype(int))


@dataclass(frozen=True)
class Line:
    """A curve of a panel, and the number of its group. ``points``: the curve of the panel's second metric."""

    curve: Curve
    group: int
    points: bool = False


def panel_lines(groups: Sequence[Group], panel: Panel, axis: Axis, scale: float = 1.0) -> list[Line]:
    """All curves of a panel."""
    lines = []
    for number, group in enumerate(groups):
        if (drawn := curve(group, panel.metric, axis, scale, panel.band)) is not None:
            lines.append(Line(drawn, number, is_sparse(panel.metric)))
        if panel.points and (drawn := curve(group, panel.points, axis, scale)) is not None:
            lines.append(Line(drawn, number, True))
    return lines


def smoothing_window(length: int) -> int:
    """Steps of the running mean: 1 (none) for short runs, else a thirtieth of the run, odd."""
    return 1 if length < SMOOTH_FROM else max(3, length // 30 // 2 * 2 + 1)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean [K]; near the ends the window is smaller."""
    if window <= 1:
        return values
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def time_scale(runs: Sequence[Run]) -> tuple[float, str]:
    """Seconds in a unit of the wall-clock axis, and the unit's name, suited to the longest run."""
    longest = max((float(np.nanmax(t)) for run in runs if (t := run.column("wall_time")) is not None), default=0.0)
    if longest < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest < 3 * 3600 else (3600.0, "hours")


def axis_points(run: Run, metric: str, axis: Axis, scale: float = 1.0) -> Points | None:
    """The run's positions on the axis, over ``scale``, with a value of the metric, and these values; None if there are
    none."""
    x, y = run.column(axis), run.column(metric)
    if x is None or y is None:
        return None
    known = np.isfinite(x) & np.isfinite(y)
    return (x[known] / scale, y[known]) if known.any() else None


def _mean_of_points(lines: Sequence[Points]) -> Curve:
    """Average the n-th point of each run in both directions: evaluations happen at equal steps but unequal times."""
    common = min(len(x) for x, _ in lines)
    x, y = (np.stack([line[side][:common] for line in lines]) for side in (0, 1))  # [runs, common]
    middle, spread = y.mean(axis=0), y.std(axis=0, ddof=1)
    return Curve(x.mean(axis=0), middle, faint=tuple(lines), low=middle - spread, high=middle + spread)


def _common_grid(lines: Sequence[Points], axis: Axis) -> np.ndarray:
    if axis == "step":
        common = lines[0][0]
        for x, _ in lines[1:]:
            common = np.intersect1d(common, x)
        return common
    if all(np.array_equal(x, lines[0][0]) for x, _ in lines[1:]):
        return lines[0][0]
    start, end = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    return np.linspace(start, end, GRID_POINTS) if end > start else np.array([])
