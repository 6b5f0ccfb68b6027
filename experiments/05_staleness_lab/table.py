"""A sweep's quality as this folder keeps it: a row a job, a table of lags and methods, and a picture of it.

python experiments/05_staleness_lab/table.py runs/sweeps/staleness-HASH experiments/05_staleness_lab/staleness.csv
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from asyncrlhf.sweeps.sentences import RESULTS_FILE

COLUMNS = ("grid", "method", "setting", "seed", "heldout_accuracy", "staleness_mean")


def rows(sweep: Path, found: dict[str, Any]) -> list[dict[str, Any]]:
    made = []
    for cell in found["configurations"]:
        row = {
            "grid": "speed" if cell["alone"] else "quality",
            "method": cell["method"],
            "setting": cell["setting"],
        }
        for run in cell["runs"]:
            summary = json.loads((sweep / run / "summary.json").read_text())
            after, age = f"{summary['heldout_accuracy']['after']:.4f}", f"{summary['staleness']['mean']:.3f}"
            made.append(row | {"seed": summary["seed"], "heldout_accuracy": after, "staleness_mean": age})
    return made


def told(cell: dict[str, Any]) -> str:
    """Held-out accuracy with its standard error, and the share of that at lag 0."""
    quality = f"{cell['quality']:.3f} ± {cell['quality_error']:.3f}"
    return quality if cell["kept"] is None else f"{quality}, {100 * cell['kept']:.0f} ± {100 * cell['kept_error']:.0f}%"


def draw(cells: list[dict[str, Any]], start: float, target: Path) -> None:
    """Held-out accuracy over the staleness that came about, a line a method; bars: one standard error."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for method, mark in zip(dict.fromkeys(cell["method"] for cell in cells), "osD^v", strict=False):
        own = sorted((cell for cell in cells if cell["method"] == method), key=lambda cell: cell["staleness"])
        x, y = [cell["staleness"] for cell in own], [cell["quality"] for cell in own]
        axes.errorbar(x, y, [cell["quality_error"] for cell in own], marker=mark, capsize=3, label=method)
    axes.axhline(start, color="grey", linestyle=":", label="before training")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks([0, 1, 2, 4, 8, 16], ["0", "1", "2", "4", "8", "16"])
    axes.set(
        xlabel="mean staleness of the tokens trained on, in policy versions", ylabel="held-out accuracy", ylim=(0, 0.8)
    )
    axes.set_xlim(-0.2, 19)
    axes.legend(loc="lower left")
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    found = json.loads((options.sweep / RESULTS_FILE).read_text())
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows(options.sweep, found))
    cells = [cell for cell in found["configurations"] if not cell["alone"]]
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    print("| lag (staleness) |", " | ".join(methods), "|")
    print("|---|" + "---|" * len(methods))
    for setting in dict.fromkeys(cell["setting"] for cell in cells):
        own = {cell["method"]: cell for cell in cells if cell["setting"] == setting}
        age = max(cell["staleness"] for cell in own.values())
        print(f"| {setting} ({age:.1f}) |", " | ".join(told(own[m]) if m in own else "" for m in methods), "|")
    first = json.loads((options.sweep / cells[0]["runs"][0] / "summary.json").read_text())
    draw(cells, first["heldout_accuracy"]["before"], options.out.with_suffix(".png"))
    print(*found["sentences"], sep="\n")


if __name__ == "__main__":
    main()
