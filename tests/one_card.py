"""Stands in for a GPU that several processes share: a table in place of CUDA's handles, and copies that stay queued, as
a GPU's do, until the process that ordered them waits or some time has passed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from asyncrlhf.engines import engine
from asyncrlhf.engines.hf import hf_engine
from asyncrlhf.transport import cuda_ipc

QUEUED_SECONDS = 0.5  # for which a copy without a waiting host stays in the queue


class Card:
    """``open``: what every handle stands for. A freed bucket holds rubbish for those who still look at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: dict[int, torch.Tensor] = {}
        self.queue: list[Callable[[], None]] = []
        self.name = "GPU-1"
        self._numbers = itertools.count()
        monkeypatch.setattr(cuda_ipc, "export_bucket", self._export)
        monkeypatch.setattr(cuda_ipc, "open_bucket", lambda handle, device: self._opened(handle[0]))
        monkeypatch.setattr(cuda_ipc, "card", lambda device: self.name)
        monkeypatch.setattr(cuda_ipc, "finish", lambda device: self.finish())
        monkeypatch.setattr(hf_engine, "load_named_weights", self._load)

    def _export(self, bucket: torch.Tensor) -> tuple[int]:
        self.open[number := next(self._numbers)] = bucket
        return (number,)

    def _opened(self, number: int) -> torch.Tensor:
        if number not in self.open:
            raise RuntimeError("CUDA error: invalid resource handle\nCUDA kernel errors might be ...")
        return self.open[number]

    def _load(self, model: Any, weights: Mapping[str, torch.Tensor]) -> None:
        self.queue.append(lambda: engine.load_named_weights(model, weights))
        asyncio.get_running_loop().call_later(QUEUED_SECONDS, self.finish)

    def finish(self) -> None:
        """Make the copies that are queued."""
        while self.queue:
            self.queue.pop(0)()

    def free(self) -> None:
        """A process ends, and its memory with it."""
        for bucket in self.open.values():
            bucket.fill_(0x55)
        self.open.clear()
