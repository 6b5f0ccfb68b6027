"""Prints the README's tables: means with one standard error over the seeds.

python -m experiments.40_chunk_sink.tables
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd

ledger = import_module("experiments.40_chunk_sink.ledger")
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


def table(frame: pd.DataFrame, keys: Sequence[str], names: Sequence[str], digits: int = 3) -> str:
    """One line for each combination of ``keys``, in the order of the rows, with the number of its seeds."""
    lines = ["| " + " | ".join([*keys, "seeds", *names]) + " |", "|---" * (len(keys) + 1 + len(names)) + "|"]
    for key, rows in frame.groupby(list(keys), sort=False):
        lines.append(
            "| " + " | ".join([*map(str, key), str(len(rows)), *(shown(rows[n], digits) for n in names)]) + " |"
        )
    return "\n".join(lines)


def against(frame: pd.DataFrame, keys: Sequence[str], base: Sequence[object]) -> str:
    """Held-out reward less that of ``base`` with the same seed."""
    rewards = frame.set_index([*keys, "seed"]).reward.sort_index()
    own = rewards.loc[tuple(base)]
    lines = []
    for key in dict.fromkeys(frame[list(keys)].itertuples(index=False, name=None)):
        if key != tuple(base):
            lines.append(f"{' '.join(map(str, key))}: {shown((rewards.loc[key] - own).dropna())}")
    return "\n".join(lines)


def saved(frame: pd.DataFrame) -> pd.DataFrame:
    """``lost``: reward that the whole cache of the same seed has more; ``lost_per_10``: for 10 tokens less of room."""
    whole = frame[frame.policy == "full"].set_index("seed").reward
    own = frame[frame.policy != "full"]
    lost = own.seed.map(whole) - own.reward
    room = ledger.LONGEST - np.ceil(own.share * ledger.LONGEST)
    return own.assign(lost=lost, lost_per_10=10 * lost / room)


def ends(frame: pd.DataFrame) -> str:
    """Reward and distance of other choices less those of the first tokens, by seed."""
    lines = []
    for share, name in itertools.product(caches.SHARES, ("chunk_sink-last", "chunk_sink-both", "window")):
        of = frame[frame.share == share].pivot(index="seed", columns="policy", values=["reward", "cache_kl"])
        reward, kl = (shown(of[what][name] - of[what]["chunk_sink-first"]) for what in ("reward", "cache_kl"))
        lines.append(f"{share} {name} less chunk_sink-first: reward {reward}, cache_kl {kl}")
    return "\n".join(lines)


def pairs(frame: pd.DataFrame) -> str:
    """By seed, of each cache and lag: what each correction gains over none; then what lag 4 costs, which differs."""
    keys = ["cache", "share", "lag"]
    lines = []
    for key, rows in frame.groupby(keys, sort=False):
        rewards = rows.pivot(index="seed", columns="correction", values="reward")
        for name in rewards.columns.drop("none") if "none" in rewards else ():
            gain = shown((rewards[name] - rewards.none).dropna())
            lines.append(f"{' '.join(map(str, key))}: {name} less none {gain}")
    for key, rows in frame.groupby(["cache", "share", "correction"], sort=False):
        for name in ("reward", "behavior_kl", "ess_fraction"):
            found = rows.pivot(index="seed", columns="lag", values=name)
            if {0, 4} <= set(found.columns):
                more = shown((found[4] - found[0]).dropna(), 4)
                lines.append(f"{' '.join(map(str, key))}: {name} at lag 4 less lag 0 {more}")
    return "\n".join(lines)


def added(frame: pd.DataFrame) -> pd.DataFrame:
    """Of an older sampler with a smaller cache: the sum of both distances beside the one measured, and the product of
    both effective shares beside the one measured; by seed."""
    of = frame.set_index(["steps", "cache", "share", "seed"])
    newest, rows = frame.steps.max(), []
    for key, both in of.iterrows():
        steps, cache, share, seed = key
        if steps == newest or cache == "full":
            continue
        age, part = of.loc[(steps, "full", 1.0, seed)], of.loc[(newest, cache, share, seed)]
        row = dict(zip(of.index.names, key, strict=True)) | {"kl_age": age.kl, "kl_cache": part.kl, "kl_both": both.kl}
        row |= {"kl_more_than_sum": both.kl - age.kl - part.kl, "ess_age": age.ess, "ess_cache": part.ess}
        rows.append(row | {"ess_both": both.ess, "ess_less_product": both.ess - age.ess * part.ess})
    return pd.DataFrame(rows)


def main() -> None:
    sampled = pd.read_csv(HERE / "caches.csv")
    print(table(sampled, ["policy", "share"], NAMES), "\n")
    print(table(sampled[sampled.policy != "full"], ["policy", "share"], PARTS), "\n")
    print(table(saved(sampled), ["policy", "share"], ["lost", "lost_per_10", "cache_kl", "cache_ratio_low"]), "\n")
    print(ends(sampled), "\n")
    print("standard error over the prompts of one sampling, at most:", sampled.reward_se.max(), "\n")
    keys = ["cache", "share", "lag", "correction"]
    order = {arm: number for number, arm in enumerate(lab.ARMS)}
    runs = pd.read_csv(HERE / "runs.csv")
    place = [order[key] for key in runs[keys].itertuples(index=False, name=None)]
    runs = runs.assign(place=place).sort_values(["place", "seed"])
    print(table(runs, keys, TRAINED), "\n")
    print(against(runs, keys, lab.ARMS[0]), "\n")
    print(pairs(runs), "\n")
    for name in ("boards", "words"):
        large = pd.read_csv(HERE / f"{name}.csv")
        whole = large.seed.map(large[large.policy == "full"].set_index("seed").reward)
        figures = ["reward", "lost", "length", "cache_kl", *PARTS, "cache_ratio_low", "cache_kept_fraction"]
        print(table(large.assign(lost=whole - large.reward), ["policy", "share"], figures, digits=4), "\n")
    both = pd.read_csv(HERE / "both.csv")
    print(table(both, ["steps", "cache", "share"], ["reward", "kl", "ess", "low"]), "\n")
    print(table(found := added(both), ["steps", "cache", "share"], list(found.columns[4:])))


if __name__ == "__main__":
    main()
