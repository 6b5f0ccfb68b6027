"""The default against `opsm`, `grpo_ewma` and itself with the gate of `opsm`: the README's table, figure.png.

python -m experiments.48_default.table
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from asyncrlhf.sweeps.results import Estimate

HERE = Path(__file__).resolve().parent
LAGS = (0, 4, 16)
RATES = {"small": 2.5e-5, "middle": 5e-5, "large": 1e-4}
RIVALS = ("opsm", "ewma", "both")
NAMES = {"default": "`decoupled_grpo`", "opsm": "`opsm`", "ewma": "`grpo_ewma`", "both": "the default with the gate"}


def rewards(runs: pd.DataFrame, method: str, lag: int) -> pd.Series:
    return runs[(runs.method == method) & (runs.value == lag)].set_index("seed").reward.sort_index()


def lead(runs: pd.DataFrame, rival: str, rate: str, lag: int) -> Estimate:
    """Of ``rival`` over the default at the same rate and lag, paired by seed."""
    return Estimate.of(list(rewards(runs, f"{rival}_{rate}", lag) - rewards(runs, f"default_{rate}", lag)))


def said(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f} ± {estimate.error:.3f}"


def table(runs: pd.DataFrame) -> str:
    heads = ["learning rate", "lag", *NAMES.values(), *(f"{NAMES[rival]} less the default" for rival in RIVALS)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for rate, value in RATES.items():
        for lag in LAGS:
            own = [said(Estimate.of(list(rewards(runs, f"{name}_{rate}", lag)))) for name in NAMES]
            leads = [said(lead(runs, rival, rate, lag)) for rival in RIVALS]
            lines.append(f"| {value:g} | {lag} | {' | '.join(own + leads)} |")
    return "\n".join(lines)


def draw(runs: pd.DataFrame, target: Path) -> None:
    figure, axes = plt.subplots(1, len(LAGS), figsize=(9.5, 3.2), sharey=True, layout="constrained")
    for axis, lag in zip(axes, LAGS, strict=True):
        for name, label in NAMES.items():
            found = [Estimate.of(list(rewards(runs, f"{name}_{rate}", lag))) for rate in RATES]
            means, errors = [e.mean for e in found], [e.error for e in found]
            axis.errorbar(list(RATES.values()), means, errors, marker="o", markersize=4, label=label.strip("`"))
        axis.set(title=f"lag {lag}", xscale="log", xlabel="learning rate")
        axis.set_xticks(list(RATES.values()), [f"{value:g}" for value in RATES.values()])
        axis.minorticks_off()
    axes[0].set_ylabel("held-out reward")
    axes[0].legend()
    figure.savefig(target, dpi=110)


def main() -> None:
    runs = pd.read_csv(HERE / "runs.csv")
    print(table(runs))
    draw(runs, HERE / "figure.png")


if __name__ == "__main__":
    main()
