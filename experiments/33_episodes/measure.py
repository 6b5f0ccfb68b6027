"""What episodes cost the machinery: one-turn episodes against plain answers, and the controller beside many tools.

python experiments/33_episodes/measure.py one_turn --rounds 5
python experiments/33_episodes/measure.py many --episodes 2000
python experiments/33_episodes/measure.py found game-0 game-1 game-2    # runs of experiment=game
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

from asyncrlhf import Environment, Step

HERE = Path(__file__).resolve().parent
QUIET = ("logging.wandb=disabled", "logging.progress=none", "logging.report=false", "checkpoint.at_end=false")


class OneAnswer(Environment):
    """An answer, as without an environment."""

    async def reset(self, row):
        self._answer = str(row["answer"])

    async def step(self, reply):
        return Step(done=True, reward=float(reply.text.strip() == self._answer))


class SlowTools(Environment):
    """Turns without end, a second after each."""

    async def reset(self, row):
        self._turns = 0

    async def step(self, reply):
        await asyncio.sleep(1.0)
        self._turns += 1
        return Step("1+1=", done=self._turns == 5, reward=0.2)


def metrics_of(*overrides: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "asyncrlhf", "train", f"run_dir={run}", *QUIET, *overrides]
        subprocess.run(command, cwd=HERE, check=True, capture_output=True)
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rate(rows: list[dict], skip: int = 20) -> float:
    """Steps a second after the first ones."""
    return (len(rows) - 1 - skip) / (rows[-1]["wall_time"] - rows[skip]["wall_time"])


def one_turn(rounds: int, steps: int) -> dict:
    ratios = []
    common = (f"steps={steps}", "eval_every=0", "task.heldout_size=8")
    for number in range(rounds):
        kinds = {"plain": (), "episode": ("episode.environment=measure:OneAnswer", "reward.kind=environment")}
        order = sorted(kinds, reverse=number % 2 == 0)
        found = {kind: rate(metrics_of(*common, *kinds[kind], f"seed={number}")) for kind in order}
        ratios.append(found["episode"] / found["plain"])
        print(f"round {number}: {found}, ratio {ratios[-1]:.3f}", flush=True)
    return {"ratios": ratios, "median": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}


def many(episodes: int) -> dict:
    rows = metrics_of(
        "steps=40", f"batch_size={episodes // 4}", "num_generations=4", f"async.max_staleness={8}",
        f"buffer.capacity={4 * episodes}", f"episode.concurrency={episodes}", "generator.engine=fake",
        "generator.fake.latency_median=0.05", f"generator.slots={episodes}", "generator.max_completion_length=60",
        "episode.environment=measure:SlowTools", "reward.kind=environment", "learner.learning_rate=1e-6",
        "eval_every=0", "task.heldout_size=8", "logging.rollout_tokens=0",
    )  # fmt: skip
    lags = [row["loop_lag_p99"] for row in rows[5:]]
    median, worst = 1000 * statistics.median(lags), 1000 * max(lags)
    return {"loop_lag_p99_median_ms": median, "worst_ms": worst, "rate": rate(rows, 5)}


def found(folder: Path, count: int = 512) -> dict:
    """Of the first and of the last episodes that trained the share in which the digit was found."""
    rows = pd.read_parquet(folder / "rollouts")
    won = rows[rows.state == "trained"].sort_values("rollout_id").reward > 0.99
    summary = json.loads((folder / "summary.json").read_text())
    ends = {"first": float(won.head(count).mean()), "last": float(won.tail(count).mean())}
    return {**ends, "heldout": summary["heldout_accuracy"], "seconds": summary["wall_seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("one_turn", "many", "found"))
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--episodes", type=int, default=2000)
    args = parser.parse_args()
    if args.what == "found":
        result: dict = {str(run): found(run) for run in args.runs}
    else:
        result = one_turn(args.rounds, args.steps) if args.what == "one_turn" else many(args.episodes)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
