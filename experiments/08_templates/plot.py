"""Draws templates.png out of the CSV files beside it: ``python experiments/08_templates/plot.py``."""

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


def main() -> None:
    figure = Figure(figsize=(13, 6.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(PANELS), squeeze=False)
    for axes, model in zip(grid, ("llama-3-8b", "llama-3-70b"), strict=True):
        with (HERE / f"{model}.csv").open() as file:
            rows = sorted((row for row in csv.DictReader(file) if not row["note"]), key=lambda row: int(row["devices"]))
        base = {row["devices"]: float(row["step_seconds"]) for row in rows if row["template"] == "sync, colocated"}
        for number, name in enumerate(dict.fromkeys(row["template"] for row in rows)):
            own = [row for row in rows if row["template"] == name]
            for axis, (key, title) in zip(axes, PANELS, strict=True):
                values = [
                    base[row["devices"]] / float(row["step_seconds"]) if key == "speed" else float(row[key])
                    for row in own
                ]
                counts = [int(row["devices"]) for row in own]
                axis.plot(counts, values, MARKS[number] + "-", color=COLOURS[number], label=name, markersize=5)
                axis.set_title(f"{model}: {title}", loc="left", fontsize=9)
                axis.set_xscale("log")
                axis.set_xticks(counts, [f"{count:,}" for count in counts])
                axis.minorticks_off()
                axis.set_ylim(0)
                axis.set_xlabel("H100", fontsize=8)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=8, frameon=False, fontsize=9)
    figure.savefig(HERE / "templates.png")


if __name__ == "__main__":
    main()
