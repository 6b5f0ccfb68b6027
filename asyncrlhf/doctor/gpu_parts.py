"""Measurements of ``asyncrlhf doctor --gpu`` other than whole runs: each is a separate process that prints a JSON
object.

``python -m asyncrlhf.doctor.gpu_parts`` with ``step SHAPE DEVICE TOKENS SEQUENCES``, ``compiled`` with the same,
``generate SHAPE DEVICE SLOTS LENGTH``, ``sleep`` with the same, ``broadcast DEVICES BYTES`` or
``model SHAPE FOLDER DEVICE``.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from asyncrlhf.doctor import kernels
from asyncrlhf.types import Rollout

if TYPE_CHECKING:
    import transformers

    from asyncrlhf.engines.hf.hf_engine import HFEngine

REPEATS = 5
JOIN_SECONDS = 60.0


def write_model(shape: str, folder: Path, device: str) -> dict[str, float]:
    """A bfloat16 checkpoint of random weights with the packaged tokenizer: nothing is downloaded."""
    from asyncrlhf.data.data_config import ModelConfig
    from asyncrlhf.models.checkpoint_folder import load_tokenizer

    model = _random_model(shape, device).bfloat16()
    model.save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)
    return {"parameters": model.num_parameters()}


def _random_model(shape: str, device: str) -> transformers.PreTrainedModel:
    """In float32. Random numbers of 1.5 billion weights take a CPU longer than a check may."""
    from asyncrlhf.bench.checkpoint import build

    with torch.device(device):
        return build(shape)


def matmul_flops(device: str) -> float:
    """FLOP/s of a plain bfloat16 matmul of square matrices: what this device reaches where nothing else is to do."""
    width = 8192 if device == "cuda" else 256
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * width**3 / _timed(lambda: left @ right, device, 20)


def step_flops(shape: str, lengths: Sequence[int]) -> float:
    """FLOPs of a learner's step over sequences of these lengths in tokens."""
    from asyncrlhf.bench.checkpoint import SHAPES
    from asyncrlhf.planner.costs import train_flops
    from asyncrlhf.planner.shapes import ModelShape

    hidden, layers, intermediate, heads, pairs, vocabulary = SHAPES[shape]
    return train_flops(
        ModelShape(layers, hidden, intermediate, vocabulary, heads, pairs, hidden // heads, tied=True), lengths
    )


def step(shape: str, device: str, tokens: int, sequences: int, compiled: bool = False) -> dict[str, Any]:
    """Median seconds of a learner's step in bfloat16 on packed sequences of ``tokens`` in total, its FLOP/s, their
    share of a plain matmul's, the peak of memory in bytes, the step's kernels, and the seconds of the first step,
    which compiles them with ``compiled``."""
    from asyncrlhf.bench.checkpoint import batch
    from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
    from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
    from asyncrlhf.learner.torch_backend import TorchBackend

    most = matmul_flops(device)
    config = LearnerConfig(mixed_precision="bfloat16", token_budget=tokens, compile=compiled)
    spec = BackendSpec(learner=config, algorithm=AlgorithmConfig(), steps=10**6)
    learner = TorchBackend(_random_model(shape, device), spec, device=device)
    given = batch(shape, tokens, sequences)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    learner.train_step(given)  # whose result the host waits for
    first = time.perf_counter() - started
    seconds = _timed(lambda: learner.train_step(given), device)
    flops = step_flops(shape, [max(2, tokens // sequences)] * sequences) / seconds
    return {
        "seconds": seconds, "first_seconds": first, "tokens_per_second": tokens / seconds, "flops": flops,
        "matmul_flops": most,
        "matmul_share": flops / most, "peak_bytes": _peak(device),
        "kernels": kernels.table(lambda: learner.train_step(given), device),
    }  # fmt: skip


def generate(shape: str, device: str, slots: int, length: int) -> dict[str, Any]:
    """Tokens per second of the hf engine in bfloat16: two requests for each slot, up to ``length`` tokens each."""
    engine = _engine(shape, device, slots)
    _sampled(engine, shape, slots, 4)  # warms up
    started = time.perf_counter()
    tokens = _sampled(engine, shape, 2 * slots, length)
    seconds = time.perf_counter() - started
    graphs = getattr(engine._passes, "graphs", None)
    return {
        "seconds": seconds, "tokens_per_second": tokens / seconds, "graphs": 0 if graphs is None else len(graphs),
        "peak_bytes": _peak(device),
    }  # fmt: skip


def sleep(shape: str, device: str, slots: int, length: int) -> dict[str, Any]:
    """Seconds of the hf engine's way to sleep and back amid its responses, and bytes in use on the device before and in
    its sleep. RuntimeError unless the weights return bit for bit and every response is completed."""
    engine = _engine(shape, device, slots)
    _submit(engine, shape, slots, length)
    for _ in range(length // 2):
        engine.step(0.0)
    before = {name: tensor.cpu().clone() for name, tensor in engine.parameters().items()}
    awake = _used(device)
    marks = [time.perf_counter()]
    engine.sleep()
    marks.append(time.perf_counter())
    asleep = _used(device)
    engine.wake()
    _wait(device)
    marks.append(time.perf_counter())
    if device == "cuda" and awake - asleep < sum(tensor.nbytes for tensor in before.values()):
        raise RuntimeError(f"the sleeping engine holds {asleep:,} of {awake:,} bytes of the device.")
    if not all(torch.equal(before[name], tensor.cpu()) for name, tensor in engine.parameters().items()):
        raise RuntimeError("the weights differ after the sleep.")
    _finish(engine, slots)
    return {
        "sleep_seconds": marks[1] - marks[0], "wake_seconds": marks[2] - marks[1], "awake_bytes": awake,
        "asleep_bytes": asleep,
    }  # fmt: skip


def _engine(shape: str, device: str, slots: int) -> HFEngine:
    from asyncrlhf.engines.hf.hf_engine import HFEngine

    return HFEngine(_random_model(shape, device).bfloat16(), slots=slots, offloads=True)


def _submit(engine: HFEngine, shape: str, count: int, length: int) -> None:
    """Requests of ``length`` new tokens after a prompt of 64, in groups of 8."""
    from asyncrlhf.bench.checkpoint import SHAPES
    from asyncrlhf.types import GenerationRequest, Prompt, SamplingParams

    rng, sampling = np.random.default_rng(0), SamplingParams(max_completion_length=length)
    prompts = [Prompt(f"{i}", "", rng.integers(SHAPES[shape][-1], size=64)) for i in range(-(-count // 8))]
    engine.submit([GenerationRequest(i, i // 8, prompts[i // 8], i, sampling) for i in range(count)])


def _finish(engine: HFEngine, count: int) -> int:
    """The tokens of the ``count`` responses in flight; RuntimeError if not all are completed."""
    done: list[Any] = []
    while engine.in_flight():
        done += engine.step(0.0).finished
    responses = [rollout for rollout in done if isinstance(rollout, Rollout)]
    if len(responses) != count:
        raise RuntimeError(f"{len(responses)} of {count} responses were completed.")
    return sum(len(rollout.response_ids) for rollout in responses)


def _sampled(engine: HFEngine, shape: str, count: int, length: int) -> int:
    _submit(engine, shape, count, length)
    return _finish(engine, count)


def _used(device: str) -> int:
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def broadcast(devices: str, size: int) -> dict[str, Any]:
    """Bytes per second of one raw broadcast from one rank to another: NCCL on two GPUs, gloo on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", __name__ if __name__ != "__main__" else "asyncrlhf.doctor.gpu_parts"]
    other = subprocess.Popen([*command, "rank", devices, str(size), "1", str(port)], env=dict(os.environ))
    try:
        seconds = _rank(devices, size, 0, port)
    finally:
        other.kill()
        other.wait()
    return {"bytes_per_second": size / seconds}


def _rank(devices: str, size: int, rank: int, port: int) -> float:
    device = torch.device("cuda", rank) if devices == "cuda" else torch.device("cpu")
    if devices == "cuda":
        torch.cuda.set_device(device)
    kind, limit = ("nccl" if devices == "cuda" else "gloo"), timedelta(seconds=JOIN_SECONDS)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(kind, init_method=address, rank=rank, world_size=2, timeout=limit)
    flat = torch.zeros(size, dtype=torch.uint8, device=device)

    def once() -> None:
        dist.broadcast(flat, 0)
        dist.barrier()

    return _timed(once, devices)


def _timed(action: Callable[[], object], device: str, repeats: int = REPEATS) -> float:
    """Median seconds of the calls, after two that warm up."""
    seconds = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        action()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def main(words: list[str]) -> None:
    kind, *rest = words
    if kind == "rank":
        _rank(rest[0], int(rest[1]), int(rest[2]), int(rest[3]))
        return
    if kind == "model":
        found = write_model(rest[0], Path(rest[1]), rest[2])
    elif kind == "broadcast":
        found = broadcast(rest[0], int(rest[1]))
    elif kind == "compiled":
        found = step(rest[0], rest[1], int(rest[2]), int(rest[3]), compiled=True)
    else:
        calls: dict[str, Callable[..., dict[str, Any]]] = {"step": step, "generate": generate, "sleep": sleep}
        found = calls[kind](rest[0], rest[1], int(rest[2]), int(rest[3]))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
