"""One rank of the learner group: a training backend, and on rank 0 the sender of its weights."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
import torch

from asyncrlhf.actors.messages import Offer
from asyncrlhf.data.config import ModelConfig
from asyncrlhf.data.packing import pack, shard
from asyncrlhf.data.pretrained import load_model, load_tokenizer
from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.base import StepResult
from asyncrlhf.learner.build import build_learner
from asyncrlhf.learner.config import LearnerConfig
from asyncrlhf.learner.distributed import init_process_group
from asyncrlhf.transport.audit import tensor_digests
from asyncrlhf.transport.base import Ticket, TransferStats, WeightSender
from asyncrlhf.transport.build import build_sender
from asyncrlhf.transport.config import WeightsConfig
from asyncrlhf.types import FloatArray, Rollout, TrainSample


@dataclass(frozen=True)
class LearnerSpec:
    """Everything a rank needs to start on any machine."""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    model: ModelConfig
    runtime: str
    weights: WeightsConfig
    temperature: float
    max_completion_length: int
    steps: int
    seed: int


class LearnerWorker:
    """A rank without Ray. ``train`` and ``transfer`` may run in two threads: they share only the snapshot."""

    def __init__(self, spec: LearnerSpec, rank: int = 0, ranks: int = 1, address: str = "") -> None:
        self.rank = rank
        self._ranks = ranks
        self._model = spec.model
        device = "cuda" if spec.learner.gpus > 0 else "cpu"
        if ranks > 1:
            init_process_group(rank, ranks, address)
        torch.manual_seed(spec.seed)
        self.backend = build_learner(
            spec.learner,
            spec.algorithm,
            lambda: load_model(spec.model, device, dtype=torch.float32),
            steps=spec.steps,
            temperature=spec.temperature,
            max_completion_length=spec.max_completion_length,
            rank=rank,
            ranks=ranks,
            device=device,
        )
        self.sender: WeightSender | None = None
        if rank == 0:
            self.sender = build_sender(spec.weights, spec.runtime, self.backend.parameters())
            self.backend.before_update(lambda: self._fence())
        self._fence_seconds = 0.0

    def train(self, samples: Sequence[TrainSample]) -> StepResult:
        return self.backend.train_step(shard(pack(samples), self.rank, self._ranks))

    def snapshot(self, probe: Sequence[np.ndarray] | None) -> Offer:
        """Copy the present weights for publishing (rank 0), beside the next step's passes: its update waits for it."""
        sender = self.require_sender()
        started = time.monotonic()
        sender.begin_snapshot(self.backend.policy_version, self.backend.parameters())
        seconds, self._fence_seconds = time.monotonic() - started + self._fence_seconds, 0.0
        return Offer(seconds, None if probe is None else self.backend.score(probe))

    def _fence(self) -> None:
        """Wait until nothing reads the parameters any more."""
        self._fence_seconds += self.require_sender().fence()

    def require_sender(self) -> WeightSender:
        assert self.sender is not None, "only rank 0 sends weights"
        return self.sender

    def digests(self) -> dict[str, str]:
        """Of the tensors in the newest snapshot in the generators' dtype, which is what receivers must hold."""
        return tensor_digests(self.require_sender().buckets.views(), getattr(torch, self._model.dtype))

    def score(self, texts: Sequence[np.ndarray]) -> list[FloatArray]:
        return self.backend.score(texts)

    def save(self, folder: Path) -> None:
        """With the tokenizer, so that ``folder/model`` is a checkpoint that any ``from_pretrained`` reads."""
        self.backend.save(folder)
        if self.rank == 0:
            load_tokenizer(self._model).save_pretrained(folder / "model")

    def load(self, folder: Path) -> None:
        if self.sender is not None:
            self.sender.fence()
        self.backend.load(folder)

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()


class LearnerActor:
    """The Ray actor around one rank; several threads, so that a transfer runs beside the next step."""

    def __init__(self, spec: LearnerSpec, rank: int, ranks: int) -> None:
        torch.set_num_threads(spec.learner.threads)
        self._spec, self._rank, self._ranks = spec, rank, ranks
        self._worker: LearnerWorker | None = None

    def rendezvous(self) -> str:
        """``host:port`` on this rank's machine, where the ranks' process group can meet."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def setup(self, address: str) -> bool:
        """Join the learner's process group at ``address`` (all ranks together) and load the model."""
        self._worker = LearnerWorker(self._spec, self._rank, self._ranks, address)
        return True

    @property
    def worker(self) -> LearnerWorker:
        assert self._worker is not None, "setup comes first"
        return self._worker

    def train(
        self,
        chosen: Sequence[tuple[int, int, float, float, int]],
        *bundles: Sequence[Rollout],
    ) -> StepResult:
        """``chosen``: (bundle, index, reward, weight, masked_before_version); bundles come from the object store."""
        torch.set_num_threads(self._spec.learner.threads)  # OpenMP counts by thread, and each call may have another
        samples = [
            TrainSample(bundles[bundle][index], reward, weight, masked)
            for bundle, index, reward, weight, masked in chosen
        ]
        return self.worker.train(samples)

    def snapshot(self, probe: Sequence[np.ndarray] | None) -> Offer:
        return self.worker.snapshot(probe)

    def listen(self) -> str:
        return self.worker.require_sender().listen()

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        self.worker.require_sender().connect(endpoint, list(receivers), epoch)

    def ticket(self) -> Ticket:
        return self.worker.require_sender().ticket()

    def transfer(self, ticket: Ticket) -> TransferStats:
        return self.worker.require_sender().transfer(ticket)

    def digests(self) -> dict[str, str]:
        return self.worker.digests()

    def save(self, folder: str) -> None:
        self.worker.save(Path(folder))

    def load(self, folder: str) -> None:
        self.worker.load(Path(folder))

    def close(self) -> None:
        self.worker.close()
