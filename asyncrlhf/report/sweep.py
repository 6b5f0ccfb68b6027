"""The head of a sweep's report: what it found in sentences, quality against staleness and wall-clock, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from asyncrlhf.report.curves import COLORS
from asyncrlhf.report.table import MISSING, Table
from asyncrlhf.sweeps.results import Cell, Estimate, Results

# A method has a colour, a mark and a dash of its own; with more methods than colours the marks tell them apart.
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


def style(index: int) -> tuple[str, str, str]:
    """(colour, mark, dash) of the method with this number; no two of the first 35 are alike."""
    round_ = index // len(COLORS)
    return COLORS[index % len(COLORS)], MARKS[(index + round_) % len(MARKS)], DASHES[round_ % len(DASHES)]


def sweep_figures(results: Results) -> list[go.Figure]:
    """Quality against the staleness that came about, and against wall-clock where jobs had the machine alone."""
    quality = [cell for cell in results.cells if not cell.exclusive] or list(results.cells)
    figures = [_quality_by_lag(results, quality)]
    timed = [cell for cell in results.cells if cell.exclusive]
    if timed:
        figures.append(_quality_by_time(results, timed))
    return figures


def _quality_by_lag(results: Results, cells: Sequence[Cell]) -> go.Figure:
    figure = go.Figure()
    for index, method in enumerate(results.methods):
        line = sorted((c for c in cells if c.method == method), key=lambda c: c.staleness.mean)
        if line:
            _add(figure, index, method, [c.staleness for c in line], [c.quality for c in line], line)
    _lay_out(figure, "Quality against staleness", "staleness of the trained data, policy versions", results.what)
    return figure


def _quality_by_time(results: Results, cells: Sequence[Cell]) -> go.Figure:
    figure = go.Figure()
    for index, method in enumerate(results.methods):
        line = sorted((c for c in cells if c.method == method), key=lambda c: c.seconds.mean)
        if line:
            _add(figure, index, method, [c.seconds for c in line], [c.quality for c in line], line)
    front = _front(cells)
    x, y = [cell.seconds.mean for cell in front], [cell.quality.mean for cell in front]
    line_style = {"color": "#888", "width": 1.3, "dash": "dot", "shape": "hv"}
    figure.add_scatter(x=x, y=y, mode="lines", line=line_style, name="Pareto front", hoverinfo="skip")
    _lay_out(figure, "Quality against wall-clock", "seconds of training, each job alone on the machine", results.what)
    return figure


def _front(cells: Sequence[Cell]) -> list[Cell]:
    """Those that no other one beats in both: quicker first, each better than all before."""
    kept: list[Cell] = []
    for cell in sorted(cells, key=lambda c: (c.seconds.mean, -c.quality.mean)):
        if not kept or cell.quality.mean > kept[-1].quality.mean:
            kept.append(cell)
    return kept


def _add(
    figure: go.Figure, index: int, name: str, x: Sequence[Estimate], y: Sequence[Estimate], cells: Sequence[Cell]
) -> None:
    """Means with bars of one standard error, and each seed faint behind them."""
    color, mark, dash = style(index)
    seeds = [point for cell in cells for point in cell.points]
    by_time = x[0].mean == cells[0].seconds.mean and x[0].mean != cells[0].staleness.mean
    figure.add_scatter(
        x=[point.train_seconds if by_time else point.staleness for point in seeds],
        y=[point.quality for point in seeds],
        text=[point.name for point in seeds],
        mode="markers",
        marker={"color": color, "symbol": mark, "size": 6, "opacity": 0.35},
        hovertemplate="%{text}: %{y:.3f}<extra></extra>",
        legendgroup=name,
        showlegend=False,
    )
    figure.add_scatter(
        x=[estimate.mean for estimate in x],
        y=[estimate.mean for estimate in y],
        error_y=_bars(y),
        text=[cell.setting for cell in cells],
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
