"""vLLM's workers as receivers: each joins the weight group itself and loads bucket by bucket."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from asyncrlhf.errors import WeightSyncError
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
        self._joining = _Joining(
            self._weight_receiver, endpoint, rank + self.rank, world_size, epoch, worker_name(name, self.rank)
        )

    def receive_weights(self, ticket: Ticket, names: Mapping[str, str]) -> str:
        """Receive the weights of ``ticket`` and load those in ``names``, under these. Returns an error's text, or an
        empty one; for an exception vLLM would print this worker's stack."""
        try:
            self._joining.end()
            self.start_weight_update()
            for tensors in self._weight_receiver.stream(ticket):
                self.update_weights({"tensors": {names[name]: t for name, t in tensors.items() if name in names}})
                del tensors  # or it would live on beside the next two
            self.finish_weight_update()
        except Exception as error:
            return str(error) or type(error).__name__
        return ""


class _Joining:
    """A receiver that is joining a group, in a thread."""

    def __init__(self, receiver: WeightReceiver, *arguments: Any) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(receiver, arguments), name="join-weights", daemon=True)
        self._thread.start()

    def _run(self, receiver: WeightReceiver, arguments: tuple[Any, ...]) -> None:
        try:
            receiver.connect(*arguments)
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """Wait until it has joined; raises its error."""
        self._thread.join()
        if self._error is not None:
            raise WeightSyncError(str(self._error))
