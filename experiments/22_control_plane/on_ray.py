"""Fake replicas on a real Ray: rollouts a second of the whole loop, and tokens a second of its records.

    python experiments/22_control_plane/on_ray.py replicas 16 --steps 40
    python experiments/22_control_plane/on_ray.py records 4 --steps 120

The model is the tiny one shrunk to 2,912 parameters. ``records``: rollouts have 8,000 tokens, and the learner is given
one rollout of each batch. To compare with another commit, run its checkout by ``PYTHONPATH``, in turn with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from asyncrlhf.cli.main import main

COMMON = (
    "generator=fake", "num_generations=8", "weights.audit_every=0", "task.heldout_size=8", "logging=quiet",
    "algorithm=reinforce",
)  # fmt: skip
REPLICAS = ("generator.slots=128", "batch_size=1024", "async.max_staleness=2", "generator.fake.latency_median=0.05")
RECORDS = (
    "generator.slots=64", "batch_size=64", "async.max_staleness=8", "generator.fake.latency_median=0.5",
    "generator.fake.length_mean=8000", "generator.fake.length_sigma=0.01", "generator.fake.correct_probability=0",
    "generator.max_completion_length=8000",
)  # fmt: skip


def shrunk(folder: Path) -> Path:
    """The tiny checkpoint with one layer of 16 columns, random weights and a context of 16,384 tokens."""
    source = Path(__file__).resolve().parents[2] / "asyncrlhf" / "assets" / "tiny-arithmetic"
    config = transformers.AutoConfig.from_pretrained(source)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config.update({**sizes, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16384})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(folder)
    return folder


def measure(what: str, replicas: int, steps: int) -> None:
    if what == "records":
        from asyncrlhf.cluster.ray_handles import RayLearner  # not in every commit that this one is compared with

        train = RayLearner.train

        async def of_one(self: RayLearner, rollouts: Sequence[Any]) -> Any:
            await asyncio.sleep(0.05)
            return await train(self, rollouts[:1])

        RayLearner.train = of_one  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        own = RECORDS if what == "records" else REPLICAS
        place = (f"run_dir={run}", f"model.path={shrunk(Path(folder) / 'model')}")
        code = main(["train", *COMMON, *own, *place, f"generator.replicas={replicas}", f"steps={steps}"])
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if code:
        raise SystemExit(code)
    first, last = (rows[10], rows[-6]) if what == "records" else (rows[4], rows[-4])
    rate = (last["step"] - first["step"]) / (last["wall_time"] - first["wall_time"])
    if what == "replicas":
        print(f"{replicas} replicas: {1024 * rate:.0f} rollouts/s")
        return
    lags = [row["loop_lag_p99"] for row in rows[10:-5] if "loop_lag_p99" in row]
    median, high, worst = np.quantile(lags, [0.5, 0.95, 1.0])
    print(f"{64 * 8000 * rate:.0f} tokens/s; loop_lag_p99 {median:.4f} s, 95% {high:.4f}, worst {worst:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("replicas", "records"))
    parser.add_argument("replicas", type=int)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    measure(options.what, options.replicas, options.steps)
