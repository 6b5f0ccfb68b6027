"""What episodes cost the machinery: one-turn episodes against plain answers, and the controller beside many tools.

python experiments/33_episodes/measure.py one_turn --rounds 5
python experiments/33_episodes/measure.py many --episodes 2000
python experiments/33_episodes/measure.py found game-0 game-1 game-2    # runs of experiment=game
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrlhf import Environment, Step
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.models.checkpoint_folder import resolve

HERE = Path(__file__).resolve().parent
QUIET = ("logging.wandb=disabled", "logging.progress=none", "logging.report=false", "checkpoint.at_end=false")


class OneAnswer(Environment):
    """An answer, as without an environment."""

    async def reset(self, row):
        self._answer = str(row["answer"])

    async def step(self, reply):
        return Step(done=True, reward=float(reply.text.strip() == self._answer))


class SlowTools(Environment):
    """Twenty turns, a second after each."""

    TURNS = 20

    async def reset(self, row):
        self._turns = 0

    async def step(self, reply):
        await asyncio.sleep(1.0)
        self._turns += 1
        return Step("1", done=self._turns == self.TURNS, reward=1 / self.TURNS)


def metrics_of(*overrides: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "asyncrlhf", "train", f"run_dir={run}", *QUIET, *overrides]
        subprocess.run(command, cwd=HERE, check=True, capture_output=True)
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rate(rows: list[dict], skip: int = 20) -> float:
    """Steps a second after the first ones."""
    return (len(rows) - 1 - skip) / (rows[-1]["wall_time"] - rows[skip]["wall_time"])


def one_turn(rounds: int, steps: int, settings: list[str]) -> dict:
    """``settings``: of both sides."""
    ratios = []
    common = (f"steps={steps}", "eval_every=0", "task.heldout_size=8", *settings)
    for number in range(rounds):
        kinds = {"plain": (), "episode": ("episode.environment=measure:OneAnswer", "reward.kind=environment")}
        order = sorted(kinds, reverse=number % 2 == 0)
        found = {kind: rate(metrics_of(*common, *kinds[kind], f"seed={number}")) for kind in order}
        ratios.append(found["episode"] / found["plain"])
        print(f"round {number}: {found}, ratio {ratios[-1]:.3f}", flush=True)
    return {"ratios": ratios, "median": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}


def small_model(folder: str) -> str:
    """The packaged model with one layer of 16 random channels, whose steps cost little: nothing is learned here."""
    packaged = Path(resolve(ModelConfig().path))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8}
    config = AutoConfig.from_pretrained(packaged, num_hidden_layers=1, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(packaged / file, folder)
    return folder


def many(episodes: int, rounds: int, model: str) -> dict:
    """The controller's delay while ``episodes`` are played at a time. Turns are one token; a tenth of the episodes is a
    batch, due every two seconds. A learner that takes longer for it leaves fewer episodes at a time."""
    steps = 24
    medians, worst = [], []
    for number in range(rounds):
        rows = metrics_of(
            f"steps={steps}", f"batch_size={episodes // 10}", "num_generations=4", "async.max_staleness=12",
            f"buffer.capacity={2 * episodes}", f"episode.concurrency={episodes}", "generator.engine=fake",
            "generator.fake.latency_median=0.05", "generator.fake.length_mean=1", "generator.ignore_eos=true",
            f"generator.slots={episodes}", "generator.max_completion_length=100", "episode.max_turn_tokens=1",
            "episode.max_turns=20", "episode.environment=measure:SlowTools", "reward.kind=environment",
            "learner.learning_rate=1e-6", "eval_every=0", "task.heldout_size=8", "logging.rollout_tokens=0",
            f"seed={number}", f"model.path={model}",
        )  # fmt: skip
        # After ten batches the episodes that are left to begin no longer replace all that end.
        lags = [1000 * row["loop_lag_p99"] for row in rows[1 : steps - 12]]
        medians.append(statistics.median(lags))
        worst.append(max(lags))
        idle = statistics.mean(row["learner_idle_fraction"] for row in rows[1 : steps - 12])
        turns = episodes // 10 * SlowTools.TURNS * rate(rows[: steps - 12], 1)
        print(f"round {number}: median {medians[-1]:.1f} ms, worst {worst[-1]:.1f} ms, learner idle {idle:.2f}, "
              f"{turns:.0f} turns a second", flush=True)  # fmt: skip
    return {"loop_lag_p99_ms": {"medians": medians, "worst": worst}, "median": statistics.median(medians)}


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
    parser.add_argument("--settings", nargs="*", default=[], help="of both sides of one_turn")
    parser.add_argument("--episodes", type=int, default=2000)
    args = parser.parse_args()
    if args.what == "found":
        result: dict = {str(run): found(run) for run in args.runs}
    else:
        with tempfile.TemporaryDirectory() as folder:
            ways = {
                "one_turn": lambda: one_turn(args.rounds, args.steps, args.settings),
                "many": lambda: many(args.episodes, args.rounds, small_model(folder)),
            }
            result = ways[args.what]()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
