"""How many numbers of a model differ between two versions: one CSV row for each run, version, format and layer.

python -m experiments.38_sparse_versions.sparsity tiny      # the default run's learner, real rollouts, 3 seeds
python -m experiments.38_sparse_versions.sparsity smollm2   # SmolLM2-135M itself on reasoning-gym, 3 seeds
python -m experiments.38_sparse_versions.sparsity 135m      # SmolLM2-135M's shape, random weights, random texts
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrlhf.bench.checkpoint import batch, build
from asyncrlhf.config.compose import load_config
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from asyncrlhf.transport.build_transport import build_sender
from asyncrlhf.transport.protocol import TransferStats
from asyncrlhf.transport.weights_config import WeightsConfig
from experiments.study import append

HERE = Path(__file__).absolute().parent
RATES = (1e-6, 5e-6, 1e-5, 1e-4)
FORMATS = ("bfloat16", "float32")
COLUMNS = ["model", "task", "seed", "learning_rate", "format", "step", "layer", "changed", "bytes_share"]
STEPS, TOKENS = 10, 512
# Of a real run in the local runtime: its settings, its formats, and every which version is a row.
RUNS = {
    "tiny": (["steps=50", "weights.bucket_mb=0.25"], FORMATS, 10),
    "smollm2": (["experiment=smollm2_reasoning", "steps=10", "learner.lr_schedule=constant"], FORMATS[:1], 1),
}


def of_runs(model: str) -> Iterator[dict[str, Any]]:
    """Versions of real runs, three seeds at each rate."""
    settings, formats, every = RUNS[model]
    for seed in range(3):
        for rate in RATES:
            for number_format in formats:
                with tempfile.TemporaryDirectory() as folder:
                    train(
                        load_config(
                            [
                                *settings, "runtime=local", f"seed={seed}", f"learner.learning_rate={rate}",
                                f"weights.dtype={number_format}", "weights.delta=sparse", "weights.audit_every=0",
                                f"run_dir={folder}/run", "logging=quiet", "eval_every=0",
                            ]
                        )
                    )  # fmt: skip
                    rows = read_metrics(Path(folder) / "run" / METRICS_FILE)
                whole = rows[0]["weights_sent_bytes"]
                fixed = {"model": model, "task": "rl", "seed": seed, "learning_rate": rate, "format": number_format}
                for row in rows[1::every]:
                    sent = {"step": row["step"], "bytes_share": row["weights_sent_bytes"] / whole}
                    yield fixed | sent | {"layer": "all", "changed": row["weights_changed_fraction"]}
                    for name, value in row.items():
                        if name.startswith("weights_changed/"):
                            yield fixed | sent | {"layer": name.partition("/")[2], "changed": value}


def large() -> Iterator[dict[str, Any]]:
    """Steps of the learner (``rl``: rewards of a coin) and of a cross-entropy with the same AdamW (``sft``)."""
    for task in ("rl", "sft"):
        for rate in RATES:
            model = build("135m")
            config = LearnerConfig(learning_rate=rate, token_budget=TOKENS)
            learner = TorchBackend(model, BackendSpec(learner=config, algorithm=AlgorithmConfig(), steps=10**6))
            senders = {
                f: build_sender(
                    WeightsConfig(transport="local", dtype=f, delta="sparse"), "local", learner.parameters()
                )
                for f in FORMATS
            }
            for step in range(STEPS + 1):
                if step and task == "rl":
                    learner.train_step(other_texts(step))
                elif step:
                    supervised(learner, step)
                for number_format, sender in senders.items():
                    sender.snapshot(step, learner.parameters())
                    stats = sender.transfer(sender.ticket())
                    fixed = {"model": "135m", "task": task, "seed": 0, "learning_rate": rate}
                    fixed |= {"format": number_format, "step": step}
                    if step:
                        yield from rows_of(stats, fixed, sender.manifest.total_bytes)
            for sender in senders.values():
                sender.close()


def other_texts(step: int) -> Any:
    """The batch of a step: other tokens and rewards each time."""
    given, rng = batch("135m", TOKENS, 8), np.random.default_rng(step)
    return type(given)(**{**vars(given), "token_ids": rng.integers(49152, size=given.token_ids.shape)})


def supervised(learner: TorchBackend, step: int) -> None:
    learner.updater.begin()
    facts = learner.policy(PackedInputs.of_batch(other_texts(step)), 1.0)
    learner.updater.backward(learner.updater.policy, -facts.logprobs.mean())
    learner.updater.set_rate(1.0)
    learner.updater.apply()


def rows_of(stats: TransferStats, fixed: dict[str, Any], whole: int) -> Iterator[dict[str, Any]]:
    sent = {"bytes_share": stats.bytes / whole}
    changed, words = (sum(column) for column in zip(*stats.changed.values(), strict=True))
    yield fixed | sent | {"layer": "all", "changed": changed / words}
    for layer, (some, every) in stats.changed.items():
        yield fixed | sent | {"layer": layer, "changed": some / every}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=(*RUNS, "135m"))
    model = parser.parse_args().model
    torch.set_num_threads(2)
    for row in of_runs(model) if model in RUNS else large():
        append(HERE / f"{model}.csv", [row], COLUMNS)
        if row["layer"] == "all" and row["step"] in (1, 2, 10, 32):
            print(*(row[name] for name in COLUMNS), flush=True)


if __name__ == "__main__":
    main()
