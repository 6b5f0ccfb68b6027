"""Moves a rank's tensors to host memory between its turns on a device that it shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch.nn.parallel import DistributedDataParallel

from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.models.offload import Depot, Offload, free_cache


class RankSleep:
    """Moves weights, optimizer states, critic, slow copy and reference of ``backend`` off its device and drops its
    gradients, which the update has applied. DeepSpeed's engines manage their own memory and keep all of it."""

    def __init__(self, backend: TorchBackend, depot: Depot | None = None) -> None:
        """``depot``: see :class:`Offload`."""
        self._backend = backend
        self._offload = Offload(backend.device, depot)
        self._able = backend.config.backend == "torch"

    @property
    def asleep(self) -> bool:
        return self._offload.asleep

    def sleep(self) -> None:
        """Move everything off the device. No reader of the weights, such as a snapshot, may be under way."""
        if self._able:
            self._backend.updater.begin()
            for halves in self._backend.halves:
                halves.drop()
            self._offload.out(self._tensors())
        else:
            free_cache(self._backend.device)

    def wake(self) -> None:
        self._offload.back()

    def kept_bytes(self, beside: Iterable[torch.Tensor] = ()) -> int:
        """Bytes on the device now including ``beside``, from the allocator if there is one; includes the flat gradients
        that DistributedDataParallel allocates at its first step."""
        backend, device = self._backend, self._backend.device
        held = self._offload.resident_bytes(chain(self._tensors(), beside))
        if device.type == "cuda":
            held = max(held, torch.cuda.memory_reserved(device))
        return held + sum(
            parameter.nbytes
            for module in (backend.updater.policy, backend.updater.critic)
            if isinstance(module, DistributedDataParallel)
            for parameter in module.parameters()
            if parameter.requires_grad
        )

    def _tensors(self) -> Iterator[torch.Tensor]:
        backend = self._backend
        for module in (backend.model, backend.critic, backend.ema, backend.reference):
            if isinstance(module, torch.nn.Module):
                yield from module.parameters()
        for optimizer in backend.updater.optimizers:
            for part in getattr(optimizer, "parts", [optimizer]):
                for states in getattr(part, "state", {}).values():
                    yield from (value for value in states.values() if isinstance(value, torch.Tensor))
