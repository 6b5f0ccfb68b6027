"""Copies between host and device that keep neither waiting longer than needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A host tensor on ``device``; a GPU copies it from page-locked memory while the host goes on."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Host tensors of any types on ``device``, by one copy as :func:`to_device`'s; themselves on a CPU."""
    if device.type == "cpu":
        return list(tensors)
    sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors]  # a type starts at a multiple of its size
    whole = b"".join(t.numpy().tobytes().ljust(size, b"\0") for t, size in zip(tensors, sizes, strict=True))
    parts = to_device(torch.frombuffer(bytearray(whole), dtype=torch.uint8), device).split(sizes)
    return [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A device's tensors in host memory, by one copy for which the host waits once; themselves on a CPU."""
    if tensors[0].device.type == "cpu":
        return [tensor.detach() for tensor in tensors]
    parts = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu().split([t.numel() for t in tensors])
    return [part.reshape(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]
