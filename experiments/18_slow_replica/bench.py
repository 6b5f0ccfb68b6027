"""Does a slow replica hold the others up? Two fast generators and one 30 times slower, against the fast ones alone."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from asyncrlhf.bench.measure import QUIET, show, spread, tell, write
from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import read_metrics

# Generation is the slower side, so that what the generators lose is lost to the run.
SETTING = [
    *QUIET,
    "generator=fake",
    "generator.slots=16",
    "generator.threads=0",
    "learner.virtual_step_seconds=0.01",
    "async.max_staleness=2",
    "batch_size=32",
    "num_generations=4",
]
WARM_UP = 5  # steps left out at the head of every measurement
LATENCY = {"local": 0.05, "ray": 0.25}  # median seconds of a response on a fast replica


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """``--repeats`` rounds on each runtime, without the slow replica and with it in turn; each round has its own seed.
    Other arguments are overrides, such as async.over_stale=wait."""
    parser = argparse.ArgumentParser(prog="asyncrlhf bench replicas", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--times", type=float, default=30.0, help="how much slower the slow replica is")
    parser.add_argument("--runtimes", default="local,ray", help="local is the virtual clock")
    parser.add_argument("--out", type=Path, default=None)
    options, overrides = parser.parse_known_args(list(arguments))
    results: dict[str, Any] = {}
    for runtime in options.runtimes.split(","):
        facts: list[dict[str, Any]] = []
        ratios: list[float] = []
        for seed in range(options.repeats):
            tell(seed + 1, options.repeats, f"runtime={runtime}")
            common = [*SETTING, f"runtime={runtime}", f"steps={options.steps}", f"seed={seed}"]
            fast, slow = LATENCY[runtime], LATENCY[runtime] * options.times
            common += [f"generator.fake.latency_median={fast}"]
            groups = f"generator.groups={{fast:{{replicas:2}},slow:{{fake:{{latency_median:{slow:g}}}}}}}"
            two = measure([*common, "generator.replicas=2", *overrides])
            three = measure([*common, groups, *overrides])
            ratios.append(three["rollouts_per_second"] / two["rollouts_per_second"])
            facts += [{"seed": seed, "replicas": "two fast", **two}, {"seed": seed, "replicas": "with slow", **three}]
            for fact in facts[-2:]:
                print(_line(runtime, fact))
        rows = {
            name: spread([f["rollouts_per_second"] for f in facts if f["replicas"] == name])
            for name in ("two fast", "with slow")
        }
        ratio = {f"with one {options.times:g} times slower / two fast alone": spread(ratios)}
        show(f"Rollouts trained a second, runtime={runtime}", rows, "rollouts/s")
        show("Ratio, each of one round", ratio, "")
        results[runtime] = {"rollouts_per_second": rows, "ratio": ratio, "runs": facts}
    return write({**results, "settings": [*SETTING, *overrides]}, options.out)


def measure(settings: Sequence[str]) -> dict[str, Any]:
    """One run: rollouts trained a second, the largest staleness that was trained on, the ledger's sums."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config([f"run_dir={folder}/run", *settings])
        summary = train(config)
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
        ended = pq.read_table(Path(folder) / "run" / "rollouts").to_pylist()
    # The last steps of a run find their batches ready, for nothing is generated after them.
    first, last = rows[WARM_UP - 1], rows[-1 - (config.async_.bound + 1)]
    trained = (last["step"] - first["step"]) * config.batch_size
    by_slow = [r for r in ended if r["state"] == "trained" and "slow" in r["generator_id"]]
    return {
        "rollouts_per_second": trained / (last["wall_time"] - first["wall_time"]),
        "staleness_max": max(r["staleness"] for r in ended if r["state"] == "trained"),
        "bound": config.async_.bound,
        "trained_of_the_slow_replica": len(by_slow),
        "ledger": summary["ledger"],
        "generators": summary["generators"],
    }


def _line(runtime: str, fact: dict[str, Any]) -> str:
    ledger = fact["ledger"]
    others = sum(ledger["dropped"].values()) + sum(ledger["failed"].values()) + ledger["left"]
    right = ledger["adds_up"] and ledger["trained"] + others == ledger["admitted"]
    return (
        f"{runtime}, seed {fact['seed']}, {fact['replicas']}: {fact['rollouts_per_second']:.1f} rollouts/s, "
        f"staleness at most {fact['staleness_max']} (bound {fact['bound']}), {ledger['admitted']} admitted = "
        f"{ledger['trained']} trained + {others} dropped, failed or left ({'adds up' if right else 'DOES NOT ADD UP'})"
    )
