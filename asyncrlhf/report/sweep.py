"""The head of a sweep's report: what it found in sentences, quality against staleness and wall-clock, and its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from asyncrlhf.report.curves import COLORS
from asyncrlhf.report.table import MISSING, Table
from asyncrlhf.sweeps.results import Cell, Estimate, Point, Results

# A method has a colour, a mark and a dash of its own; with more methods than colours the marks tell them apart.
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


def style(index: int) -> tuple[str, str, str]:
    """(colour, mark, dash) of the method with this number; no two of the first 35 are alike."""
    round_ = index // len(COLORS)
    return COLORS[index % len(COLORS)], MARKS[(index + round_) % len(MARKS)], DASHES[round_ % len(DASHES)]


def sweep_figures(results: Results) -> list[go.Figure]:
    """Quality against the staleness that came about, and against wall-clock where jobs had the machine alone."""
    shared = [cell for cell in results.cells if not cell.exclusive] or list(results.cells)
    by_lag = _quality(results, shared, lambda point: point.staleness)
    _lay_out(by_lag, "Quality against staleness", "staleness of the trained data, policy versions", results.what)
    timed = [cell for cell in results.cells if cell.exclusive]
    if not timed:
        return [by_lag]
    by_time = _quality(results, timed, lambda point: point.train_seconds)
    front = _front(timed)
    x, y = [cell.seconds.mean for cell in front], [cell.quality.mean for cell in front]
    dotted = {"color": "#888", "width": 1.3, "dash": "dot", "shape": "hv"}
    by_time.add_scatter(x=x, y=y, mode="lines", line=dotted, name="Pareto front", hoverinfo="skip")
    _lay_out(by_time, "Quality against wall-clock", "seconds of training, each job alone on the machine", results.what)
    return [by_lag, by_time]


def _quality(results: Results, cells: Sequence[Cell], across: Callable[[Point], float]) -> go.Figure:
    """A line a method: means with bars of one standard error, and each seed faint behind them."""
    figure = go.Figure()
    for index, method in enumerate(results.methods):
        own = [cell for cell in cells if cell.method == method]
        if own:
            _add(figure, style(index), method, own, across)
    return figure


def _front(cells: Sequence[Cell]) -> list[Cell]:
    """Those that no other one beats in both: quicker first, each better than all before."""
    kept: list[Cell] = []
    for cell in sorted(cells, key=lambda c: (c.seconds.mean, -c.quality.mean)):
        if not kept or cell.quality.mean > kept[-1].quality.mean:
            kept.append(cell)
    return kept


def _add(
    figure: go.Figure, look: tuple[str, str, str], name: str, cells: Sequence[Cell], across: Callable[[Point], float]
) -> None:
    color, mark, dash = look
    places = {id(cell): Estimate.of([across(point) for point in cell.points]).mean for cell in cells}
    line = sorted(cells, key=lambda cell: places[id(cell)])
    seeds = [point for cell in line for point in cell.points]
    figure.add_scatter(
        x=[across(point) for point in seeds],
        y=[point.quality for point in seeds],
        text=[point.name for point in seeds],
        mode="markers",
        marker={"color": color, "symbol": mark, "size": 6, "opacity": 0.35},
        hovertemplate="%{text}: %{y:.3f}<extra></extra>",
        legendgroup=name,
        showlegend=False,
    )
    figure.add_scatter(
        x=[places[id(cell)] for cell in line],
        y=[cell.quality.mean for cell in line],
        error_y=_bars([cell.quality for cell in line]),
        text=[cell.setting for cell in line],
        mode="lines+markers",
        line={"color": color, "width": 2.2, "dash": dash},
        marker={"color": color, "symbol": mark, "size": 9},
        hovertemplate="%{text}: %{y:.3f}<extra>" + name + "</extra>",
        name=name,
        legendgroup=name,
    )


def _bars(estimates: Sequence[Estimate]) -> dict[str, Any]:
    known = [0.0 if estimate.count < 2 else estimate.error for estimate in estimates]
    return {"type": "data", "array": known, "visible": any(known), "thickness": 1.3}


def _lay_out(figure: go.Figure, title: str, x_title: str, y_title: str) -> None:
    figure.update_layout(
        title={"text": f"<b>{title}</b>", "font": {"size": 15}, "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        margin={"l": 60, "r": 15, "t": 62, "b": 48},
        legend={"orientation": "h", "x": 0, "y": 1.01, "xanchor": "left", "yanchor": "bottom", "font": {"size": 12}},
        font={"size": 12},
    )
    figure.update_xaxes(title=x_title, rangemode="tozero")
    figure.update_yaxes(title=y_title)


def sweep_tables(results: Results) -> list[Table]:
    """A row a configuration, with the runs behind each figure, and the jobs without a result."""
    header = ["method", "setting", "seeds", results.what, "kept", "staleness", "seconds", "times sync's speed", "runs"]
    rows = [
        [
            cell.method,
            cell.setting,
            str(len(cell.points)),
            cell.quality.text(),
            MISSING if cell.kept is None else cell.kept.text(100, 1, "%"),
            cell.staleness.text(digits=2),
            cell.seconds.text(digits=1) if cell.exclusive else "not alone",
            MISSING if cell.speedup is None else cell.speedup.text(digits=2),
            ", ".join(point.path.name for point in cell.points),
        ]
        for cell in results.cells
    ]
    tables = [Table("Mean over seeds ± one standard error", header, rows)]
    if results.left_out:
        tables.append(Table("Jobs without a result", ["job", "state"], [list(r) for r in results.left_out.items()]))
    return tables
