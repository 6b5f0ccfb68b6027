"""Measurements of ``asyncrlhf doctor --gpu`` other than whole runs: each is a separate process that prints a JSON
object.

``python -m asyncrlhf.doctor.gpu_parts`` with ``step SHAPE DEVICE TOKENS``, ``broadcast DEVICES BYTES`` or
``model SHAPE FOLDER``, which prints nothing.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

REPEATS = 5
JOIN_SECONDS = 60.0


def write_model(shape: str, folder: Path) -> None:
    """A bfloat16 checkpoint of random weights with the packaged tokenizer: nothing is downloaded."""
    from asyncrlhf.bench.checkpoint import build
    from asyncrlhf.data.data_config import ModelConfig
    from asyncrlhf.models.checkpoint_folder import load_tokenizer

    build(shape).bfloat16().save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)


def step(shape: str, device: str, tokens: int) -> dict[str, Any]:
    """Median seconds of a learner's step in bfloat16 on 8 packed sequences of ``tokens`` in total, and its FLOP/s."""
    from asyncrlhf.bench.checkpoint import batch, build
    from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
    from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
    from asyncrlhf.learner.torch_backend import TorchBackend
    from asyncrlhf.planner.costs import train_flops
    from asyncrlhf.planner.shapes import ModelShape

    model = build(shape)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        flops = train_flops(ModelShape.from_config(Path(folder)), [max(2, tokens // 8)] * 8)
    config = LearnerConfig(mixed_precision="bfloat16", token_budget=tokens)
    learner = TorchBackend(model, BackendSpec(learner=config, algorithm=AlgorithmConfig(), steps=10**6), device=device)
    given = batch(shape, tokens)
    seconds = _timed(lambda: learner.train_step(given), device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "flops": flops / seconds, "peak_bytes": peak}


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


def _timed(action: Callable[[], object], device: str) -> float:
    """Median seconds of REPEATS calls, after two that warm up."""
    seconds = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def main(words: list[str]) -> None:
    kind, *rest = words
    if kind == "step":
        print(json.dumps(step(rest[0], rest[1], int(rest[2]))), flush=True)
    elif kind == "model":
        write_model(rest[0], Path(rest[1]))
    elif kind == "broadcast":
        print(json.dumps(broadcast(rest[0], int(rest[1]))), flush=True)
    else:
        _rank(rest[0], int(rest[1]), int(rest[2]), int(rest[3]))


if __name__ == "__main__":
    main(sys.argv[1:])
