"""Prints the README's tables: means with one standard error over the seeds.

python -m experiments.40_chunk_sink.tables
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pandas as pd

caches = import_module("experiments.40_chunk_sink.caches")
lab = import_module("experiments.40_chunk_sink.train")
HERE = Path(__file__).absolute().parent
NAMES = ["reward", "lines", "repeated", "cache_kl", "cache_ratio_low", "cache_kept_fraction"]
PARTS = [f"cache_kl/{i}" for i in range(1, 5)]
TRAINED = ["reward", "repeated", "train_reward", "ess_fraction", "ess_fraction_seq", "behavior_kl", "cache_kl"]


def shown(values: pd.Series, digits: int = 3) -> str:
    """``mean ± standard error``; a dash for what was not measured."""
    values = values.dropna()
    if values.empty:
        return "-"
    error = f" ± {values.sem():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{error}"


def table(frame: pd.DataFrame, keys: Sequence[str], names: Sequence[str]) -> str:
    """One line for each combination of ``keys``, in the order of the rows, with the number of its seeds."""
    lines = ["| " + " | ".join([*keys, "seeds", *names]) + " |", "|---" * (len(keys) + 1 + len(names)) + "|"]
    for key, rows in frame.groupby(list(keys), sort=False):
        lines.append("| " + " | ".join([*map(str, key), str(len(rows)), *(shown(rows[n]) for n in names)]) + " |")
    return "\n".join(lines)


def against(frame: pd.DataFrame, keys: Sequence[str], base: Sequence[object]) -> str:
    """Held-out reward less that of ``base`` with the same seed."""
    rewards = frame.set_index([*keys, "seed"]).reward
    own = rewards.loc[tuple(base)]
    lines = []
    for key in dict.fromkeys(frame[list(keys)].itertuples(index=False, name=None)):
        if key != tuple(base):
            lines.append(f"{' '.join(map(str, key))}: {shown((rewards.loc[key] - own).dropna())}")
    return "\n".join(lines)


def main() -> None:
    sampled = pd.read_csv(HERE / "caches.csv")
    print(table(sampled, ["policy", "share"], NAMES), "\n")
    print(table(sampled[sampled.policy != "full"], ["policy", "share"], PARTS), "\n")
    print("standard error over the prompts of one sampling, at most:", sampled.reward_se.max(), "\n")
    keys = ["cache", "share", "lag", "correction"]
    order = {arm: number for number, arm in enumerate(lab.ARMS)}
    runs = pd.read_csv(HERE / "runs.csv")
    place = [order[key] for key in runs[keys].itertuples(index=False, name=None)]
    runs = runs.assign(place=place).sort_values(["place", "seed"])
    print(table(runs, keys, TRAINED), "\n")
    print(against(runs, keys, lab.ARMS[0]))


if __name__ == "__main__":
    main()
