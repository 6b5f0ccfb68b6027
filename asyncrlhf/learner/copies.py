"""Copies between host and device that keep neither waiting longer than needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A host tensor on ``device``; a GPU copies it from page-locked memory while the host goes on."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of a device's tensors in host memory, by one copy for which the host waits once."""
    parts = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu().split([t.numel() for t in tensors])
    return [part.reshape(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]
