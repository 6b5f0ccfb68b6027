"""Draws the report's panels as one PNG, which an experiment commits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from asyncrlhf.report.curves import Line, panel_lines
from asyncrlhf.report.load import Group
from asyncrlhf.report.panels import Panel, shown_panels, staleness_bound, step_name
from asyncrlhf.report.series import DASHES, MARKS, Series, build_series

_STYLES = ("-", (0, (4, 2)), ":", "-.", (0, (8, 3)), (0, (8, 2, 1, 2)))
_DASHES: dict[str, Any] = dict(zip(DASHES, _STYLES, strict=True))
_MARKS = dict(zip(MARKS, "osD^X*Pv", strict=True))
_COLUMNS = 3
_DPI = 110


def write_curves(groups: Sequence[Group], path: Path) -> None:
    """Write every panel of the report over steps as one PNG."""
    panels, series = shown_panels(groups), build_series(groups, [""] * len(groups))
    columns = max(1, min(_COLUMNS, len(panels)))
    rows = -(-len(panels) // columns)
    figure = Figure(
        figsize=(4.7 * columns, 3.1 * rows + (0.5 if len(groups) > 1 else 0.0)),
        dpi=_DPI,
        layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09),
    )
    FigureCanvasAgg(figure)
    for index, panel in enumerate(panels, start=1):
        _draw_panel(figure.add_subplot(rows, columns, index), groups, series, panel)
    if len(groups) > 1:
        handles = [Line2D([], [], color=one.color, linestyle=_DASHES[one.dash], linewidth=2.5) for one in series]
        labels = [_group_label(group) for group in groups]
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(groups), 3), frameon=False, fontsize=10)
    figure.savefig(path)


def _draw_panel(axes: Axes, groups: Sequence[Group], series: Sequence[Series], panel: Panel) -> None:
    for line in panel_lines(groups, panel, "step"):
        _draw_line(axes, line, series[line.group])
    bound = staleness_bound(groups) if panel.bound else None
    if bound is not None:
        axes.axhline(bound, color="#888888", linewidth=1.2, linestyle=":")
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(step_name(groups), fontsize=9)
    axes.set_ylabel(panel.unit, fontsize=9)
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    elif panel.unit.startswith("policy versions"):
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.0) * 1.02)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=axes.get_ylim()[1] >= 3))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.tick_params(labelsize=8.5)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_line(axes: Axes, line: Line, series: Series) -> None:
    drawn, color = line.curve, series.color
    for x, y in drawn.faint:
        style = {"linestyle": "-"} if len(x) > 1 else {"linestyle": "", "marker": "."}
        axes.plot(x, y, color=color, linewidth=0.8, alpha=0.3, **style)
    if drawn.low is not None and drawn.high is not None:
        axes.fill_between(drawn.x, drawn.low, drawn.high, color=color, alpha=0.18, linewidth=0)
    marks = line.points or series.marked or len(drawn.x) == 1
    dash, marker = _DASHES[series.dash], _MARKS[series.mark] if marks else ""
    every = None if line.points else max(1, len(drawn.x) // 8)
    axes.plot(
        drawn.x, drawn.y, color=color, linewidth=1.9, linestyle=dash, marker=marker, markersize=4, markevery=every
    )


def _group_label(group: Group) -> str:
    return group.label if len(group.runs) == 1 else f"{group.label} (mean of {len(group.runs)} runs)"
