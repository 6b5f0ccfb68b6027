"""``asyncrlhf doctor --gpu``: minutes of checks on this machine's GPUs measure what no test on a CPU can prove.

Each check has random weights and needs no download. The figures of a run come from its records.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from asyncrlhf.doctor.check_runner import Check, Result, Runner
from asyncrlhf.doctor.probes import probe_import
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.show.summary import environment
from asyncrlhf.records.write.whole_files import write_atomically

QUICK_SECONDS = 175.0  # of --quick: three minutes, less the start of the command
COMPILED_SECONDS = 90.0  # of the one check that compiles
VLLM_SECONDS = 150.0  # of one check with vLLM, whose start alone may take a minute
BROADCAST_BYTES = 2**28
STEPS = 8
# Of all runs: an audit of the weights in every third step.
RUN = (
    f"steps={STEPS}", "batch_size=64", "num_generations=8", "generator.slots=64", "generator.gpus=1", "learner.gpus=1",
    "learner.mixed_precision=bfloat16", "model.dtype=bfloat16", "learner.token_budget=16384", "logging=quiet",
    "reward.kind=python", "reward.target=asyncrlhf.bench.measure:coin", "task.heldout_size=8", "eval_every=0",
    "generator.ignore_eos=true",  # random weights end a response after some 16 tokens
    "weights.audit_every=3",
)  # fmt: skip
HF = ("generator.engine=hf", "generator.max_completion_length=64")
SHARED = (*HF, "generator.gpus=0.5", "learner.gpus=0.5")
VLLM = (
    "generator.engine=vllm", "generator.max_completion_length=128", "generator.vllm.max_model_len=512",
    "generator.vllm.engine_kwargs={enforce_eager:true}",
)  # fmt: skip


def _step(shape: str, tokens: int, sequences: int, proves: str, quick: bool = False) -> Check:
    return Check(f"step {shape}", proves, 1, words=("step", shape, "cuda", f"{tokens}", f"{sequences}"), quick=quick)


def _model(shape: str, cards: int = 1, vllm: bool = False, quick: bool = False) -> Check:
    words = ("model", shape, f"{{folder}}/model-{shape}", "cuda")
    return Check(f"model {shape}", "the checkpoint of the runs", cards, words=words, vllm=vllm, quick=quick)


def _hf(name: str, proves: str, *overrides: str) -> Check:
    return Check(name, proves, 1, "20m", overrides, quick=True)


def _vllm(name: str, proves: str, cards: int, *overrides: str, shape: str = "135m") -> Check:
    return Check(name, proves, cards, shape, (*VLLM, *overrides), vllm=True, limit=VLLM_SECONDS)


CHECKS = (
    _step("135m", 16384, 8, "the learner's step on packed sequences, its kernels", quick=True),
    Check("hf engine", "the hf engine samples", 1, words=("generate", "135m", "cuda", "64", "128"), quick=True),
    Check("hf sleep", "the hf engine asleep and back", 1, words=("sleep", "135m", "cuda", "64", "128"), quick=True),
    _model("20m", quick=True),
    _hf("hf sync", "the loop in turns on one GPU", *SHARED, "async=sync"),
    _hf("hf async", "both sides at once on one GPU", *SHARED, "async=async"),
    _hf("hf one gpu", "the same by CUDA IPC", *SHARED, "cluster=one_gpu", "async=async"),
    _hf("hf flatten", "learner and hf engine in turns on one GPU, each asleep in between", *HF, "cluster=flatten"),
    Check(
        "step 135m compiled", "the same step with learner.compile=true", 1,
        words=("compiled", "135m", "cuda", "16384", "8"), limit=COMPILED_SECONDS,
    ),
    _step("0.7m", 16384, 128, "the same step where kernels are too small for the GPU"),
    _step("1.5b", 8192, 8, "the same step at 1.5 billion parameters"),
    _model("135m", vllm=True),
    _vllm("flatten", "learner and vLLM in turns on one GPU, each asleep in between", 1, "cluster=flatten"),
    _vllm(
        "flatten ipc", "the same by CUDA IPC, vLLM without weights in its sleep", 1, "cluster=flatten",
        "weights.transport=cuda_ipc", "generator.vllm.sleep_level=2",
    ),
    _vllm(
        "one gpu", "both at once on one GPU, weights by CUDA IPC", 1, "cluster=one_gpu", "learner.gpus=0.5",
        "generator.gpus=0.5", "async=async",
    ),
    Check("broadcast", "NCCL between two GPUs", 2, words=("broadcast", "cuda", str(BROADCAST_BYTES))),
    _vllm("sync", "the loop in turns, with NCCL", 2, "async=sync"),
    _vllm("async", "both sides at once, with NCCL", 2, "async=async"),
    _model("1.5b", cards=2, vllm=True),
    _vllm("async 1.5b", "the same at 1.5 billion parameters", 2, "async=async", shape="1.5b"),
    _vllm(
        "tensor parallel", "weights into a replica of two GPUs", 3, "generator.vllm.tensor_parallel_size=2",
        "generator.gpus=2",
    ),
    _vllm("fsdp2", "two ranks with sharded weights", 3, "learner=fsdp2"),
    _vllm("zero3", "DeepSpeed's stage 3 on two ranks", 3, "learner=zero3"),
)  # fmt: skip


def run(out: Path, quick: bool) -> int:
    """Print a line for each check and what follows from their figures, and write them to ``out`` after each check, so
    that an interrupted command leaves those that it made. Returns 1 if a check failed. ``quick``: only some of the
    checks, in at most three minutes.

    Raises ConfigError on a machine without a GPU, and for a file that cannot be written, before the first check.
    """
    ends = time.monotonic() + QUICK_SECONDS if quick else math.inf
    import torch

    found = torch.cuda.is_available()
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if found else []
    if not cards:
        raise ConfigError(
            "asyncrlhf doctor --gpu measures GPUs, and torch finds none on this machine; `asyncrlhf doctor` without "
            "--gpu says why, and looks at all else."
        )
    facts = {
        "format": 2, "cards": cards, "environment": environment("vllm", "deepspeed"), "torch": torch.__version__,
        "quick": quick, "planned": len(CHECKS),
    }  # fmt: skip

    def keep(results: Sequence[Result]) -> None:
        checks = [asdict(result) for result in results]
        write_atomically(out, json.dumps({**facts, "checks": checks}, indent=2) + "\n")

    if out.exists() and not out.is_file():
        raise ConfigError(f"--out {out} is not a file; give the name of a file that may be written.")
    try:
        keep([])
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}.") from error
    missing = "" if quick else no_vllm()
    reasons = {check.name: left_out(check, len(cards), missing, quick) for check in CHECKS}
    results = Runner(RUN, lambda check: reasons[check.name], ends, keep=keep).run(CHECKS)
    for sentence in conclusions(results):
        print(sentence)
    print(f"Figures: {out}")
    return int(any(result.state == "failed" for result in results))


def left_out(check: Check, cards: int, missing: str, quick: bool) -> str:
    """Why a machine with so many ``cards`` does not run the check; nothing if it does. ``missing``: of vLLM."""
    if check.cards > cards:
        return f"needs {check.cards} GPUs; this machine has {cards}."
    if quick and not check.quick:
        return "left out by --quick."
    return f"needs vLLM: {missing}." if check.vllm and missing else ""


def no_vllm() -> str:
    """Why vLLM cannot work on a GPU here; nothing if it can."""
    answer = probe_import("vllm")
    if "error" in answer:
        return str(answer["error"])
    return "" if answer["device"] == "cuda" else f"{answer['installed']} is a build for the {answer['device']}"


def conclusions(results: Sequence[Result]) -> list[str]:
    """Sentences that compare the figures."""
    passed = [result for result in results if result.state == "passed"]
    found = {result.name: result.figures for result in passed}
    said = []
    for result in passed:
        said += _of_step(result) if "matmul_share" in result.figures else []
    for prefix in ("hf ", ""):
        if {f"{prefix}sync", f"{prefix}async"} <= found.keys():
            ratio = found[f"{prefix}async"]["tokens_per_second"] / found[f"{prefix}sync"]["tokens_per_second"]
            said.append(f"{prefix}async trains {ratio:.2f} times as many tokens a second as {prefix}sync.")
    for name, figures in found.items():
        if "publish_seconds" in figures:
            stall = figures.get("snapshot_seconds", 0.0)
            said.append(
                f"{name}: a publish takes {figures['publish_seconds']:.3g} s, the learner stops for {stall:.3g} s."
            )
    counts = {state: sum(result.state == state for result in results) for state in ("passed", "failed", "not run")}
    said.append(", ".join(f"{count} {state}" for state, count in counts.items()) + ".")
    return said


def _of_step(result: Result) -> list[str]:
    """Its rates, and what the device does meanwhile."""
    figures, kernels = result.figures, result.kernels
    said = [
        f"{result.name}: {figures['tokens_per_second']:,.0f} tokens/s are {figures['flops'] / 1e12:.3g} TFLOP/s, "
        f"{figures['matmul_share']:.1%} of the {figures['matmul_flops'] / 1e12:.3g} TFLOP/s of a plain matmul; "
        f"peak {figures['peak_bytes'] / 1e9:.3g} GB."
    ]
    if not kernels:
        return [*said, f"{result.name}: the profiler saw no kernel."]
    busy = kernels["seconds"] / figures["seconds"]
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in kernels["kinds"].items())
    said.append(f"{result.name}: kernels take {busy:.0%} of the step's time. Their kinds: {kinds}. The longest:")
    return [*said, *(f"  {row['share']:6.1%}  {row['kind']:11}  {row['name']}" for row in kernels["longest"])]
