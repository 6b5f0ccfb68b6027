"""The controlled gold-reward study: learned rewards, gold measured beside them.

    python experiments/04_gold_rlhf/study.py chain   # one seed through all stages, and what came of it: `make rlhf`
    python experiments/04_gold_rlhf/study.py grid    # algorithms x modes x seeds: runs.csv and curves.csv
    python experiments/04_gold_rlhf/study.py clock   # sync, one_step and async on Ray, by the wall clock: clock.csv
    python experiments/04_gold_rlhf/study.py plot    # figure.png, and the README's tables on the screen

``--scale tiny`` (or ``smollm2``) names the file that says what is run. What a folder holds already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from best_of_n import best_of_n
from chain import (
    HERE,
    ROOT,
    Base,
    Scale,
    StageFailed,
    asyncrlhf,
    compare,
    evaluate,
    make_base,
    read_json,
    train_here,
    trained_model,
)

from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics

KEY = ["algorithm", "mode", "seed"]
# Of metrics.jsonl, under the study's names.
COLUMNS = {
    "reward/gold": "gold",
    "reward/proxy": "proxy",
    "ref_kl": "kl",
    "response_length_mean": "length",
    "staleness_mean": "staleness",
    "wall_time": "wall_time",
}
POINTS = 50  # of a curve
LAST = 10  # steps whose means are a run's result
NEEDED = 2.0  # standard errors by which gold must have risen
OVEROPTIMISED = "overoptimised"


def chain(scale: Scale, folder: Path, seed: int) -> int:
    """All stages of one seed; prints and writes what came of it. 1 if gold did not rise by enough."""
    started = time.monotonic()
    base = make_base(scale, seed, folder)
    algorithm, mode = scale.chain
    run = folder / "train"
    steps = next(o.partition("=")[2] for o in reversed(scale.train) if o.startswith("steps="))
    took = asyncrlhf("train", run, [*base.training(algorithm, mode), "runtime=local", f"checkpoint.every={steps}"])
    print(f"{algorithm}, {mode}: {took:.0f} s", flush=True)
    before = evaluate(base, base.sft_model, folder / "evaluate_sft")
    after = evaluate(base, trained_model(run), folder / "evaluate_train")
    gain = compare(before, after)
    result = {
        "scale": scale.name,
        "seed": seed,
        "algorithm": algorithm,
        "mode": mode,
        "reward_model": read_json(folder / "reward_model" / "summary.json")["heldout"],
        "gold": gain,
        "gain_in_standard_errors": gain["gain"] / gain["standard_error"],
        "win_rate": {name: after[name] for name in ("win_rate", "win_rate_standard_error")},
        "kl": after["kl"],
        "proxy": {"sft": before["reward_parts"]["proxy"], "trained": after["reward_parts"]["proxy"]},
        "seconds": time.monotonic() - started,
    }
    (folder / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    read_curve(run).to_csv(folder / "curve.csv", index=False, float_format="%.5g")
    print(words(result))
    return int(result["gain_in_standard_errors"] <= NEEDED)


def words(result: Mapping[str, Any]) -> str:
    """What came of a chain, in a few lines."""
    gold, kl, right, wins = result["gold"], result["kl"], result["reward_model"], result["win_rate"]
    found = f"SFT {gold['before']:.3f}, after RL {gold['after']:.3f}; gain {gold['gain']:.3f}"
    errors = f"+- {gold['standard_error']:.3f}, {result['gain_in_standard_errors']:.1f} standard errors"
    return "\n".join(
        [
            f"Reward model: right on {right['accuracy']:.3f} +- {right['accuracy_standard_error']:.3f} of "
            f"{right['pairs']} held-out pairs, whose labels are noisy.",
            f"Gold reward on {gold['prompts']} held-out prompts: {found} {errors}.",
            f"KL to the SFT model: {kl['k1_sequence']:.2f} nats an answer. Win rate: {wins['win_rate']:.3f}.",
            f"Time: {result['seconds']:.0f} s.",
        ]
    )


def grid(scale: Scale, work: Path, out: Path, seeds: Sequence[int], only: Sequence[str]) -> None:
    """Each algorithm in each mode, on the local runtime: what lag does to the curves, whatever the machine does. Then
    one algorithm with hardly a KL."""
    for seed in seeds:
        base = make_base(scale, seed, work / f"seed-{seed}")
        append_new(out / "best_of_n.csv", seed, lambda base=base: best_of_n(base, scale.best_of_n_prompts))
        for algorithm, mode in itertools.product(scale.algorithms, scale.modes):
            if not only or algorithm in only:
                run_cell(base, out, algorithm, mode, [], algorithm)
        if not only or OVEROPTIMISED in only:
            chosen, extra = scale.overoptimised["algorithm"], scale.overoptimised["train"]
            run_cell(base, out, chosen, next(iter(scale.modes)), extra, OVEROPTIMISED)


def clock(scale: Scale, work: Path, out: Path, seeds: Sequence[int], only: Sequence[str]) -> None:
    """Modes side by side on real processes, one run after the other, seed by seed."""
    for seed in seeds:
        base = make_base(scale, seed, work / f"seed-{seed}")
        chosen = [algorithm for algorithm in scale.clock["algorithms"] if not only or algorithm in only]
        for algorithm, mode in itertools.product(chosen, scale.modes):
            run_cell(base, out, algorithm, mode, scale.clock["train"], algorithm, prefix="clock_")


def run_cell(
    base: Base, out: Path, algorithm: str, mode: str, extra: Sequence[str], name: str, prefix: str = ""
) -> None:
    """Train once and append the run's row and curve, unless they are there. With a ``prefix`` to the files' names the
    run is one of real processes."""
    runs = out / f"{prefix}runs.csv"
    key = (name, mode, base.seed)
    if runs.is_file() and key in set(pd.read_csv(runs)[KEY].itertuples(index=False, name=None)):
        return
    run = base.folder / f"{prefix}{name}-{mode}"
    overrides = [*base.training(algorithm, mode), *extra]
    took = asyncrlhf("train", run, overrides) if prefix else train_here(run, overrides)
    curve = read_curve(run)
    labels = dict(zip(KEY, key, strict=True))
    last = {column: float(curve[column][-LAST:].mean()) for column in COLUMNS.values() if column != "wall_time"}
    # The mean of the steps' peaks is smoothed as the end is, so that chance alone makes no peak.
    peak = float(curve.gold.rolling(LAST).mean().max())
    row = labels | last | {"gold_peak": peak, "steps": len(curve), "wall_time": float(curve.wall_time.iloc[-1])}
    append(out / f"{prefix}curves.csv", [labels | point for point in thinned(curve)])
    append(runs, [row])
    figures = " ".join(f"{k}={v:.3g}" for k, v in row.items() if isinstance(v, float))
    print(f"{name} {mode} seed {base.seed}: {took:.0f} s {figures}", flush=True)


def read_curve(run: Path) -> pd.DataFrame:
    """A run's steps under the study's names."""
    frame = pd.DataFrame(read_metrics(run / METRICS_FILE))
    return frame[["step", *COLUMNS]].rename(columns=COLUMNS).astype(float)


def thinned(curve: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """At most POINTS means of neighbouring steps, each at its last step and time."""
    for piece in np.array_split(np.arange(len(curve)), min(POINTS, len(curve))):
        rows = curve.iloc[piece]
        ends = {"step": int(rows.step.iloc[-1]), "wall_time": float(rows.wall_time.iloc[-1])}
        yield {**{c: float(v) for c, v in rows.mean().items()}, **ends}


def append_new(path: Path, seed: int, make: Callable[[], Sequence[dict[str, Any]]]) -> None:
    """Append a seed's rows, unless the file has some."""
    if not path.is_file() or seed not in set(pd.read_csv(path).seed):
        append(path, make())


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.5g")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("chain", "grid", "clock", "plot"))
    parser.add_argument("--scale", default="tiny", help="tiny, smollm2, or another file of this folder")
    parser.add_argument("--work", type=Path, default=None, help="models and runs; by default runs/gold_rlhf/SCALE")
    parser.add_argument("--out", type=Path, default=None, help="CSV files and figure; by default this folder's SCALE")
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="only these seeds")
    parser.add_argument("--algorithms", nargs="+", default=[], help=f"only these, or {OVEROPTIMISED}")
    options = parser.parse_args()
    scale = Scale.read(options.scale)
    seeds = options.seeds or scale.seeds
    work = (options.work or ROOT / "runs" / "gold_rlhf" / scale.name).absolute()
    out = (options.out or HERE / scale.name).absolute()
    os.chdir(ROOT)  # the gold rewards are found from here
    sys.path.insert(0, str(ROOT))
    try:
        if options.action == "chain":
            chosen = options.seeds or scale.seeds[:1]
            return max([chain(scale, work / f"seed-{seed}", seed) for seed in chosen])
        if options.action == "grid":
            grid(scale, work, out, seeds, options.algorithms)
        elif options.action == "clock":
            clock(scale, work, out, seeds, options.algorithms)
        else:
            from figure import plot

            plot(out)
    except StageFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
