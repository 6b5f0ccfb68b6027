"""What the report draws: its panels, and each run's numbers made ready for an axis (smoothing, bands over seeds)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from asyncrlhf.report.load import TRAIN, Group, Run

Axis = Literal["step", "wall_time"]
GRID_POINTS = 200  # of the common wall-clock axis on which seeds are averaged
SMOOTH_FROM = 40  # steps; shorter runs are drawn as they are

DASHES = ("solid", "dash", "dot")  # of a panel's lines, told apart by them where colour tells the runs apart

# Okabe and Ito's palette, told apart also by colour-blind readers; yellow is left out, too pale on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


def is_sparse(metric: str) -> bool:
    """Whether it is known at few steps alone, and drawn as points joined by lines."""
    return metric.startswith("heldout_")


@dataclass(frozen=True)
class Panel:
    """One set of axes. ``labels``: what the line of each metric is called; ``limits`` fixes the vertical range."""

    title: str
    unit: str
    labels: Mapping[str, str]
    limits: tuple[float, float] | None = None
    bound: bool = False  # draws the staleness bound


_FRACTION = (0.0, 1.0)
_ENTROPY = Panel("Entropy", "nats a token", {"entropy": "entropy"})
PANELS = (
    Panel("Reward", "mean reward of a batch", {"reward_mean": "reward"}),
    Panel("Held-out accuracy", "fraction solved", {"heldout_accuracy": "greedy"}, _FRACTION),
    Panel(
        "Staleness of the trained data",
        "policy versions",
        {"staleness_mean": "mean", "staleness_max": "max"},
        bound=True,
    ),
    Panel(
        "Where staleness arises",
        "policy versions, mean",
        {"staleness_in_flight_mean": "in flight", "staleness_in_queue_mean": "in queue"},
    ),
    Panel(
        "Idle time",
        "fraction of the time",
        {"learner_idle_fraction": "learner", "generator_idle_fraction": "generators"},
        _FRACTION,
    ),
    Panel(
        "Effective sample size",
        "fraction of the samples",
        {"ess_fraction": "tokens", "ess_fraction_seq": "sequences"},
        (0.0, 1.05),
    ),
    Panel("Policy against data", "behavior KL, nats a token", {"behavior_kl": "behavior KL"}),
    _ENTROPY,
    Panel("Throughput", "samples/s", {"samples_per_second": "trained"}),
    Panel("Response length", "tokens, mean", {"response_length_mean": "length"}),
)


def _both(title: str, unit: str, metric: str, limits: tuple[float, float] | None = None) -> Panel:
    """A metric of training, and the same of the held-out rows."""
    return Panel(title, unit, {metric: "training", f"heldout_{metric}": "held out"}, limits)


_LOSS = _both("Loss", "nats", "loss")
_OPTIMIZER = (
    Panel("Gradient norm", "before clipping", {"grad_norm": "norm"}),
    Panel("Learning rate", "", {"learning_rate": "learning rate"}),
)
_SCORES = {"mean_reward": "mean", "max_reward": "largest", "min_reward": "smallest"}
STAGE_PANELS = {
    TRAIN: PANELS,
    "sft": (
        _LOSS,
        _both("Token accuracy", "fraction of the tokens", "mean_token_accuracy", _FRACTION),
        _ENTROPY,
        *_OPTIMIZER,
    ),
    "reward-model": (
        _LOSS,
        _both("Accuracy", "fraction of the pairs", "accuracy", _FRACTION),
        _both("Margin", "chosen less rejected, mean", "margin"),
        Panel("Scores", "of a batch", _SCORES),
        *_OPTIMIZER,
    ),
}


@dataclass(frozen=True)
class Curve:
    """One line to draw: ``x``, ``y`` [K], its unsmoothed self or the seeds under it, and the band of one deviation."""

    x: np.ndarray
    y: np.ndarray
    faint: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def shown_panels(groups: Sequence[Group]) -> list[Panel]:
    """Panels for which at least one run has data."""
    runs = [run for group in groups for run in group.runs]
    panels = STAGE_PANELS.get(runs[0].stage, PANELS)
    return [p for p in panels if any(run.column(metric) is not None for run in runs for metric in p.labels)]


def step_name(groups: Sequence[Group]) -> str:
    """What a step of these runs is."""
    return "learner steps" if groups[0].runs[0].stage == TRAIN else "optimizer steps"


def curve(group: Group, metric: str, axis: Axis, scale: float = 1.0) -> Curve | None:
    """The group's line for one metric, or None without data. ``scale`` divides the axis (60: minutes).

    One run: its values, smoothed by a running mean when it is long, with the raw values faint. Several: the mean and
    one sample standard deviation over the runs, on the steps (or the wall-clock span) that all of them reached.
    """
    lines = [line for run in group.runs if (line := _line(run, metric, axis, scale)) is not None]
    if not lines:
        return None
    sparse = is_sparse(metric)
    if len(lines) == 1:
        x, y = lines[0]
        window = 1 if sparse else smoothing_window(len(y))
        return Curve(x, running_mean(y, window), faint=((x, y),) if window > 1 else ())
    if sparse and axis == "wall_time":
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


@dataclass(frozen=True)
class Line:
    """A curve of a panel as it is drawn: ``dash`` in plotly's words, ``markers`` where single points must be seen."""

    curve: Curve
    group: Group
    label: str
    dash: str
    color: str
    markers: bool


def panel_lines(groups: Sequence[Group], panel: Panel, axis: Axis, scale: float = 1.0) -> list[Line]:
    """All curves of a panel: colours tell groups apart where there are several, else the panel's own metrics."""
    lines = []
    for group_index, group in enumerate(groups):
        for index, (metric, label) in enumerate(panel.labels.items()):
            drawn = curve(group, metric, axis, scale)
            if drawn is not None:
                color = line_color(group_index if len(groups) > 1 else index)
                markers = is_sparse(metric) or len(drawn.x) == 1
                lines.append(Line(drawn, group, label, DASHES[index], color, markers))
    return lines


def line_color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def smoothing_window(length: int) -> int:
    """Steps of the running mean: 1 (none) for short runs, else a thirtieth of the run, odd."""
    return 1 if length < SMOOTH_FROM else max(3, length // 30 // 2 * 2 + 1)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean [K]; towards the ends the window shrinks to what there is."""
    if window <= 1:
        return values
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def time_scale(runs: Sequence[Run]) -> tuple[float, str]:
    """Seconds in a unit of the wall-clock axis, and the unit's name, fitting the longest run."""
    longest = max((float(np.nanmax(t)) for run in runs if (t := run.column("wall_time")) is not None), default=0.0)
    if longest < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest < 3 * 3600 else (3600.0, "hours")


def staleness_bound(groups: Sequence[Group]) -> float | None:
    """The bound that all runs share, from their summaries; None when they differ or one is unknown."""
    bounds = {((run.summary or {}).get("staleness") or {}).get("bound") for group in groups for run in group.runs}
    return bounds.pop() if len(bounds) == 1 else None


def _line(run: Run, metric: str, axis: Axis, scale: float) -> tuple[np.ndarray, np.ndarray] | None:
    x, y = run.column(axis), run.column(metric)
    if x is None or y is None:
        return None
    known = np.isfinite(x) & np.isfinite(y)
    return (x[known] / scale, y[known]) if known.any() else None


def _mean_of_points(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> Curve:
    """Evaluations happen at equal steps but unequal times: average the n-th of each run in both directions."""
    common = min(len(x) for x, _ in lines)
    x, y = (np.stack([line[side][:common] for line in lines]) for side in (0, 1))  # [runs, common]
    middle, spread = y.mean(axis=0), y.std(axis=0, ddof=1)
    return Curve(x.mean(axis=0), middle, faint=tuple(lines), low=middle - spread, high=middle + spread)


def _common_grid(lines: Sequence[tuple[np.ndarray, np.ndarray]], axis: Axis) -> np.ndarray:
    if axis == "step":
        common = lines[0][0]
        for x, _ in lines[1:]:
            common = np.intersect1d(common, x)
        return common
    start, end = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    return np.linspace(start, end, GRID_POINTS) if end > start else np.array([])
