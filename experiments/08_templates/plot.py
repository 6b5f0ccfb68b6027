"""Draws templates.png out of the CSV files beside it and prints their tables."""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PANELS = (
    ("speed", "steps a second, over sync colocated"),
    ("idle", "devices idle, share"),
    ("staleness", "staleness, versions"),
    ("generator_gb", "GB of a generator's device"),
)
COLOURS = ("#222222", "#9c9c9c", "#e15759", "#f28e2b", "#b6cbe2", "#7ea6cc", "#4e79a7", "#2b4a6b")
MARKS = "osD^vP*X"


def rows_of(model: str) -> list[dict[str, str]]:
    """Of all templates and counts that fit, with their speed over the synchronous colocated run's."""
    if not (HERE / f"{model}.csv").exists():
        return []
    with (HERE / f"{model}.csv").open() as file:
        rows = sorted((row for row in csv.DictReader(file) if not row["note"]), key=lambda row: int(row["devices"]))
    base = {row["devices"]: float(row["step_seconds"]) for row in rows if row["template"] == "sync, colocated"}
    return [{**row, "speed": f"{base[row['devices']] / float(row['step_seconds']):.2f}"} for row in rows]


def table(rows: list[dict[str, str]]) -> str:
    """A Markdown table: a row a template, and for each count speed, idle, staleness and bytes."""
    counts = list(dict.fromkeys(row["devices"] for row in rows))
    lines = [
        f"| {rows[0]['model']} on | {' | '.join(f'{int(count):,}' for count in counts)} |",
        "|---" * (1 + len(counts)) + "|",
    ]
    for name in dict.fromkeys(row["template"] for row in rows):
        own = {row["devices"]: row for row in rows if row["template"] == name}
        cells = [
            f"{r['speed']}, {float(r['idle']):.2f}, {float(r['staleness']):.1f}, "
            f"{float(r['learner_gb']):.0f}/{float(r['generator_gb']):.0f}"
            for r in (own[count] for count in counts)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    models = {model: rows for model in ("llama-3-8b", "llama-3-70b") if (rows := rows_of(model))}
    figure = Figure(figsize=(14, 3.4 * len(models) + 0.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(models), len(PANELS), squeeze=False)
    for axes, (model, rows) in zip(grid, models.items(), strict=True):
        print(table(rows), end="\n\n")
        for number, name in enumerate(dict.fromkeys(row["template"] for row in rows)):
            own = [row for row in rows if row["template"] == name]
            counts = [int(row["devices"]) for row in own]
            for axis, (key, title) in zip(axes, PANELS, strict=True):
                values = [float(row[key]) for row in own]
                axis.plot(counts, values, MARKS[number] + "-", color=COLOURS[number], label=name, markersize=5)
                axis.set_title(f"{model}: {title}", loc="left", fontsize=9)
                axis.set_xscale("log")
                axis.set_xticks(counts, [f"{count:,}" for count in counts])
                axis.minorticks_off()
                axis.set_xlabel("H100", fontsize=8)
        for axis in axes:
            axis.set_ylim(bottom=0)  # after all lines: it ends the scaling of the axis
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=8, frameon=False, fontsize=9)
    figure.savefig(HERE / "templates.png")


if __name__ == "__main__":
    main()
