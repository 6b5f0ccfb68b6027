"""What each change is worth at lag 16: the README's table and the figure, from runs.csv.

python experiments/44_causes/table.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import yaml

from asyncrlhf.sweeps.results import Estimate

HERE = Path(__file__).resolve().parent
BASE = "default"
LAG = 16


def column(runs: pd.DataFrame, method: str, lag: int, name: str = "reward") -> pd.Series:
    """A figure of a method's runs at a lag, by seed."""
    return runs[(runs.method == method) & (runs.value == lag)].set_index("seed")[name].sort_index()


def effects(runs: pd.DataFrame) -> pd.DataFrame:
    """By method: reward at both lags, kept share, and, paired by seed with the base, what it changes at lag 16, and
    in what the lag costs (positive: the lag costs less)."""
    base = {lag: column(runs, BASE, lag) for lag in (0, LAG)}
    rows = []
    for method in dict.fromkeys(runs.method):
        own = {lag: column(runs, method, lag) for lag in (0, LAG)}
        row: dict[str, float | str] = {"method": method}
        for name, values in {
            "lag_0": own[0],
            f"lag_{LAG}": own[LAG],
            f"at_{LAG}": own[LAG] - base[LAG],
            "cost_saved": (base[0] - base[LAG]) - (own[0] - own[LAG]),
            "entropy": column(runs, method, LAG, "entropy"),
            "ess": column(runs, method, LAG, "ess_fraction"),
            "clipped": column(runs, method, LAG, "clip_fraction"),
            "spikes": column(runs, method, LAG, "spikes"),
        }.items():
            estimate = Estimate.of(list(values))
            row |= {name: estimate.mean, f"{name}_error": estimate.error}
        kept = Estimate.of_ratio(list(zip(own[0], own[LAG], strict=True)))
        rows.append(row | {"kept": kept.mean, "kept_error": kept.error})
    return pd.DataFrame(rows)


def table(found: pd.DataFrame) -> str:
    names = ["reward at lag 0", f"at lag {LAG}", "kept", f"against the default at lag {LAG}", "of the lag's cost saved"]
    names += [f"at lag {LAG}: entropy", "ESS", "clipped", "spikes"]
    lines = ["| change | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for row in found.itertuples():
        base = row.method == BASE

        def pair(name: str, digits: int = 3, scale: float = 1.0, row: object = row) -> str:
            error = getattr(row, f"{name}_error")
            return f"{scale * getattr(row, name):.{digits}f} ± {scale * error:.{digits}f}"

        cells = [pair("lag_0"), pair(f"lag_{LAG}"), pair("kept", 0, 100) + "%"]
        cells += ["" if base else pair(f"at_{LAG}"), "" if base else pair("cost_saved"), f"{row.entropy:.2f}"]
        cells += [f"{row.ess:.2f}", f"{row.clipped:.4f}", f"{row.spikes:.2f}"]
        lines.append(f"| `{row.method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(found: pd.DataFrame, target: Path) -> None:
    """Reward at lag 0 and 16 of each change, sorted by the latter."""
    ordered = found.sort_values(f"lag_{LAG}")
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    places = np.arange(len(ordered))
    for lag, mark in ((0, "o"), (LAG, "s")):
        own = ordered[f"lag_{lag}"], ordered[f"lag_{lag}_error"]
        axes.errorbar(own[0], places, xerr=own[1], fmt=mark, capsize=3, label=f"lag {lag}")
    axes.hlines(places, ordered.lag_0, ordered[f"lag_{LAG}"], color="lightgrey", zorder=0)
    axes.set_yticks(places, ordered.method)
    axes.set(xlabel="held-out reward after training; bars: one standard error")
    axes.legend()
    figure.savefig(target, dpi=110)


def ordered(runs: pd.DataFrame) -> pd.DataFrame:
    """The finished runs, in the order of the study's methods."""
    order = list(yaml.safe_load((HERE / "study.yaml").read_text())["methods"])
    runs = runs[runs.status == "done"]
    return runs.iloc[np.argsort([order.index(method) for method in runs.method], kind="stable")]


def main() -> None:
    found = effects(ordered(pd.read_csv(HERE / "runs.csv")))
    print(table(found))
    draw(found, HERE / "figure.png")


if __name__ == "__main__":
    main()
