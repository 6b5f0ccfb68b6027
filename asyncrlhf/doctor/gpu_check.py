"""``asyncrlhf doctor --gpu``: ten minutes of runs on this machine's GPUs measure what no test on a CPU can prove.

Each check is a separate process with a time limit, with random weights and without a download. The figures of a run
come from its records.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.read.verify import verify
from asyncrlhf.records.show.summary import environment
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.validation import typed_path

LIMIT_SECONDS = 240.0  # of one check
BROADCAST_BYTES = 2**28
STEPS = 8
State = Literal["passed", "failed", "not run"]
# Of all runs: learner and generator on separate GPUs, weights by NCCL, an audit of them in every third step.
RUN = (
    f"steps={STEPS}", "batch_size=64", "num_generations=8", "generator.max_completion_length=128",
    "generator.engine=vllm", "generator.slots=64", "generator.gpus=1", "generator.vllm.max_model_len=512",
    "learner.gpus=1", "learner.mixed_precision=bfloat16", "model.dtype=bfloat16", "learner.token_budget=16384",
    "logging=quiet", "reward.kind=python", "reward.target=asyncrlhf.bench.measure:coin", "task.heldout_size=8",
    "eval_every=0", "weights.audit_every=3", "generator.vllm.engine_kwargs={enforce_eager:true}",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """``cards``: GPUs that it needs. ``words``: of :mod:`asyncrlhf.doctor.gpu_parts`, else overrides of a run."""

    name: str
    proves: str
    cards: int
    shape: str = "135m"
    overrides: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """``figures``: by name, in seconds, bytes and tokens. ``sentence``: why it failed or was not run."""

    name: str
    proves: str
    state: State
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    sentence: str = ""


FLATTEN = ("cluster=flatten",)
IPC = (*FLATTEN, "weights.transport=cuda_ipc", "generator.vllm.sleep_level=2")
ONE_GPU = ("cluster=one_gpu", "learner.gpus=0.5", "generator.gpus=0.5", "async=async")
TENSOR_PARALLEL = ("generator.vllm.tensor_parallel_size=2", "generator.gpus=2")
CHECKS = (
    Check("step", "the learner's step on packed sequences", 1, words=("step", "135m", "cuda", "16384")),
    Check("step 1.5b", "the same at 1.5 billion parameters", 1, words=("step", "1.5b", "cuda", "16384")),
    Check("flatten", "learner and vLLM in turns on one GPU, each asleep in between", 1, overrides=FLATTEN),
    Check("flatten ipc", "the same by CUDA IPC, vLLM without weights in its sleep", 1, overrides=IPC),
    Check("one gpu", "both at once on one GPU, weights by CUDA IPC", 1, overrides=ONE_GPU),
    Check("broadcast", "NCCL between two GPUs", 2, words=("broadcast", "cuda", str(BROADCAST_BYTES))),
    Check("sync", "the loop in turns, with NCCL", 2, overrides=("async=sync",)),
    Check("async", "both sides at once, with NCCL", 2, overrides=("async=async",)),
    Check("async 1.5b", "the same at 1.5 billion parameters", 2, "1.5b", ("async=async",)),
    Check("tensor parallel", "weights into a replica of two GPUs", 3, overrides=TENSOR_PARALLEL),
    Check("fsdp2", "two ranks with sharded weights", 3, overrides=("learner=fsdp2",)),
    Check("zero3", "DeepSpeed's stage 3 on two ranks", 3, overrides=("learner=zero3",)),
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Print each check's sentence, write ``gpu_check.json`` (or ``--out FILE``), and return 1 if one failed.

    Raises ConfigError on a machine without a GPU.
    """
    import torch

    out = output_file(arguments)
    cards = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    if not cards:
        raise ConfigError(
            "asyncrlhf doctor --gpu measures GPUs, and torch finds none on this machine; `asyncrlhf doctor` without "
            "--gpu says why, and looks at all else."
        )
    results = examine(CHECKS, len(cards), RUN)
    facts = {"format": 1, "cards": cards, "environment": environment("vllm", "deepspeed"), "torch": torch.__version__}
    out.write_text(json.dumps({**facts, "checks": [asdict(result) for result in results]}, indent=2) + "\n")
    for sentence in conclusions(results):
        print(sentence)
    print(f"Figures: {out}")
    return int(any(result.state == "failed" for result in results))


def output_file(arguments: Sequence[str]) -> Path:
    """The file for the figures, from the command's options."""
    parser = argparse.ArgumentParser(prog="asyncrlhf doctor --gpu", description=__doc__)
    parser.add_argument("--out", type=typed_path, default=Path("gpu_check.json"), help="where the figures go, as JSON")
    found: Path = parser.parse_args([word for word in arguments if word != "--gpu"]).out
    return found


def examine(
    checks: Sequence[Check], cards: int, common: Sequence[str], limit: float = LIMIT_SECONDS,
    tell: Callable[[str], None] = print,
) -> list[Result]:  # fmt: skip
    """Every check's result, one check after another; ``common`` are overrides of every run."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="asyncrlhf-gpu-") as name:
        folder = Path(name)
        for check in checks:
            if check.cards > cards:
                why = f"needs {check.cards} GPUs; this machine has {cards}."
                results.append(Result(check.name, check.proves, "not run", sentence=why))
            else:
                results.append(_measured(check, folder, common, limit))
            tell(_line(results[-1]))
    return results


def _measured(check: Check, folder: Path, common: Sequence[str], limit: float) -> Result:
    started = time.monotonic()
    parts, run_dir = [sys.executable, "-m", "asyncrlhf.doctor.gpu_parts"], folder / check.name
    model = folder / f"model-{check.shape}"
    try:
        if not check.words and not model.is_dir():
            _output([*parts, "model", check.shape, str(model)], limit)
        own = (f"model.path={model}", f"run_dir={run_dir}")
        train = [sys.executable, "-m", "asyncrlhf", "train", *common, *own, *check.overrides]
        said = _output([*parts, *check.words] if check.words else train, limit)
        figures = json.loads(said.splitlines()[-1]) if check.words else figures_of(run_dir)
    except (RuntimeError, ConfigError, OSError, ValueError) as error:
        return Result(check.name, check.proves, "failed", time.monotonic() - started, sentence=str(error))
    return Result(check.name, check.proves, "passed", time.monotonic() - started, figures)


def _output(command: Sequence[str], limit: float) -> str:
    """The process's output; RuntimeError with its last lines if it fails or takes more than ``limit`` seconds."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ), start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # a run ends in order, and its actors with it
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise RuntimeError(f"did not end within {limit:g} s.") from None
    if process.returncode:
        words = (errors.strip() or out.strip()).splitlines()
        raise RuntimeError(f"ended with exit code {process.returncode}: {words[-1] if words else 'no word'}")
    return out


def figures_of(run_dir: Path) -> dict[str, float]:
    """Medians over a run's steps after the second; RuntimeError if its records break a guarantee."""
    if broken := verify(run_dir):
        raise RuntimeError(f"the records do not hold: {broken[0]}")
    rows = read_metrics(run_dir / "metrics.jsonl")[2:]
    names = {
        "tokens_per_second": "tokens_per_second", "publish_seconds": "weight_sync_seconds",
        "snapshot_seconds": "snapshot_seconds", "train_seconds": "train_seconds", "idle": "learner_idle_fraction",
        "mismatch_kl": "mismatch_kl",
    }  # fmt: skip
    found = {name: [row[key] for row in rows if row.get(key) is not None] for name, key in names.items()}
    return {name: statistics.median(values) for name, values in found.items() if values}


def _line(result: Result) -> str:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
    return f"{result.state:8} {result.name:16} {result.seconds:5.0f} s  {figures or result.sentence}"


def conclusions(results: Sequence[Result]) -> list[str]:
    """Sentences that compare the figures."""
    found = {result.name: result.figures for result in results if result.state == "passed"}
    said = []
    for name in ("step", "step 1.5b"):
        if name in found:
            rate = found[name]["flops"] / 1e12
            said.append(f"{name}: {found[name]['tokens_per_second']:,.0f} tokens/s are {rate:.0f} TFLOP/s.")
    if {"sync", "async"} <= found.keys():
        ratio = found["async"]["tokens_per_second"] / found["sync"]["tokens_per_second"]
        said.append(f"async trains {ratio:.2f} times as many tokens a second as sync.")
    for name in ("async", "async 1.5b", "tensor parallel", "fsdp2", "zero3", "flatten", "flatten ipc", "one gpu"):
        if name in found and "publish_seconds" in found[name]:
            figures = found[name]
            stall = figures.get("snapshot_seconds", 0.0)
            said.append(
                f"{name}: a publish takes {figures['publish_seconds']:.3g} s, the learner stops for {stall:.3g} s."
            )
    counts = {state: sum(result.state == state for result in results) for state in ("passed", "failed", "not run")}
    said.append(", ".join(f"{count} {state}" for state, count in counts.items()) + ".")
    return said
