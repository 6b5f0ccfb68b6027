"""Does a token's log-ratio grow with its entropy, and does a bound that does so lose less than one that does not?

python -m experiments.47_entropy_gate.gate grid --workers 2   # runs.csv, tokens.csv; resumable
python -m experiments.47_entropy_gate.gate show               # the README's tables, figure.png
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from asyncrlhf.algorithms.gates import GATES, GateInputs, entropy_gate
from asyncrlhf.algorithms.masked import masked_mean, masked_values
from asyncrlhf.sweeps.results import Estimate
from experiments import study
from experiments.resumable import command, run_missing

HERE = Path(__file__).resolve().parent
BOARD = study.Study.read(HERE.parent / "36_leaderboard")
RATE, LAGS, SEEDS = 5e-5, (4, 16), range(3)
NO_BOUND = 1e9
EDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # nats, between the bins of entropy
COLUMNS = [*study.RESULTS, *study.METRICS, "dropped", "spikes", "seconds", "status"]
TOKENS = ["threshold", "flat", "lag", "seed", "bin", "tokens", "entropy", "square", "dropped"]


@dataclass(frozen=True)
class Arm:
    """One run. ``flat``: each token's bound is that of the mean entropy."""

    threshold: float
    flat: bool
    lag: int
    seed: int

    def overrides(self) -> tuple[str, ...]:
        own = ["algorithm=estr", f"algorithm.off_policy_mask_threshold={self.threshold}", f"{study.RATE}={RATE}"]
        return *BOARD.base, *own, f"async.lag={self.lag}", f"seed={self.seed}"


def arms() -> list[Arm]:
    kinds = [(NO_BOUND, False), *itertools.product((0.25, 1.0), (False, True))]
    return [Arm(threshold, flat, lag, seed) for seed in SEEDS for lag in LAGS for threshold, flat in kinds]


class Tokens:
    """Sums over the tokens that a gate saw, by bin of entropy: [bins, 4] count, entropy, squared log-ratio, dropped."""

    def __init__(self, flat: bool) -> None:
        self.flat = flat
        self.sums = np.zeros((len(EDGES) + 1, 4))

    def gate(self, x: GateInputs, delta: float) -> torch.Tensor:
        mean = masked_mean(x.entropy, x.loss_mask).expand_as(x.entropy)
        keep = entropy_gate(x._replace(entropy=mean) if self.flat else x, delta)
        entropy = x.entropy[x.loss_mask].detach().double().clamp(min=0)
        square = masked_values(x.policy_logprobs - x.behavior_logprobs, x.loss_mask)[x.loss_mask].detach().square()
        rows = torch.stack([torch.ones_like(entropy), entropy, square.double(), (~keep[x.loss_mask]).double()], 1)
        bins = torch.bucketize(entropy, torch.tensor(EDGES, dtype=entropy.dtype))
        self.sums += torch.zeros(len(EDGES) + 1, 4).double().index_add(0, bins, rows).numpy()
        return keep


@contextmanager
def watched(flat: bool) -> Iterator[Tokens]:
    """Meanwhile the gate of a run in this process is seen."""
    found = Tokens(flat)
    GATES["entropy"] = found.gate
    try:
        yield found
    finally:
        GATES["entropy"] = entropy_gate


def run(arm: Arm) -> list[dict[str, Any]]:
    cell = study.Cell("estr", arm.lag, RATE, arm.seed, arm.overrides())
    with watched(arm.flat) as found:
        row, _ = study.run_cell(cell, BOARD.samples)
    if row["status"] != "done":
        return [row]
    names = ("tokens", "entropy", "square", "dropped")
    points = [asdict(arm) | {"bin": i} | dict(zip(names, sums, strict=True)) for i, sums in enumerate(found.sums)]
    study.append(HERE / "tokens.csv", points, TOKENS)
    return [row | {"dropped": found.sums[:, 3].sum() / found.sums[:, 0].sum()}]


def kind(threshold: float, flat: bool) -> str:
    return "no bound" if threshold == NO_BOUND else f"{threshold:g}, {'one bound for all' if flat else 'by entropy'}"


def figures(runs: pd.DataFrame, name: str, threshold: float, flat: bool, lag: int) -> pd.Series:
    own = runs[(runs.threshold == threshold) & (runs.flat == flat) & (runs.lag == lag)]
    return own.set_index("seed")[name].sort_index()


def said(found: pd.Series) -> str:
    estimate = Estimate.of(list(found))
    return f"{estimate.mean:.3f} ± {estimate.error:.3f}"


def by_bin(tokens: pd.DataFrame, lag: int) -> pd.DataFrame:
    """Of the runs without a bound: share of the tokens, mean entropy and mean squared log-ratio of each bin, and the
    standard error of the last over seeds."""
    own = tokens[(tokens.threshold == NO_BOUND) & (tokens.lag == lag)]
    sums = own.groupby("bin")[["tokens", "entropy", "square"]].sum()
    errors = (own.square / own.tokens).groupby(own.bin).sem()
    table = sums[["entropy", "square"]].div(sums.tokens, axis=0).assign(share=sums.tokens / sums.tokens.sum())
    return table.assign(error=errors)


def tables(runs: pd.DataFrame, tokens: pd.DataFrame) -> str:
    lines = ["| entropy (nats) | " + " | ".join(f"share, lag {lag} | (log r)², lag {lag}" for lag in LAGS) + " |"]
    lines += ["|---" * (1 + 2 * len(LAGS)) + "|"]
    found = [by_bin(tokens, lag) for lag in LAGS]
    bounds = [0.0, *EDGES, np.inf]
    for i, (low, high) in enumerate(itertools.pairwise(bounds)):
        name = f"over {low:g}" if high == np.inf else f"{low:g} to {high:g}"
        cells = [f"{t.share[i]:.0%} | {t.square[i]:.4f} ± {t.error[i]:.4f}" for t in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    heads = ["threshold", *(f"{what}, lag {lag}" for lag in LAGS for what in ("dropped", "reward", "against no bound"))]
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for threshold, flat in dict.fromkeys((arm.threshold, arm.flat) for arm in arms()):
        cells = []
        for lag in LAGS:
            reward = figures(runs, "reward", threshold, flat, lag)
            gain = said(reward - figures(runs, "reward", NO_BOUND, False, lag)) if threshold != NO_BOUND else ""
            cells += [f"{figures(runs, 'dropped', threshold, flat, lag).mean():.1%}", said(reward), gain]
        lines.append(f"| {kind(threshold, flat)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(tokens: pd.DataFrame, target: Path) -> None:
    figure, axis = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for lag in LAGS:
        found = by_bin(tokens, lag)
        axis.errorbar(found.entropy, found.square, found.error, marker="o", markersize=3, label=f"lag {lag}")
    axis.set(xscale="log", yscale="log", xlabel="entropy of the policy (nats)", ylabel="mean squared log-ratio")
    axis.legend()
    figure.savefig(target, dpi=110)


def grid(workers: int) -> None:
    if not (HERE / "tokens.csv").exists():
        study.append(HERE / "tokens.csv", [], TOKENS)
    run_missing(arms(), run, HERE / "runs.csv", COLUMNS, ("reward", "dropped", "seconds"), workers)


def show() -> None:
    runs, tokens = pd.read_csv(HERE / "runs.csv"), pd.read_csv(HERE / "tokens.csv")
    print(tables(runs[runs.status == "done"], tokens))
    draw(tokens, HERE / "figure.png")


if __name__ == "__main__":
    command(__doc__, grid, show)
