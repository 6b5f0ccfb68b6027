"""Runs learner ranks as processes of their own, and the batches and curves that they are compared by."""

from __future__ import annotations

import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.packing import select
from asyncrlhf.learner.ranks import init_process_group
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.types import TrainBatch
from tests.numeric import assert_close
from tests.processes import forked
from tests.unit.learner.worlds import random_batch, share

TIME_LIMIT = 240.0
STEPS = 10
# A small budget gives the ranks different numbers of microbatches, which hold different numbers of tokens.
COMMON = {"learning_rate": 3e-4, "token_budget": 30, "lr_schedule": "cosine"}


def tiny() -> PreTrainedModel:
    """The packaged checkpoint: a Llama of 0.7 M parameters with tied embeddings."""
    return load_model(ModelConfig(), dtype=torch.float32)


def batches(steps: int = STEPS) -> list[TrainBatch]:
    """Balanced groups; one group, so that a rank has none; uneven groups; in the eighth nothing but flat groups."""
    made = []
    for seed in range(steps):
        if seed % 4 == 1:
            made.append(random_batch(1, 4, seed=seed))
        elif seed % 4 == 2:
            made.append(select(random_batch(5, 3, seed=seed), range(9)))
        else:
            made.append(random_batch(4, 3, seed=seed, flat_groups=4 if seed == 7 else 0))
    return made


def build(rank: int = 0, ranks: int = 1, algorithm: AlgorithmConfig | None = None, **learner: Any) -> TorchBackend:
    config = LearnerConfig(ranks=ranks, **(COMMON | learner))
    spec = BackendSpec(learner=config, algorithm=algorithm or AlgorithmConfig(), steps=STEPS)
    reference = tiny() if spec.algorithm.needs_reference else None
    return TorchBackend(tiny(), spec, reference=reference, rank=rank, ranks=ranks)


def curve(trained: TorchBackend, given: list[TrainBatch], rank: int = 0, ranks: int = 1) -> list[dict[str, float]]:
    size = ranks // trained.config.shares
    return [trained.train_step(share(batch, rank // size, ranks // size)).metrics for batch in given]


def assert_curve(
    found: list[dict[str, float]], expected: list[dict[str, float]], rtol: float = 1e-3, atol: float = 1e-4
) -> None:
    """All metrics of all steps; loss and entropy up to 1e-4 in any case."""
    for metrics, wanted in zip(found, expected, strict=True):
        assert_close(metrics, wanted, rtol=rtol, atol=atol)
        for key in ("loss", "entropy"):
            assert_close(metrics[key], wanted[key], atol=1e-4)


def weights(trained: TorchBackend) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy().copy() for name, tensor in trained.parameters().items()}


def skips(trained: TorchBackend, rank: int) -> bool:
    """Whether this rank of two drops an update that only the first rank's data breaks, and goes on afterwards."""
    before, broken = weights(trained), random_batch(4, 3)
    broken.rewards[:] = np.where(broken.group_ids == share(broken, 0, 2).group_ids[0], broken.rewards, np.nan)
    result = trained.train_step(share(broken, rank, 2))
    kept = all(np.array_equal(before[name], tensor) for name, tensor in weights(trained).items())
    going_on = not trained.train_step(share(random_batch(4, 3), rank, 2)).skipped
    return result.skipped and kept and result.metrics["skipped_updates"] == 1 and going_on


def run_ranks(job: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """``job(rank, *arguments)`` in ``ranks`` processes that form one gloo group; what each returned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = forked()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_one_rank, args=(send, rank, ranks, port, job, arguments), daemon=True)
        for rank, (_, send) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        for _, send in pipes:
            send.close()  # so that a rank that dies ends the wait for it
        found = []
        for rank, (receive, _) in enumerate(pipes):
            assert receive.poll(TIME_LIMIT), f"rank {rank} did not answer within {TIME_LIMIT:g} s"
            found.append(receive.recv())
        return found
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


def _one_rank(
    pipe: Connection, rank: int, ranks: int, port: int, job: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, ranks, f"127.0.0.1:{port}", timeout_seconds=TIME_LIMIT)
    pipe.send(job(rank, *arguments))
    torch.distributed.destroy_process_group()
