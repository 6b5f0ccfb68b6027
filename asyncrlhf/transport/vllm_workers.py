"""vLLM's workers as receivers: each joins the weight group itself and loads bucket by bucket."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch

from asyncrlhf.transport.build_transport import build_receiver
from asyncrlhf.transport.protocol import Ticket, worker_name
from asyncrlhf.transport.receiver import WeightReceiver
from asyncrlhf.transport.weights_config import WeightsConfig


class WeightReceiving:
    """An extension of vLLM's worker (``worker_extension_cls``): methods that its engine calls by name in all workers.

    A worker holds at most the bucket that it loads, the one that arrives meanwhile, and the parts of an incomplete
    layer.
    """

    # vLLM's worker has these.
    rank: int
    device: torch.device
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any
    _weight_receiver: WeightReceiver  # of the newest group

    def join_weights(
        self, weights: WeightsConfig, endpoint: str, rank: int, world_size: int, epoch: int, name: str
    ) -> None:
        """Join the weight group of ``epoch``; the replica's first worker is its ``rank``. Returns at once, so that a
        slow group does not delay sampling."""
        if hasattr(self, "_weight_receiver"):
            self._weight_receiver.close()
        self._weight_receiver = build_receiver(weights, "ray", self.device)
        self._joined: Future[None] = Future()
        group = endpoint, rank + self.rank, world_size, epoch, worker_name(name, self.rank)
        threading.Thread(target=self._join, args=(self._weight_receiver, self._joined, group), daemon=True).start()

    @staticmethod
    def _join(receiver: WeightReceiver, joined: Future[None], group: tuple[Any, ...]) -> None:
        try:
            receiver.connect(*group)
            joined.set_result(None)
        except BaseException as error:
            joined.set_exception(error)

    def receive_weights(self, ticket: Ticket, names: Mapping[str, str]) -> str:
        """Receive the weights of ``ticket`` and load those in ``names``, under these. Returns an error's text, or an
        empty one; for an exception vLLM would print this worker's stack."""
        try:
            self._joined.result()
            self.start_weight_update()
            for tensors in self._weight_receiver.stream(ticket):
                self.update_weights({"tensors": {names[name]: t for name, t in tensors.items() if name in names}})
                del tensors  # or it would live on beside the next two
            self.finish_weight_update()
        except Exception as error:
            return str(error) or type(error).__name__
        return ""
