"""Tokens a CPU second of a learner step, of two checkouts in turn, and what attention and its padding take of it.

``python experiments/25_no_padding/bench.py --before CHECKOUT --model tiny --law short`` starts a process for each
checkout and one of the first whose attention does nothing, and lets them make a step each in turn. The share that
padding takes, and so the ceiling of what its absence can give, follow from the first and the last: attention's time is
that of its pairs of query and key, padded against needed.

Seconds are CPU seconds of the process, which runs one thread unless ``--threads`` says more: a machine that others
use as well changes them little. A process of its own (``--serve``) uses only what older checkouts have as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SIBLINGS = 4
MODELS = {
    "tiny": {
        "vocab_size": 19, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
    # SmolLM2-135M's shape; the weights are random
    "135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip
PROMPTS = {"short": 9, "log-normal": 32, "constant": 32, "one in ten is long": 32}  # tokens


def lengths(law: str, count: int) -> np.ndarray:
    """Tokens of each sequence, prompt and answer."""
    draws = np.random.default_rng(0)
    if law == "short":  # as in the default run
        return draws.integers(14, 26, count)
    if law == "log-normal":  # mean 300, coefficient of variation 1
        return np.exp(draws.normal(np.log(300) - np.log(2) / 2, np.log(2) ** 0.5, count)).clip(40, 1024).astype(int)
    return np.full(count, 512) if law == "constant" else np.where(np.arange(count) % 10 == 3, 1024, 64)


def batch(law: str, count: int, vocabulary: int) -> Any:
    """Groups of siblings with random tokens and rewards."""
    from asyncrlhf.data.packing import pack
    from asyncrlhf.types import Prompt, Rollout, TrainSample

    draws = np.random.default_rng(1)
    samples = []
    for index, tokens in enumerate(lengths(law, count).tolist()):
        if index % SIBLINGS == 0:
            prompt = Prompt(str(index), "", draws.integers(0, vocabulary, PROMPTS[law]))
        answer = tokens - PROMPTS[law]
        rollout = Rollout(
            rollout_id=index, group_id=index // SIBLINGS, prompt=prompt,
            response_ids=draws.integers(0, vocabulary, answer),
            behavior_logprobs=np.full(answer, -np.log(vocabulary), np.float32),
            policy_versions=np.zeros(answer, np.int64),
            finish_reason="stop", response_text="", generator_id="g0",
        )  # fmt: skip
        samples.append(TrainSample(rollout, float(draws.normal())))
    return pack(samples)


def serve(options: argparse.Namespace) -> None:
    """A step for each line that comes in; its CPU seconds go out."""
    import torch
    import transformers

    from asyncrlhf.learner.attention.attention import IMPLEMENTATION
    from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
    from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
    from asyncrlhf.learner.torch_backend import TorchBackend

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODELS[options.model]))
    config = LearnerConfig(learning_rate=1e-6, token_budget=options.budget)
    learner = TorchBackend(model, BackendSpec(learner=config, algorithm=AlgorithmConfig(), steps=1000))
    given = batch(options.law, options.sequences, MODELS[options.model]["vocab_size"])

    def nothing(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        group = query.shape[1] // value.shape[1]
        # All three get a gradient, so that what comes before attention is computed as with it.
        return (query + (key + value).repeat_interleave(group, 1)).transpose(1, 2), None

    if options.serve == "without":
        transformers.AttentionInterface.register(IMPLEMENTATION, nothing)
    learner.train_step(given)
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.process_time()
        loss = [learner.train_step(given).metrics["loss"] for _ in range(options.repeat)][-1]
        print(json.dumps({"seconds": (time.process_time() - started) / options.repeat, "loss": loss}), flush=True)


def needed(options: argparse.Namespace) -> tuple[float, float]:
    """(rows, pairs) of the sequences over those of [N, longest] in each microbatch, as the older checkout cuts them."""
    import torch

    from asyncrlhf.data.packing import sequence_lengths
    from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
    from asyncrlhf.learner.step.plan import plan_step

    given = batch(options.law, options.sequences, 19)
    plan = plan_step(given, AlgorithmConfig(), options.budget, torch.device("cpu"))
    tokens = sequence_lengths(plan.batch) - 1
    rows = pairs = grid = square = 0.0
    for microbatch in plan.microbatches:
        part = tokens[microbatch.sequences]
        own = microbatch.inputs.layout.position_ids.numpy()
        rows, pairs = rows + own.size, pairs + (own + 1).sum()
        grid, square = grid + len(part) * part.max(), square + len(part) * part.max() * (part.max() + 1) / 2
    return rows / grid, pairs / square


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of one step of each process, in turn."""
    checkouts = {"before": options.before, "after": ROOT, "without": options.before}
    command = [sys.executable, __file__, *sys.argv[1:]]
    processes = {
        name: subprocess.Popen(
            [*command, "--serve", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(root)},
        )
        for name, root in checkouts.items()
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in checkouts}
    losses: dict[str, float] = {}
    for process in processes.values():
        assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    for _ in range(options.rounds):
        for name, process in processes.items():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            found = json.loads(process.stdout.readline())
            seconds[name].append(found["seconds"])
            losses[name] = found["loss"]
    for process in processes.values():
        process.communicate()
    return summary(options, seconds, losses)


def summary(options: argparse.Namespace, seconds: dict[str, list[float]], losses: dict[str, float]) -> dict[str, Any]:
    before, after, without = (float(np.median(seconds[name])) for name in ("before", "after", "without"))
    rows, pairs = needed(options)
    ceiling = before / (without + (before - without) * pairs)
    ratios = np.array(seconds["before"]) / np.array(seconds["after"])
    tokens = int(lengths(options.law, options.sequences).sum())
    return {
        "model": options.model, "law": options.law, "sequences": options.sequences, "tokens": tokens,
        "threads": options.threads, "budget": options.budget,
        "grid_over_rows_before": 1 / rows, "pairs_over_needed_before": 1 / pairs,
        "attention_share_before": 1 - without / before, "ceiling": ceiling,
        "tokens_per_cpu_second": {"before": tokens / before, "after": tokens / after},
        "speedup": float(np.median(ratios)), "speedup_spread": [float(ratios.min()), float(ratios.max())],
        "of_the_ceiling": float(np.median(ratios)) / ceiling,
        "losses": losses, "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="an older checkout of the package")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--law", choices=PROMPTS, default="log-normal")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--budget", type=int, default=4096, help="learner.token_budget")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=1, help="steps of one process at a time")
    parser.add_argument("--out", type=Path, help="a file to which the row is appended")
    parser.add_argument("--serve", choices=("before", "after", "without"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    row = measure(options)
    print(json.dumps(row, indent=2))
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
