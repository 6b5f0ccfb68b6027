"""A checkpoint's cost: the learner's stall against a memcpy of its bytes, steps while it is written, the loop's lag."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrlhf.bench.measure import show, spread, tell, write
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.packing import pack
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.types import Prompt, Rollout, TrainBatch, TrainSample
from asyncrlhf.validation import typed_path

# hidden, layers, intermediate, heads, key-value heads, vocabulary; the first two with SmolLM2's ratios.
SHAPES = {
    "1.5b": (1536, 28, 8960, 12, 2, 151936),  # Qwen2.5-1.5B's, as a Llama
    "135m": (576, 30, 1536, 9, 3, 49152),  # SmolLM2-135M's
    "20m": (256, 12, 768, 4, 2, 32768),
    "2m": (128, 4, 384, 4, 2, 4096),
    "0.7m": (128, 4, 256, 4, 4, 19),  # the packaged model's
}
CPU = ", CPU"  # of figures in CPU seconds of the learner
EVERY = 4  # steps between two checkpoints of the whole run


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """A model of random weights with its optimizer's states. ``--repeats`` rounds, after one that warms up, of: a step,
    the learner's stall for a checkpoint, steps while it is written, a memcpy of its bytes. Then one run on Ray of
    ``--steps`` steps with a checkpoint every fourth, where the event loop's lag is that of ``metrics.jsonl``. Other
    arguments are overrides of that run."""
    parser = argparse.ArgumentParser(prog="asyncrlhf bench checkpoint", description=__doc__)
    parser.add_argument("--shape", default="135m", choices=[*SHAPES], help="the model: 135m, 20m or 2m parameters")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=16, help="of the run on Ray; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=1, help="of the learner")
    parser.add_argument("--out", type=typed_path, default=None)
    options, overrides = parser.parse_known_args(list(arguments))
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        result = measure(options.shape, options.repeats, options.tokens, Path(folder))
        if options.steps:
            result["run"] = whole_run(options.shape, options.steps, options.threads, overrides, Path(folder))
    return write({**result, "shape": options.shape, "threads": options.threads, "overrides": overrides}, options.out)


def measure(shape: str, repeats: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Seconds and ratios of ``repeats`` rounds in this process."""
    spec = BackendSpec(learner=LearnerConfig(), algorithm=AlgorithmConfig(), steps=10**6)
    learner, given = TorchBackend(build(shape), spec), batch(shape, tokens)
    learner.train_step(given)  # the optimizer has its states
    learner.make_room()
    learner.writer.end()
    source = target = torch.empty(0, dtype=torch.uint8)
    names = ("memcpy", "stall", "step", "step while writing")
    seconds: dict[str, list[float]] = {"written": [], **{name + of: [] for name in names for of in ("", CPU)}}
    first, step = 0.0, partial(learner.train_step, given)
    for number in range(repeats + 1):
        tell(number, repeats)
        plain = timed(step)
        started = time.perf_counter()
        stall = timed(partial(learner.begin_save, folder / f"{number % 2}"))
        beside = []
        while not learner.writer.idle:
            beside.append(timed(step))
        seals = learner.writer.end()
        written = time.perf_counter() - started
        if not number:
            first, total = stall[0], sum(facts["bytes"] for facts in seals.values())
            source, target = (torch.ones(total, dtype=torch.uint8) for _ in range(2))
            continue
        copied = timed(partial(target.copy_, source))
        seconds["written"].append(written)
        measured: list[Sequence[float]] = [copied, stall, plain, np.mean(beside or [plain], axis=0).tolist()]
        for name, pair in zip(names, measured, strict=True):
            for of, value in zip(("", CPU), pair, strict=True):
                seconds[name + of].append(value)
    compared = [(a + of, b + of) for a, b in (("stall", "memcpy"), ("step while writing", "step")) for of in ("", CPU)]
    ratios = {f"{a} / {b}": [x / y for x, y in zip(seconds[a], seconds[b], strict=True)] for a, b in compared}
    rows = {name: spread(values) for name, values in seconds.items()}
    show(f"A checkpoint of {len(source) / 2**20:.0f} MiB; the first one's stall is {first:.3g} s", rows, "s")
    show("Ratios, each of one round", shown := {name: spread(values) for name, values in ratios.items()}, "")
    return {"bytes": len(source), "first_stall": first, "seconds": rows, "ratios": shown}


def whole_run(shape: str, steps: int, threads: int, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Seconds of the steps that begin as a checkpoint is taken and of the others, and the loop's largest lags."""
    model = build(shape)
    model.save_pretrained(folder / "model")
    tokenizer = load_tokenizer(ModelConfig())
    tokenizer.save_pretrained(folder / "model")
    settings = [
        f"run_dir={folder}/run", f"model.path={folder}/model", f"steps={steps}", f"checkpoint.every={EVERY}",
        f"learner.threads={threads}", "generator.engine=fake", "logging=quiet", "eval_every=0", "task.heldout_size=8",
        "weights.audit_every=0", "checkpoint.keep=1",
    ]  # fmt: skip
    train(load_config([*settings, *overrides]))
    rows = read_metrics(folder / "run" / "metrics.jsonl")[EVERY:]
    after = [row["train_seconds"] for row in rows if row["step"] % EVERY == 1]
    others = [row["train_seconds"] for row in rows if row["step"] % EVERY != 1]
    found = {
        "step after a checkpoint": spread(after),
        "other step": spread(others),
        "event loop's lag, 99th percentile of a step": spread([row["loop_lag_p99"] for row in rows]),
    }
    show("The run on Ray", found, "s")
    return found


def build(shape: str) -> LlamaForCausalLM:
    hidden, layers, intermediate, heads, pairs, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=intermediate, num_attention_heads=heads,
        num_key_value_heads=pairs, vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(shape: str, tokens: int, size: int = 8) -> TrainBatch:
    """One group with rewards that have spread."""
    rng, length = np.random.default_rng(0), max(2, tokens // size)
    samples = []
    for i in range(size):
        prompt = Prompt("p", "", rng.integers(SHAPES[shape][-1], size=length // 2))
        answer = rng.integers(SHAPES[shape][-1], size=length - length // 2)
        logprobs, versions = np.full(len(answer), -1.0, np.float32), np.zeros(len(answer), np.int64)
        samples.append(TrainSample(Rollout(i, 0, prompt, answer, logprobs, versions, "stop"), reward=float(i % 2)))
    return pack(samples)


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and this thread's CPU seconds, which a busy machine's noise affects less."""
    started, computed = time.perf_counter(), time.thread_time()
    action()
    return time.perf_counter() - started, time.thread_time() - computed
