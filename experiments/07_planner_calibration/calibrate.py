"""Fits the call graph's coefficients to published cells and writes what they predict: see README.md."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np
from cells import fit_cells, leave_one_out, phases, predict, read_cells

from asyncrlhf.planner.shapes import cluster_of

HERE = Path(__file__).parent


def said(name: str, errors: list[float]) -> str:
    size = np.abs(errors)
    return (
        f"{name}: {len(size)} cells, error {100 * np.median(size):.1f}% in the median, {100 * size.max():.1f}% at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=Path, default=HERE / "cells.json", help="cells to fit")
    parser.add_argument("--device", default="H100")
    parser.add_argument("--predict", type=Path, help="other cells, predicted by the committed coefficients alone")
    options = parser.parse_args()
    cluster = cluster_of(options.device, 8)
    if options.predict:
        given = json.loads((HERE / "coefficients.json").read_text())["coefficients"]
        cells = read_cells(options.predict)
        for cell in cells:
            seconds = predict(cell, cluster, given)
            print(
                f"{cell.name}: {seconds:.1f} s predicted, {cell.seconds:g} s given ({seconds / cell.seconds - 1:+.1%})"
            )
        print(said("predicted", [predict(cell, cluster, given) / cell.seconds - 1 for cell in cells]))
        return
    cells = read_cells(options.cells)
    fitted, half = fit_cells(cells, cluster), fit_cells(cells[::2], cluster)
    alone = leave_one_out(cells, cluster)
    rows = []
    for number, (cell, left_out) in enumerate(zip(cells, alone, strict=True)):
        parts = phases(cell, cluster, fitted)
        rows.append(
            {
                "cell": cell.name,
                "published": cell.seconds,
                "fitted": round(sum(parts.values()), 1),
                "left_out": round(left_out, 1),
                "half": round(predict(cell, cluster, half), 1),
                "of_half": "fitted" if number % 2 == 0 else "predicted",
                **{name: round(seconds, 1) for name, seconds in parts.items()},
            }
        )
    with (HERE / "cells.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    known = {"device": options.device, "coefficients": fitted, "of_half": half}
    (HERE / "coefficients.json").write_text(json.dumps(known, indent=1) + "\n")
    for row in rows:
        print(*row.values(), sep="\t")
    print(fitted, half, sep="\n")
    print(said("all fitted", [predict(c, cluster, fitted) / c.seconds - 1 for c in cells]))
    print(said("leave one out", [p / c.seconds - 1 for p, c in zip(alone, cells, strict=True)]))
    for setting in ("actor", "critic", "both"):
        others = [cell for cell in cells if cell.setting != setting]
        known_of = fit_cells(others, cluster)
        told = [predict(c, cluster, known_of) / c.seconds - 1 for c in cells if c.setting == setting]
        print(said(f"{setting} left out", told))
    actors = fit_cells([cell for cell in cells if cell.setting == "actor"], cluster)
    told = [predict(c, cluster, actors) / c.seconds - 1 for c in cells if c.setting != "actor"]
    print(said("predicted from actor alone", told))
    print(said("half predicted", [predict(c, cluster, half) / c.seconds - 1 for c in cells[1::2]]))


if __name__ == "__main__":
    main()
