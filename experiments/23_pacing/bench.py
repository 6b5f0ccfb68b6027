"""Is data fresher when groups begin just in time, and is nothing lost? ``just_in_time`` against ``fill``, in turn."""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from asyncrlhf.bench.measure import spread, write
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.sweeps.record import read_sweep

worlds = importlib.import_module("experiments.23_pacing.worlds")
World = worlds.World

SIBLINGS = ("num_generations=8",)
WORLDS = {
    # The default run as it is on two cores: one replica, decode iterations, one learner that needs about 0.1 s a step.
    "default": World(
        (*SIBLINGS, "batch_size=128", "generator.slots=128"), iteration=(0.0025, 0.00003), train=lambda version: 0.1,
        jitter=0.1, hiccup=0.02,
    ),
    # Every 50th rollout takes 2.3 steps and every seventh group has one of them.
    "tail": World((*SIBLINGS, "batch_size=64", "generator.slots=32", "generator.replicas=4"), tail=0.02),
    # Three replicas and one that is 30 times slower.
    "slow": World(
        (*SIBLINGS, "batch_size=64", "generator.slots=32", "generator.replicas=4"), slow={"generator-3": 30.0}
    ),
}  # fmt: skip
PACINGS = ("fill", "just_in_time")
COLUMNS = ["group_id", "admitted_at", "generated_at", "consumed_at_version"]


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """``--rounds`` seeds of each bound and world on the virtual clock, the two pacings in turn; other arguments are
    overrides. ``--sweep FOLDER`` reads real runs instead."""
    parser = argparse.ArgumentParser(prog="asyncrlhf bench pacing", description=__doc__)
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--bounds", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--warm-up", type=int, default=40, help="steps left out at the beginning")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--sweep", type=Path, default=None)
    options, overrides = parser.parse_known_args(list(arguments))
    result: dict[str, Any] = {} if options.sweep is None else of_sweep(options.sweep, options.warm_up)
    if options.sweep is not None:
        show(result)
        return write(result, options.out)
    for world in options.worlds.split(","):
        for bound in map(int, options.bounds.split(",")):
            rounds = []
            for seed in range(options.rounds):
                order = PACINGS if seed % 2 == 0 else PACINGS[::-1]
                given = [f"steps={options.steps}", f"async.max_staleness={bound}", *overrides]
                found = {p: measured(world, [*given, f"async.pacing={p}"], seed, options.warm_up) for p in order}
                rounds.append(found)
                print(world, bound, seed, line(found), flush=True)
            result[f"{world}, bound {bound}"] = {**summed(rounds), "rounds": rounds}
    show(result)
    return write(result, options.out)


def measured(world: str, overrides: list[str], seed: int, warm_up: int) -> dict[str, float]:
    return dict(worlds.figures(*worlds.imitate(WORLDS[world], *overrides, seed=seed), warm_up))


def of_sweep(folder: Path, warm_up: int) -> dict[str, Any]:
    """The same figures of a sweep over ``async.max_staleness`` and ``async.pacing``, a round a seed that both ended."""
    found: dict[tuple[int, int], dict[str, dict[str, float]]] = defaultdict(dict)
    for job in read_sweep(folder)["jobs"]:
        if job["state"] == "done":
            path = folder / job["folder"]
            metrics = [row for row in read_metrics(path / "metrics.jsonl") if "step" in row]
            rows = pq.read_table(path / "rollouts", columns=COLUMNS).to_pylist()
            own = dict(worlds.figures(metrics, rows, warm_up))
            own["reward"] = statistics.fmean(row["reward_mean"] for row in metrics[-20:])
            key = (int(job["choices"]["async.max_staleness"]), job["seed"])
            found[key][job["choices"]["async.pacing"]] = own
    bounds = sorted({bound for bound, _ in found})
    rounds = {b: [pair for (of, _), pair in sorted(found.items()) if of == b and len(pair) == 2] for b in bounds}
    return {f"default run, bound {b}": {**summed(each), "rounds": each} for b, each in rounds.items() if each}


def ratios(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """``excess``: staleness over the floor, of just_in_time over that of fill (both at least 0); ``over_1``: the same
    over 1, which no overlap can be below. The floor of a round is the lower one of its two runs."""
    fill, paced = found["fill"], found["just_in_time"]
    floor = min(fill["floor"], paced["floor"])

    def share(least: float) -> float:
        whole = fill["staleness"] - least
        return max(0.0, paced["staleness"] - least) / whole if whole > 0.02 else float("nan")

    return {
        "floor": floor,
        "fill": fill["staleness"],
        "just_in_time": paced["staleness"],
        "excess": share(floor),
        "over_1": share(1.0),
        "speed": paced["steps_per_second"] / fill["steps_per_second"],
    }


def line(found: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{key} {value:.3f}" for key, value in ratios(found).items())


def summed(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    each = [ratios(found) for found in rounds]
    return {key: spread([row[key] for row in each]) for key in each[0]}


def show(result: dict[str, Any]) -> None:
    """A table in Markdown: medians, and in brackets the smallest and largest of the rounds."""
    keys = ("floor", "fill", "just_in_time", "excess", "over_1", "speed")
    print("| setting | " + " | ".join(keys) + " |\n|" + "---|" * (len(keys) + 1))
    for name, row in result.items():
        cells = [f"{row[k]['median']:.2f} ({row[k]['min']:.2f} to {row[k]['max']:.2f})" for k in keys]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    run(sys.argv[1:])
