"""The input of the page's script as plain JSON: axes, series, and the lines of each panel over each axis."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncrlhf.report.curves import AXES, Axis, panel_lines, thinned, time_scale
from asyncrlhf.report.load import SAMPLES, TOKENS, TRAIN, Group, Run
from asyncrlhf.report.panels import BY_LAG, Panel, shown_panels, staleness_bound, step_name

Trace = dict[str, Any]
CHANGED = "weights_changed/"  # how the metrics of layers begin


class Arrays:
    """The numbers of a page, each array once: lines over several axes share their values, metrics share their axis."""

    def __init__(self) -> None:
        self.lists: list[list[float | None]] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, values: np.ndarray | Sequence[float]) -> int:
        """The array's number. Values are kept to five digits, NaN as null."""
        array = np.asarray(values, dtype=np.float64)
        key = array.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self.lists)
            self.lists.append([float(f"{v:.5g}") if np.isfinite(v) else None for v in array.tolist()])
        return self._numbers[key]


@dataclass(frozen=True)
class Chart:
    """A panel of the page. ``traces``: by the axis's name, or under "" if the panel has its own axis, with the title
    ``x``. ``swapped``: the page's axis is the vertical one."""

    title: str
    unit: str
    traces: Mapping[str, Sequence[Trace]]
    note: str = ""
    x: str = ""
    limits: tuple[float, float] | None = None
    bound: float | None = None
    from_zero: bool = False
    categories: Sequence[str] = ()
    swapped: bool = False

    def plain(self) -> dict[str, Any]:
        """The values for the script; title, unit and note are in the HTML."""
        names = ("traces", "x", "limits", "bound", "from_zero", "categories", "swapped")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Section:
    """A heading with its charts, or with its own HTML, which is inserted unchanged and must be safe."""

    heading: str
    charts: Sequence[Chart] = ()
    html: str = ""
    note: str = field(default="")


@dataclass(frozen=True)
class PageAxis:
    """``scale``: the divisor of the axis's values."""

    name: Axis
    title: str
    button: str
    scale: float = 1.0


@dataclass(frozen=True)
class Canvas:
    """The state that all charts of a page share. ``faint``: draw raw values and seeds behind the lines."""

    axes: Sequence[PageAxis]
    faint: bool
    arrays: Arrays = field(default_factory=Arrays)


def page_axes(groups: Sequence[Group]) -> list[PageAxis]:
    """The axes for which at least one run has values."""
    runs = [run for group in groups for run in group.runs]
    seconds, unit = time_scale(runs)
    said: dict[Axis, tuple[str, str, float]] = {
        "step": (step_name(groups), "steps", 1.0),
        SAMPLES: ("samples trained on", "samples", 1.0),
        TOKENS: ("response tokens trained on", "tokens", 1.0),
        "wall_time": (f"wall-clock, {unit}", "wall-clock", seconds),
    }
    return [PageAxis(name, *said[name]) for name in AXES if any(run.column(name) is not None for run in runs)]


def curve_sections(groups: Sequence[Group], numbers: Sequence[int], canvas: Canvas) -> list[Section]:
    """The panels of runs of one stage. ``numbers``: the series of each group."""
    sections: dict[str, list[Chart]] = {}
    for panel in shown_panels(groups):
        sections.setdefault(panel.section, []).append(_chart(panel, groups, numbers, canvas))
    stage = groups[0].runs[0].stage
    made = [Section(heading or f"Curves of {stage}", charts) for heading, charts in sections.items()]
    lags = _by_lag(groups, numbers, canvas.arrays) if stage == TRAIN else []
    if lags:
        note = "Each token counts under the versions between its birth and its use; means over the run, by tokens."
        place = next((n for n, s in enumerate(made) if s.heading == "Staleness"), len(made) - 1) + 1
        made.insert(place, Section("By lag", lags, note=note))
    if layers := _by_layer(groups, numbers, canvas.arrays):
        made.append(Section("Weights", layers))
    return made


def _chart(panel: Panel, groups: Sequence[Group], numbers: Sequence[int], canvas: Canvas) -> Chart:
    traces: dict[str, list[Trace]] = {axis.name: _traces(panel, groups, numbers, axis, canvas) for axis in canvas.axes}
    runs = [run for group in groups for run in group.runs]
    edged = panel.band is None or all(any(run.column(name) is not None for run in runs) for name in panel.band)
    note = panel.note if edged else panel.note.partition(";")[0]
    bound = staleness_bound(groups) if panel.bound else None
    return Chart(panel.title, panel.unit, traces, note, "", panel.limits, bound, panel.from_zero)


def _traces(
    panel: Panel, groups: Sequence[Group], numbers: Sequence[int], axis: PageAxis, canvas: Canvas
) -> list[Trace]:
    made: list[Trace] = []
    arrays = canvas.arrays
    for line in panel_lines(groups, panel, axis.name, axis.scale):
        drawn, series = thinned(line.curve), numbers[line.group]
        if canvas.faint:
            made += [{"kind": "faint", "s": series, "x": arrays.add(x), "y": arrays.add(y)} for x, y in drawn.faint]
        made += band(series, drawn.x, drawn.low, drawn.high, arrays)
        kind = "points" if line.points or len(drawn.x) == 1 else "line"
        made.append({"kind": kind, "s": series, "x": arrays.add(drawn.x), "y": arrays.add(drawn.y)})
    return made


def band(
    series: int, x: np.ndarray, low: np.ndarray | None, high: np.ndarray | None, arrays: Arrays, **more: Any
) -> list[Trace]:
    if low is None or high is None or len(x) < 2:
        return []
    return [{"kind": "band", "s": series, "x": arrays.add(x), "low": arrays.add(low), "high": arrays.add(high), **more}]


def _by_lag(groups: Sequence[Group], numbers: Sequence[int], arrays: Arrays) -> list[Chart]:
    """One chart per diagnostic: its mean in each bucket of version lags, with one standard deviation over the seeds."""
    charts: list[Chart] = []
    buckets = lag_buckets([run for group in groups for run in group.runs])
    for name, (title, unit) in BY_LAG.items():
        found = [{b: lag_values(group.runs, name, b) for b in buckets} for group in groups]
        charts += _by_category(Chart(title, unit, {}, x="lag, policy versions"), found, numbers, arrays)
    return charts


def _by_category(
    chart: Chart, found: Sequence[Mapping[str, Sequence[float]]], numbers: Sequence[int], arrays: Arrays
) -> list[Chart]:
    """``chart`` with a point for each group and category, the mean of the runs' values, with one standard deviation; no
    chart without values. ``found``: of each group the values by category."""
    used = [category for category in (found[0] if found else ()) if any(values[category] for values in found)]
    traces: list[Trace] = []
    for number, values in zip(numbers, found, strict=True):
        cells = [values[category] for category in used]
        if not any(cells):
            continue
        x = np.arange(len(used), dtype=float)
        y = np.array([np.mean(cell) if cell else np.nan for cell in cells])
        spread = np.array([np.std(cell, ddof=1) if len(cell) > 1 else np.nan for cell in cells])
        bars = {"error": arrays.add(spread)} if np.isfinite(spread).any() else {}
        traces.append({"kind": "points", "s": number, "x": arrays.add(x), "y": arrays.add(y), **bars})
    return [replace(chart, traces={"": traces}, categories=used)] if used else []


def _by_layer(groups: Sequence[Group], numbers: Sequence[int], arrays: Arrays) -> list[Chart]:
    """The mean share of each layer's numbers that a publish changed."""
    keys = dict.fromkeys(k for group in groups for run in group.runs for k in run.columns if k.startswith(CHANGED))
    found = []
    for group in groups:
        columns = {key: [c for run in group.runs if (c := run.column(key)) is not None] for key in keys}
        found.append({_short(key, keys): [float(np.nanmean(c)) for c in some] for key, some in columns.items()})
    chart = Chart("Weights that change, by layer", "fraction of its numbers, mean of all publishes", {}, x="layer")
    return _by_category(chart, found, numbers, arrays)


def _short(key: str, keys: Collection[str]) -> str:
    """A layer's number or the first word of a tensor's name; all of it where others would be called the same."""

    def word(key: str) -> str:
        return re.sub(r".*\.(\d+)$", r"\1", key.removeprefix(CHANGED).removeprefix("model.")).partition("_")[0]

    found = word(key).partition(".")[0]
    same = sum(word(other).partition(".")[0] == found for other in keys)
    return found if same == 1 else key.removeprefix(CHANGED)


def lag_buckets(runs: Sequence[Run]) -> list[str]:
    """The buckets of version lags that occur in the runs, the freshest first: 0, 1, 2, 3-4, 5-8, 9+."""
    ending = "/token_fraction"
    names = {key[4 : -len(ending)] for run in runs for key in run.columns if re.fullmatch(rf"lag_\d.*{ending}", key)}
    return sorted(names, key=lambda name: int(re.split(r"\D", name)[0]))


def lag_values(runs: Sequence[Run], name: str, bucket: str) -> list[float]:
    """A diagnostic's mean over each run that has tokens in the bucket, weighted by each step's tokens in it. The
    bucket's share of the tokens is averaged over all steps."""
    found = []
    for run in runs:
        share, values = run.column(f"lag_{bucket}/token_fraction"), run.column(f"lag_{bucket}/{name}")
        if share is None or values is None:
            continue
        tokens = run.columns.get("response_tokens", np.ones(len(share)))
        here = np.nan_to_num(share) * np.nan_to_num(tokens)
        if name == "token_fraction":
            found.append(float(here.sum() / np.nansum(tokens)))
            continue
        known = np.isfinite(values) & (here > 0)
        if known.any():
            found.append(float(np.average(values[known], weights=here[known])))
    return found
