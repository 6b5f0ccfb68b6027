"""Two checkouts of this repository, the same seeds: do they train the same rollouts to the same weights?

python experiments/21_same_training/compare.py BEFORE AFTER [--seeds 3] [--out FOLDER]

BEFORE and AFTER are checkouts. Each runs every case once a seed, in one process on the virtual clock. Trained rollout
ids step by step, the weights' digest and the ledger must be identical, and the metrics of METRICS equal: integers
exactly, floats to 1e-6, quantiles to the width of a histogram's bin (1%). Keys that came or went are listed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors.numpy import load_file

COMMON = (
    "runtime=local",
    "logging.wandb=disabled",
    "logging.progress=none",
    "logging.report=false",
    "steps=8",
    "batch_size=16",
    "num_generations=4",
    "generator.slots=16",
    "generator.replicas=2",
    "task.heldout_size=8",
    "checkpoint.every=8",
)
CASES = {
    "sync": ["async.mode=sync"],
    "fixed_lag_0": ["async.mode=fixed_lag", "async.lag=0"],
    "fixed_lag_4": ["async.mode=fixed_lag", "async.lag=4"],
    "ppo_fixed_lag_2": ["async.mode=fixed_lag", "async.lag=2", "algorithm=ppo"],
    "normalised_one_step": ["async.mode=one_step", "reward.normalize=running"],
}
METRICS = (
    "reward_mean",
    "reward_std",
    "loss",
    "grad_norm",
    "entropy",
    "behavior_kl",
    "ess_fraction",
    "ess_fraction_seq",
    "clip_fraction",
    "version_lag_mean",
    "version_lag_max",
    "advantage_mean",
    "advantage_std",
    "tokens",
    "sequences",
    "response_tokens",
    "response_length_mean",
    "truncated_fraction",
    "zero_spread_groups",
    "learning_rate",
    "policy_version",
)
QUANTILES = ("behavior_log_ratio_abs_p99", "policy_log_ratio_abs_p99")
TOLERANCE, BIN = 1e-6, 0.01


def run(checkout: Path, folder: Path, case: str, seed: int) -> Path:
    command = [sys.executable, "-m", "asyncrlhf", "train", f"run_dir={folder}", f"seed={seed}", *COMMON, *CASES[case]]
    done = subprocess.run(
        command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} in {checkout} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return folder


def digest(weights: Path) -> str:
    """Of names, shapes, types and numbers; the order of the tensors in the file and its header do not count."""
    found = hashlib.sha256()
    for name, tensor in sorted(load_file(weights).items()):
        found.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        found.update(tensor.tobytes())
    return found.hexdigest()


def read(folder: Path) -> dict[str, Any]:
    rows = pd.read_parquet(folder / "rollouts")
    trained = rows[rows.state == "trained"]
    weights = sorted(folder.glob("checkpoints/step-*/learner/model/model.safetensors"))[-1]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        "trained": [
            (row.rollout_id, row.reward, row.response, list(row.consumed_at_version), list(row.policy_versions))
            for row in trained.sort_values("rollout_id").itertuples()
        ],
        "weights": digest(weights),
        "ledger": json.loads((folder / "summary.json").read_text())["ledger"],
        "metrics": [json.loads(line) for line in lines],
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = [f"{key} differ" for key in ("trained", "weights", "ledger") if before[key] != after[key]]
    for one, other in zip(before["metrics"], after["metrics"], strict=True):
        for key in (*METRICS, *QUANTILES):
            old, new = one.get(key), other.get(key)
            if old is None and new is None:
                continue
            allowed = BIN * abs(old or 0.0) + TOLERANCE if key in QUANTILES else TOLERANCE * max(1.0, abs(old or 0.0))
            if old is None or new is None or abs(old - new) > allowed:
                found.append(f"step {one['step']}: {key} {old} -> {new}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/same_training"))
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for case in CASES:
        for seed in range(arguments.seeds):
            pair = []
            for side in ("before", "after"):
                folder = (arguments.out / side / f"{case}-{seed}").absolute()
                pair.append(read(run(getattr(arguments, side).absolute(), folder, case, seed)))
            keys = [set().union(*one["metrics"]) for one in pair]
            result[f"{case}, seed {seed}"] = {
                "differences": differences(*pair),
                "weights": pair[1]["weights"][:12],
                "keys that went": sorted(keys[0] - keys[1]),
                "keys that came": sorted(keys[1] - keys[0]),
            }
            print(f"{case}, seed {seed}: {result[f'{case}, seed {seed}']['differences'] or 'the same'}", flush=True)
    (arguments.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    raise SystemExit(int(any(one["differences"] for one in result.values())))


if __name__ == "__main__":
    main()
