"""Trains a small mixture of experts with and without routing replay: one CSV row a run, and a figure.

python experiments/31_routing_replay/run.py make FOLDER      # the mixture, by supervised training: minutes
python experiments/31_routing_replay/run.py runs FOLDER      # runs.csv and curves.csv; resumable
python experiments/31_routing_replay/run.py plot             # figure.png, and the README's table on the screen
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics

HERE = Path(__file__).absolute().parent
RUNS, CURVES = HERE / "runs.csv", HERE / "curves.csv"
KEY = ["dtype", "lag", "replay", "seed"]
DTYPES, LAGS, REPLAY = ("float32", "bfloat16"), (0, 4), (False, True)
STEPS = 100
SETTINGS = (
    "runtime=local", "async=fixed_lag", "generator.engine=hf", "logging=quiet", "logging.rollouts=false",
    "algorithm=tis", "batch_size=64", f"steps={STEPS}", "learner.learning_rate=5e-5", "generator.slots=64",
    "eval_every=0", "weights.audit_every=0",
)  # fmt: skip
MEANS = ["behavior_kl", "behavior_log_ratio_abs_mean", "ess_fraction", "behavior_truncated_fraction", "routes_changed"]
LARGEST = "behavior_log_ratio_abs_max"


def make(folder: Path) -> None:
    """Qwen3-MoE, 4 layers of 8 experts of which a token passes 2, trained on two-digit sums as the packaged model."""
    tiny = importlib.import_module("experiments.00_tiny_checkpoint.make")
    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        head_dim=32, max_position_embeddings=tiny.CONTEXT, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    tiny.train_on_sums(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_all(folder: Path, seeds: list[int]) -> None:
    """Seed by seed, so that an interrupted series has every setting."""
    done = set(pd.read_csv(RUNS)[KEY].itertuples(index=False, name=None)) if RUNS.exists() else set()
    for seed, lag, dtype, replay in itertools.product(seeds, LAGS, DTYPES, REPLAY):
        if (dtype, lag, replay, seed) in done:
            continue
        own = (f"model.path={folder}", f"model.dtype={dtype}", f"async.lag={lag}", f"seed={seed}",
               f"learner.routing_replay={str(replay).lower()}")  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="routes-") as run_dir:
            train(load_config([*SETTINGS, *own, f"run_dir={run_dir}/run"]))
            frame = pd.DataFrame(read_metrics(Path(run_dir) / "run" / METRICS_FILE))
        key = dict(zip(KEY, (dtype, lag, replay, seed), strict=True))
        steady = frame.iloc[max(LAGS) :]  # before it a lag has not reached its length
        row = {
            "first": frame.reward_mean.head(STEPS // 4).mean(),
            "last": frame.reward_mean.tail(STEPS // 4).mean(),
            **{name: steady[name].mean() for name in MEANS if name in steady},
            LARGEST: steady[LARGEST].max(),
        }
        curve = frame[["step", "reward_mean", "behavior_kl"]].to_dict("records")
        _append(CURVES, [key | point for point in curve])
        _append(RUNS, [key | row], [*KEY, "first", "last", *MEANS, LARGEST])
        print(*(f"{name}={v:.3g}" if isinstance(v, float) else f"{name}={v}" for name, v in (key | row).items()))


def _append(path: Path, rows: list[dict], columns: list[str] | None = None) -> None:
    frame = pd.DataFrame(rows, columns=columns)
    frame.to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.5g")


def plot() -> None:
    runs, curves = pd.read_csv(RUNS), pd.read_csv(CURVES)
    cells = list(itertools.product(LAGS, DTYPES))
    figure, axes = plt.subplots(2, len(cells), figsize=(3.4 * len(cells), 6), constrained_layout=True, squeeze=False)
    for column, (lag, dtype) in enumerate(cells):
        for replay, color in zip(REPLAY, ("C1", "C0"), strict=True):
            mine = curves[(curves.lag == lag) & (curves.dtype == dtype) & (curves.replay == replay)]
            for number, (_, one) in enumerate(mine.groupby("seed")):
                label = ("routing replay" if replay else "own routes") if number == 0 else None
                smooth = one.reward_mean.rolling(5, min_periods=1).mean()
                axes[0][column].plot(one.step, smooth, color=color, alpha=0.7, label=label)
                axes[1][column].plot(one.step, one.behavior_kl.clip(lower=1e-12), color=color, alpha=0.7)
        axes[0][column].set(title=f"lag {lag}, generator in {dtype}", ylim=(0, None))
        axes[1][column].set(yscale="log", xlabel="step")
    axes[0][0].set_ylabel("reward, mean of 5 steps")
    axes[1][0].set_ylabel("behavior_kl, nats a token")
    axes[0][0].legend()
    figure.savefig(HERE / "figure.png", dpi=110)
    grouped = runs.groupby(["lag", "dtype", "replay"])
    table = grouped[["first", "last", *MEANS, LARGEST]].mean()
    table.insert(2, "last_sd", grouped["last"].std())
    table.insert(3, "seeds", grouped.size())
    print(table.to_string(float_format=lambda value: f"{value:.3g}"))
    for (lag, dtype), own in runs.groupby(["lag", "dtype"]):
        for name in ("last", "behavior_kl"):
            pair = own.pivot(index="seed", columns="replay", values=name)
            if name == "last":
                gap = pair[True] - pair[False]
                print(
                    f"lag {lag}, {dtype}: reward, replay - own: {gap.mean():+.4f} +- {gap.sem():.4f} ({len(gap)} seeds)"
                )
            else:
                ratio = pair[True] / pair[False]
                print(f"lag {lag}, {dtype}: {name}, replay / own: {ratio.min():.3g} to {ratio.max():.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "runs", "plot"])
    parser.add_argument("folder", type=Path, nargs="?", help="of the mixture")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if options.action != "plot" and options.folder is None:
        parser.error(f"{options.action} needs the mixture's folder")
    torch.set_num_threads(1)
    if options.action == "make":
        make(options.folder)
    elif options.action == "runs":
        run_all(options.folder.absolute(), options.seeds)
    else:
        plot()


if __name__ == "__main__":
    main()
