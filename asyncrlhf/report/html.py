"""Builds the report: one HTML page that opens from disk without a network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from importlib import resources
from pathlib import Path

import jinja2
from plotly.offline import get_plotlyjs

from asyncrlhf.errors import ConfigError
from asyncrlhf.report import kept_tokens, rollouts, timeline
from asyncrlhf.report.load import Group, Run, find_runs, is_multirun, load_runs, missing_jobs
from asyncrlhf.report.page import Canvas, Section, curve_sections, page_axes
from asyncrlhf.report.series import GLYPHS, STROKES, Series, build_series, group_all
from asyncrlhf.report.sweep import sweep_section
from asyncrlhf.report.table import Table, build_tables
from asyncrlhf.sweeps.record import SWEEP_FILE, is_sweep
from asyncrlhf.sweeps.results import Results, read_results
from asyncrlhf.sweeps.sentences import sentences

FOLD = '<details{} ontoggle="self.unfold?.(this)"><summary>show</summary>{}</details>'
FEW = 8  # series: with more, raw values and seeds behind the lines would hide them


def build_report(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Draw the curves of the runs and write ``index.html``; returns its path.

    ``out`` is the folder: by default ``report`` within one run, sweep or multirun, and ``./report`` for several.
    Folders are searched for runs. Runs that differ only by seed become one line with a band; runs that cannot be read
    are listed. Raises ConfigError if none can be read.
    """
    unread: dict[str, str] = {}
    paths = list(map(Path, run_dirs))
    sweeps = _sweeps(paths, unread)
    # Of a sweep its finished jobs: its folder holds attempts that failed, too.
    others = [run for run in find_runs([path for path in paths if path not in sweeps]) if not _inside(run, sweeps)]
    runs = load_runs([*(run for found in sweeps.values() for run in found.runs), *others], unread)
    unread |= missing_jobs([path for path in paths if path not in sweeps])
    single = len(paths) == 1 and (is_sweep(paths[0]) or is_multirun(paths[0]))
    home = paths[0] if single else runs[0].path if len(runs) == 1 else None
    folder = Path(out) if out is not None else Path("report") if home is None else home / "report"
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    temporary = page.with_suffix(".tmp")
    temporary.write_text(render(runs, list(sweeps.values()), unread), encoding="utf-8")
    os.replace(temporary, page)
    return page


def _sweeps(paths: Sequence[Path], unread: dict[str, str]) -> dict[Path, Results]:
    """The results of the sweeps that the paths name or contain; several are named by their folders. An error of one
    that no path names is put into ``unread``."""
    found: dict[Path, Results] = {}
    for path in paths:
        for folder in [path] if is_sweep(path) else sorted(file.parent for file in path.rglob(SWEEP_FILE)):
            try:
                found[folder] = read_results(folder)
            except ConfigError as error:
                if folder == path:
                    raise
                unread[str(folder)] = str(error)
    return found if len(found) < 2 else {path: replace(of, name=path.resolve().name) for path, of in found.items()}


def _inside(run: Path, folders: Iterable[Path]) -> bool:
    return any(folder.resolve() in run.resolve().parents for folder in folders)


def render(runs: Sequence[Run], sweeps: Sequence[Results] = (), unread: Mapping[str, str] | None = None) -> str:
    """The whole page as text, plotly.js included."""
    groups, families = group_all(runs, sweeps)
    series = build_series(groups, families)
    canvas = Canvas(page_axes(groups), faint=len(groups) <= FEW)
    sections, tables = _sections(groups, sweeps, canvas)
    charts = [chart for section in sections for chart in section.charts]
    data = {
        "axes": [{"name": axis.name, "title": axis.title} for axis in canvas.axes],
        "series": [asdict(one) for one in series],
        "arrays": canvas.arrays.lists,
        "charts": [chart.plain() for chart in charts],
    }
    folder = resources.files("asyncrlhf.report")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((folder / "page.html").read_text(encoding="utf-8")).render(
        title=_title(series, sweeps),
        note=_note(runs, groups),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script="\n".join((folder / name).read_text(encoding="utf-8") for name in ("tables.js", "page.js")),
        plotly=get_plotlyjs(),
        # A "<" in a label could close the script that contains the data.
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        findings=_findings(sweeps),
        axes=canvas.axes,
        side_by_side=_side_by_side(sweeps),
        legend=_legend(series),
        owners=_owners(groups),
        series=series,
        strokes=STROKES,
        glyphs=GLYPHS,
        sections=sections,
        tables=tables,
        unread=unread or {},
    )


def _sections(groups: Sequence[Group], sweeps: Sequence[Results], canvas: Canvas) -> tuple[list[Section], list[Table]]:
    """The sections of the page in order: the sweeps' results, then the curves of each stage."""
    sections: list[Section] = []
    tables: list[Table] = []
    for found in sweeps:
        section, own = sweep_section(found, groups, canvas)
        sections.append(section)
        tables += own
    stages = list(dict.fromkeys(group.runs[0].stage for group in groups))
    for stage in stages:
        members = [(n, group) for n, group in enumerate(groups) if group.runs[0].stage == stage]
        numbers, own_groups = [n for n, _ in members], [group for _, group in members]
        curves = curve_sections(own_groups, numbers, canvas)
        found_tables = build_tables([run for group in own_groups for run in group.runs], own_groups)
        if len(stages) > 1:
            curves = [replace(section, heading=f"{stage}: {section.heading}") for section in curves]
            found_tables = [replace(table, title=f"{stage}: {table.title}") for table in found_tables]
        sections += curves
        tables += found_tables
    return sections + _run_by_run([run for group in groups for run in group.runs]), tables


def _run_by_run(runs: Sequence[Run]) -> list[Section]:
    """The timelines, then the rollouts, of each run that recorded them; unfolded if there are few."""
    bars, room = timeline.MAX_BARS // min(len(runs), 10), rollouts.MAX_BYTES // len(runs)
    found = [(f"Timeline of {run.label}", timeline.section(run, bars)) for run in runs]
    charts = sum(bool(html) for _, html in found)
    found += [(f"What stayed in the cache of {run.label}", kept_tokens.section(run)) for run in runs]
    found += [(f"Rollouts of {run.label}", rollouts.section(run, room)) for run in runs]
    found = [(heading, html) for heading, html in found if html]
    if len(found) <= 4:
        return [Section(heading, html=FOLD.format(" open", html)) for heading, html in found]
    # A closed timeline is drawn when it is opened: all of them at once take longer than the curves.
    closed = [f"<template>{html}</template>" if n < charts else html for n, (_, html) in enumerate(found)]
    return [Section(heading, html=FOLD.format("", html)) for (heading, _), html in zip(found, closed, strict=True)]


def _findings(sweeps: Sequence[Results]) -> list[str]:
    """The sentences of the sweeps, each after its sweep's name if there are several."""
    several = len(sweeps) > 1
    return [f"{found.name}: {said}" if several else said for found in sweeps for said in sentences(found)]


def _legend(series: Sequence[Series]) -> list[tuple[str, list[tuple[int, Series]]]]:
    """(family, its numbered series) in the order of the page; empty for a single series."""
    found: dict[str, list[tuple[int, Series]]] = {}
    for number, one in enumerate(series):
        found.setdefault(one.family, []).append((number, one))
    return list(found.items()) if len(series) > 1 else []


def _owners(groups: Sequence[Group]) -> dict[str, int]:
    """The series of a table's row, by its first cell: a run's label or a configuration's."""
    found = {group.label: number for number, group in enumerate(groups)}
    return found | {run.label: number for number, group in enumerate(groups) for run in group.runs}


def _side_by_side(sweeps: Sequence[Results]) -> str:
    """A note on a sweep's wall-clock times; empty if all jobs ran alone on the machine."""
    cells = [cell for found in sweeps for cell in found.cells]
    alone = list(dict.fromkeys(cell.setting for cell in cells if cell.exclusive))
    if all(cell.exclusive for cell in cells):
        return ""
    compared = f"compare {', '.join(alone)} alone" if alone else "do not compare them"
    return f"Not every job had the machine alone, on a real clock; over wall-clock {compared}."


def _title(series: Sequence[Series], sweeps: Sequence[Results]) -> str:
    if len(series) == 1:
        return f"Run {series[0].label}"
    compared = f"{len(series)} configurations compared"
    return f"Sweep {sweeps[0].name}: {compared}" if len(sweeps) == 1 else compared


def _note(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    parts = [f"{len(runs)} run{'s' if len(runs) > 1 else ''}, drawn {datetime.now():%Y-%m-%d %H:%M}."]
    parts.append("Lines of long runs are running means; raw values are faint behind them where there is room.")
    if any(len(group.runs) > 1 for group in groups):
        parts.append("Runs that differ only by seed are one line, their mean, in a band of one standard deviation.")
    return " ".join(parts)
