"""From settings to a sender and its receivers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrlhf.transport.base import WeightReceiver, WeightSender
from asyncrlhf.transport.collective import CollectiveReceiver, CollectiveSender
from asyncrlhf.transport.config import WeightsConfig
from asyncrlhf.transport.local import LocalReceiver, LocalSender
from asyncrlhf.transport.manifest import build_manifest
from asyncrlhf.transport.object_store import ObjectStoreReceiver, ObjectStoreSender
from asyncrlhf.validation import check, check_choice

RUNTIME_TRANSPORTS = {"local": ("local",), "ray": ("collective", "object_store")}  # the first is what `auto` means


def resolve_transport(config: WeightsConfig, runtime: str) -> str:
    """The transport that ``weights.transport`` means under ``runtime``; raises ConfigError where it cannot work."""
    check_choice("runtime", runtime, tuple(RUNTIME_TRANSPORTS))
    allowed = RUNTIME_TRANSPORTS[runtime]
    if config.transport == "auto":
        return allowed[0]
    check(
        config.transport in allowed,
        f"weights.transport={config.transport} does not work with runtime={runtime}; "
        f"allowed: auto, {', '.join(allowed)}.",
    )
    return config.transport


def build_sender(config: WeightsConfig, runtime: str, params: Mapping[str, torch.Tensor]) -> WeightSender:
    """The learner's side, for the tensors that every publish will carry."""
    kind = resolve_transport(config, runtime)
    manifest = build_manifest(params, int(config.bucket_mb * 2**20))
    if kind == "local":
        return LocalSender(manifest)
    device = next(iter(params.values())).device
    if kind == "object_store":
        return ObjectStoreSender(manifest)
    return CollectiveSender(manifest, timeout_seconds=config.timeout_seconds, device=device)


def build_receiver(config: WeightsConfig, runtime: str, device: torch.device | str = "cpu") -> WeightReceiver:
    """A generator's side; ``device`` is where its engine's parameters live."""
    kind = resolve_transport(config, runtime)
    if kind == "local":
        return LocalReceiver()
    if kind == "object_store":
        return ObjectStoreReceiver(timeout_seconds=config.timeout_seconds)
    return CollectiveReceiver(timeout_seconds=config.timeout_seconds, device=device)
