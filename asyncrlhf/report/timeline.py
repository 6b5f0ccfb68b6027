"""The report's timeline: when each part generated, scored, trained, published, loaded or waited
(``spans/*.parquet``)."""

from __future__ import annotations

from collections import Counter
from html import escape

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrlhf.records.write.spans import SPANS_FOLDER
from asyncrlhf.report.load import Run

MAX_BARS = 1500
MAX_LANES = 32
# Kind to its colour and its name in words, in the order of the legend.
KINDS = {
    "decode": ("#4c78a8", "generating"),
    "score": ("#54a24b", "scoring"),
    "train": ("#e45756", "training"),
    "snapshot": ("#b279a2", "copying weights"),
    "transfer": ("#f58518", "publishing weights"),
    "load": ("#eeca3b", "loading weights"),
    "save": ("#9d755d", "saving a checkpoint"),
    "wait": ("#e4e4e4", "waiting"),
}
STEP = "step"  # how the kinds of environments' steps begin: the rest is the tool's name
_STEP_COLORS = ("#72b7b2", "#ff9da6", "#bab0ac", "#d67195", "#79706e", "#d8b5a5")
_ORDER = ("publisher", "learner", "reward", "reference", "critic", "generator")  # from the bottom; then environments
_HOVER = "%{customdata[0]}<br>%{base:.3f} s to %{customdata[1]:.3f} s<br>version %{customdata[2]}<br>"
_HOVER += "%{customdata[3]} rollouts, %{customdata[4]} tokens<extra></extra>"

# A page that has become long has a scroll bar, which leaves less room than there was when the chart was drawn.
_SCRIPT = """<script>addEventListener('load', () =>
document.querySelectorAll('.timeline .js-plotly-plot').forEach((chart) => Plotly.Plots.resize(chart)));</script>"""


def section(run: Run, max_bars: int = MAX_BARS) -> str:
    """One run's timeline as HTML for a page with plotly.js, of at most ``max_bars`` spans; empty without spans."""
    table = read_spans(run)
    if table is None:
        return ""
    kinds = {**KINDS, **_name_steps(table)}
    lanes = sorted({str(name) for name in table["part"]}, key=_place)
    shown = lanes[:MAX_LANES]
    rows = _window({name: column[np.isin(table["part"], shown)] for name, column in table.items()}, max_bars)
    said = []
    if len(shown) < len(lanes):
        said.append(f"{len(shown)} of {len(lanes)} parts shown.")
    if len(rows["start"]) < len(table["start"]):
        first, last = rows["start"].min(), rows["end"].max()
        said.append(f"{len(rows['start']):,} of {len(table['start']):,} spans shown: {first:.1f} s to {last:.1f} s.")
    note = " ".join([*said, "A lane shows one part; drag to zoom, double-click for all."])
    chart = _figure(rows, shown, kinds).to_html(
        include_plotlyjs=False,
        full_html=False,
        config={"displayModeBar": False, "responsive": True},
        default_height=f"{130 + 26 * len(shown)}px",
    )
    shares = _shares(table, shown, kinds)
    return f'<p class="note">{escape(note)}</p><div class="timeline">{chart}</div>{_SCRIPT}{shares}'


def read_spans(run: Run) -> dict[str, np.ndarray] | None:
    """The columns of all of a run's span files, in the order of start times; None without any."""
    files = sorted((run.path / SPANS_FOLDER).glob("part-*.parquet"))
    if not files:
        return None
    table = pa.concat_tables([pq.read_table(file) for file in files])
    if not table.num_rows:
        return None
    order = np.argsort(table["start"].to_numpy(), kind="stable")
    return {name: _values(table[name])[order] for name in table.column_names}


def _values(column: pa.ChunkedArray) -> np.ndarray:
    """Words as objects that equal ones share: a long run has millions."""
    if not pa.types.is_string(column.type):
        return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    words = column.combine_chunks().dictionary_encode()
    return np.array(words.dictionary.to_pylist(), dtype=object)[words.indices.to_numpy()]


def _place(lane: str) -> tuple[int, str, int]:
    kind, _, number = lane.rpartition("-")
    place = next((i for i, name in enumerate(_ORDER) if lane.startswith(name)), len(_ORDER))
    return place, kind, int(number) if number.isdigit() else 0


def _window(table: dict[str, np.ndarray], most: int) -> dict[str, np.ndarray]:
    """At most ``most`` consecutive spans from the middle of the run."""
    spare = len(table["start"]) - most
    if spare <= 0:
        return table
    return {name: column[spare // 2 : spare // 2 + most] for name, column in table.items()}


def _figure(rows: dict[str, np.ndarray], lanes: list[str], kinds: dict[str, tuple[str, str]]) -> go.Figure:
    place = {lane: i for i, lane in enumerate(lanes)}
    figure = go.Figure()
    for kind, (color, words) in kinds.items():
        here = rows["kind"] == kind
        if not here.any():
            continue
        facts = [rows[name][here] for name in ("end", "version", "rollouts", "tokens")]
        custom = [[words, round(float(end), 4), *map(int, rest)] for end, *rest in zip(*facts, strict=True)]
        loads = [f"v{version}" for version in rows["version"][here]] if kind == "load" else None
        figure.add_bar(
            x=np.round(rows["end"][here] - rows["start"][here], 5),
            base=np.round(rows["start"][here], 5),
            y=np.array([place[part] for part in rows["part"][here]], np.int16),
            orientation="h",
            name=words,
            marker={"color": color, "line": {"width": 0}},
            width=0.8,
            text=loads,
            textposition="inside" if loads else None,
            customdata=custom,
            hovertemplate=_HOVER,
        )
    figure.update_layout(
        barmode="overlay",
        template="plotly_white",
        margin={"l": 10, "r": 10, "t": 10, "b": 44},
        legend={"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        font={"size": 12},
        bargap=0.2,
    )
    figure.update_xaxes(title="seconds of the run")
    figure.update_yaxes(tickvals=list(range(len(lanes))), ticktext=lanes, automargin=True)
    return figure


def _name_steps(table: dict[str, np.ndarray]) -> dict[str, tuple[str, str]]:
    """The colours and names of the most frequent kinds of environments' steps; the others become one kind: a model may
    call tools that do not exist."""
    steps = [kind for kind, _ in Counter(kind for kind in table["kind"] if kind.startswith(STEP)).most_common()]
    for rare in steps[len(_STEP_COLORS) - 1 :]:
        table["kind"][table["kind"] == rare] = f"{STEP} other tools"
    kinds = dict.fromkeys(kind for kind in table["kind"] if kind.startswith(STEP))
    words = {kind: escape(kind.removeprefix(STEP).strip()) or "environment" for kind in kinds}
    return {kind: (color, words[kind]) for kind, color in zip(kinds, _STEP_COLORS, strict=False)}


def _shares(table: dict[str, np.ndarray], lanes: list[str], named: dict[str, tuple[str, str]]) -> str:
    """The activities of each part in the whole run, in per cent of the time from its first span to its last."""
    words = {kind: said for kind, (_, said) in named.items() if (table["kind"] == kind).any()}
    kinds = [*words]
    seconds = table["end"] - table["start"]
    head = "".join(f"<th>{words[kind]}</th>" for kind in kinds)
    lines = []
    for lane in reversed(lanes):
        mine = table["part"] == lane
        total = max(float(seconds[mine].sum()), 1e-9)
        shares = {kind: seconds[mine & (table["kind"] == kind)].sum() / total for kind in kinds}
        cells = "".join(f'<td data-name="{words[kind]}">{100 * shares[kind]:.0f}%</td>' for kind in kinds)
        lines.append(f"<tr><td>{escape(lane)}</td>{cells}</tr>")
    head = f"<thead><tr><th>share of its time</th>{head}</tr></thead>"
    return f'<div class="table"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'
