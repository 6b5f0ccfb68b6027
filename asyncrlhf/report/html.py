"""Builds the report: one HTML page that opens from disk without a network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from asyncrlhf.report import rollouts, timeline
from asyncrlhf.report.curves import (
    DASHES,
    Axis,
    Line,
    Panel,
    line_color,
    panel_lines,
    shown_panels,
    staleness_bound,
    step_name,
    time_scale,
)
from asyncrlhf.report.load import Group, Run, group_runs, load_runs
from asyncrlhf.report.sweep import sweep_figures, sweep_tables
from asyncrlhf.report.table import build_tables
from asyncrlhf.sweeps.record import is_sweep
from asyncrlhf.sweeps.results import Results, read_results, sentences

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: #222; }
body { margin: 2rem auto; max-width: 1400px; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; } summary h2 { display: inline-block; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.note { color: #666; margin: .2rem 0; } .finding { margin: .4rem 0; }
.runs span { display: inline-block; margin-right: 1.4rem; }
.runs i { display: inline-block; width: 1.6em; height: .35em; margin-right: .45em; vertical-align: middle; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)); gap: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #e3e3e3; text-align: right; white-space: nowrap; }
th { background: #f6f6f6; } th:first-child, td:first-child { text-align: left; }
</style><script>{{ plotly | safe }}</script></head><body>
<h1>{{ title }}</h1><p class="note">{{ note }}</p>
{% for sentence in findings %}<p class="finding">{{ sentence }}</p>
{% endfor %}
<p class="runs">{% for color, label in legend %}
<span><i style="background:{{ color }}"></i>{{ label }}</span>{% endfor %}</p>
{% for heading, figures in sections %}<h2>{{ heading }}</h2>
<div class="grid">{% for figure in figures %}<div>{{ figure | safe }}</div>{% endfor %}</div>
{% endfor %}
{% for heading, html in extras %}<details{{ " open" if extras | length <= 4 }}
ontoggle="this.querySelectorAll('.js-plotly-plot').forEach((chart) => Plotly.Plots.resize(chart))">
<summary><h2>{{ heading }}</h2></summary>{{ html | safe }}</details>
{% endfor %}
<h2>Summary</h2>
{% for table in tables %}<h3>{{ table.title }}</h3><div class="scroll"><table>
<tr>{% for name in table.header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endfor %}
{% if unread %}<h3>Runs that could not be read</h3><ul>
{% for reason in unread.values() %}<li>{{ reason }}</li>{% endfor %}</ul>{% endif %}
</body></html>
"""


def build_report(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Draw the curves of the runs and write ``index.html``; returns its path.

    ``out`` is the folder: by default ``report`` within one run or sweep, and ``./report`` for several. Folders are
    searched for runs. Runs that differ only by seed become one line with a band; what cannot be read is listed. Raises
    ConfigError when nothing can.
    """
    unread: dict[str, str] = {}
    sweeps = {Path(path): read_results(Path(path)) for path in run_dirs if is_sweep(path)}
    # Of a sweep its finished jobs: its folder holds attempts that failed, too.
    runs = load_runs(
        [run for path in map(Path, run_dirs) for run in (sweeps[path].runs if path in sweeps else [path])], unread
    )
    single = run_dirs[0] if len(run_dirs) == 1 and is_sweep(run_dirs[0]) else runs[0].path if len(runs) == 1 else None
    folder = Path(out) if out is not None else Path("report") if single is None else Path(single) / "report"
    groups = group_runs(runs)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    temporary = page.with_suffix(".tmp")
    temporary.write_text(render(runs, groups, list(sweeps.values()), unread), encoding="utf-8")
    os.replace(temporary, page)
    return page


def render(
    runs: Sequence[Run],
    groups: Sequence[Group],
    sweeps: Sequence[Results] = (),
    unread: Mapping[str, str] | None = None,
) -> str:
    """The whole page as text, plotly.js included."""
    panels = shown_panels(groups)
    _, unit = time_scale(runs)
    sections = [(f"Sweep {found.name}", [_html(figure) for figure in sweep_figures(found)]) for found in sweeps]
    sections.append((f"Over {step_name(groups)}", [_figure(groups, panel, "step") for panel in panels]))
    if any(run.column("wall_time") is not None for run in runs):
        sections.append((f"Over wall-clock ({unit})", [_figure(groups, panel, "wall_time") for panel in panels]))
    legend = [] if len(groups) == 1 else [(line_color(i), _described(group)) for i, group in enumerate(groups)]
    title = f"Run {_described(groups[0])}" if len(groups) == 1 else f"{len(groups)} configurations compared"
    return (
        jinja2.Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title=title,
            note=_note(runs, groups),
            plotly=get_plotlyjs(),
            findings=[sentence for found in sweeps for sentence in sentences(found)],
            legend=legend,
            sections=sections,
            extras=_extras(runs),
            tables=[table for found in sweeps for table in sweep_tables(found)] + build_tables(runs, groups),
            unread=unread or {},
        )
    )


def _extras(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(heading, HTML) of what is shown run by run: timelines, then rollouts."""
    bars, room = timeline.MAX_BARS // min(len(runs), 10), rollouts.MAX_BYTES // len(runs)
    found = [(f"Timeline of {run.label}", timeline.section(run, bars)) for run in runs]
    found += [(f"Rollouts of {run.label}", rollouts.section(run, room)) for run in runs]
    return [(heading, html) for heading, html in found if html]


def _html(figure: go.Figure) -> str:
    config = {"displaylogo": False, "responsive": True}
    return str(figure.to_html(include_plotlyjs=False, full_html=False, config=config, default_height="320px"))


def _figure(groups: Sequence[Group], panel: Panel, axis: Axis) -> str:
    """One panel as an HTML fragment; runs are told apart by colour, the panel's own lines by their dashes."""
    scale, unit = time_scale([run for group in groups for run in group.runs]) if axis == "wall_time" else (1.0, "")
    figure, several = go.Figure(), len(groups) > 1
    for line in panel_lines(groups, panel, axis, scale):
        name = f"{line.group.label}: {line.label}" if several else line.label
        _add_line(figure, line, name, shown=len(panel.labels) > 1 and not several)
    if several and len(panel.labels) > 1:
        for label, dash in zip(panel.labels.values(), DASHES, strict=False):
            _add_key(figure, label, {"color": "#555", "width": 2, "dash": dash})
    bound = staleness_bound(groups) if panel.bound else None
    if bound is not None:
        dotted = {"color": "#888", "width": 1.3, "dash": "dot"}
        figure.add_hline(y=bound, line=dotted)
        _add_key(figure, f"bound ({bound:g})", dotted)
    _lay_out(figure, panel, step_name(groups) if axis == "step" else f"wall-clock, {unit}")
    return _html(figure)


def _add_key(figure: go.Figure, name: str, line: dict[str, object]) -> None:
    """A line in the legend alone."""
    figure.add_scatter(x=[None], y=[None], mode="lines", line=line, name=name, showlegend=True)


def _add_line(figure: go.Figure, line: Line, name: str, shown: bool) -> None:
    drawn, color = line.curve, line.color
    for x, y in drawn.faint:
        thin = {"color": color, "width": 1}
        figure.add_scatter(x=x, y=y, mode="lines", line=thin, opacity=0.3, hoverinfo="skip", showlegend=False)
    if drawn.low is not None and drawn.high is not None:
        edge = {"x": drawn.x, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        figure.add_scatter(y=drawn.high, **edge)
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        figure.add_scatter(y=drawn.low, fill="tonexty", fillcolor=f"rgba({red},{green},{blue},0.18)", **edge)
    mode = "lines+markers" if line.markers else "lines"
    style = {"color": color, "width": 2.2, "dash": line.dash}
    figure.add_scatter(x=drawn.x, y=drawn.y, mode=mode, line=style, name=name, showlegend=shown)


def _lay_out(figure: go.Figure, panel: Panel, x_title: str) -> None:
    figure.update_layout(
        title={"text": f"<b>{panel.title}</b>", "font": {"size": 15}, "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        margin={"l": 60, "r": 15, "t": 62, "b": 48},
        legend={"orientation": "h", "x": 0, "y": 1.01, "xanchor": "left", "yanchor": "bottom", "font": {"size": 12}},
        hovermode="x unified",
        font={"size": 12},
    )
    figure.update_xaxes(title=x_title)
    figure.update_yaxes(title=panel.unit, rangemode="tozero" if panel.unit.startswith("policy versions") else "normal")
    if panel.limits is not None:
        figure.update_yaxes(range=list(panel.limits))


def _note(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    parts = [f"{len(runs)} run{'s' if len(runs) > 1 else ''}, drawn {datetime.now():%Y-%m-%d %H:%M}."]
    parts.append("Lines of long runs are running means, with the raw values faint behind them.")
    if any(len(group.runs) > 1 for group in groups):
        parts.append("Runs that differ only by seed are one line, their mean, in a band of one standard deviation.")
    return " ".join(parts)


def _described(group: Group) -> str:
    return group.label if len(group.runs) == 1 else f"{group.label} ({len(group.runs)} runs)"
