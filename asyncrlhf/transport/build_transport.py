"""Builds a sender and its receivers from the settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from asyncrlhf.transport.collective.receiver import CollectiveReceiver
from asyncrlhf.transport.collective.sender import CollectiveSender
from asyncrlhf.transport.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from asyncrlhf.transport.disk import DiskReceiver, DiskSender
from asyncrlhf.transport.local import LocalReceiver, LocalSender
from asyncrlhf.transport.manifest import ShardedParams, build_manifest
from asyncrlhf.transport.object_store import ObjectStoreReceiver, ObjectStoreSender
from asyncrlhf.transport.receiver import WeightReceiver
from asyncrlhf.transport.relay import RelayReceiver
from asyncrlhf.transport.sender import WeightSender, Wire
from asyncrlhf.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender
from asyncrlhf.transport.weights_config import SLOWEST, WeightsConfig
from asyncrlhf.types import WeightManifest
from asyncrlhf.validation import check, check_choice

# `auto` means the first.
RUNTIME_TRANSPORTS = {
    "local": ("local", "relay"),
    "ray": ("collective", "relay", "shared_memory", "cuda_ipc", "object_store", "disk"),
}


def resolve_transport(config: WeightsConfig, runtime: str) -> str:
    """The transport that ``weights.transport`` means under ``runtime``; raises ConfigError if it cannot work."""
    check_choice("runtime", runtime, tuple(RUNTIME_TRANSPORTS))
    allowed = RUNTIME_TRANSPORTS[runtime]
    kind = allowed[0] if config.transport == "auto" else config.transport
    check(
        kind in allowed,
        f"weights.transport={config.transport} does not work with runtime={runtime}; "
        f"allowed: auto, {', '.join(allowed)}.",
    )
    return kind


def streams(config: WeightsConfig, runtime: str) -> bool:
    """Whether a receiver can load bucket by bucket, without staging memory, which ``weights.delta`` needs."""
    return resolve_transport(config, runtime) in ("collective", "shared_memory") and not config.sparse


def mapped_transport(config: WeightsConfig, *, sharded: bool, adapter: bool, on_cpus: bool, on_card: bool) -> str:
    """The transport by which receivers load straight from the learner's memory; empty if they do not: only whole
    versions of weights that one rank holds whole, not an ``adapter``, of which an engine keeps a copy.

    ``on_cpus``, ``on_card``: learner and generators are certain to compute on the CPUs of one machine, or on one GPU.
    """
    if sharded or adapter or config.sparse:
        return ""
    if config.transport == "cuda_ipc" or (config.transport == "auto" and on_card):
        return "cuda_ipc"
    maps = config.transport == "shared_memory" or (config.transport == "auto" and on_cpus)
    return "shared_memory" if maps and hasattr(os, "memfd_create") else ""


def lay_out(config: WeightsConfig, params: Mapping[str, torch.Tensor]) -> WeightManifest:
    """The buckets of ``params``: the same in every process that has the same settings."""
    return build_manifest(params, int(config.bucket_mb * 2**20), _cast(config))


def _cast(config: WeightsConfig) -> torch.dtype | None:
    return None if config.dtype == "auto" else getattr(torch, config.dtype)


def build_sender(config: WeightsConfig, runtime: str, params: Mapping[str, torch.Tensor]) -> WeightSender:
    """The learner's side, for the tensors that every publish sends. ``weights.dtype=auto`` means the tensors' own dtype
    here: the caller, which knows the engines, resolves it before."""
    kind = resolve_transport(config, runtime)
    cast = _cast(config)
    wire = Wire(cast, config.verifies, config.delta, config.relay)
    manifest = lay_out(config, params)
    sharded = params if isinstance(params, ShardedParams) else None
    device = next(iter(params.values())).device if sharded is None else sharded.device
    seconds = config.timeout_seconds
    if runtime == "local":
        return LocalSender(manifest, wire=wire)
    if kind == "shared_memory":
        return SharedMemorySender(manifest, wire)
    if kind == "cuda_ipc":
        return CudaIpcSender(manifest, device, wire)
    if kind == "object_store":
        return ObjectStoreSender(manifest, wire, sharded)
    if kind == "disk":
        check(config.disk_path, "weights.transport=disk needs weights.disk_path here; a run has one of its own.")
        return DiskSender(manifest, Path(config.disk_path), timeout_seconds=seconds, wire=wire, sharded=sharded)
    return CollectiveSender(
        manifest, timeout_seconds=seconds, device=device, wire=wire, bytes_per_second=SLOWEST, sharded=sharded
    )


def build_receiver(config: WeightsConfig, runtime: str, device: torch.device | str = "cpu") -> WeightReceiver:
    """A generator's side; ``device``: that of its engine's parameters."""
    kinds = {
        "shared_memory": SharedMemoryReceiver,
        "cuda_ipc": CudaIpcReceiver,
        "object_store": ObjectStoreReceiver,
        "disk": DiskReceiver,
        "relay": RelayReceiver,
    }
    receiver = kinds.get(resolve_transport(config, runtime), CollectiveReceiver)
    receiver = LocalReceiver if runtime == "local" else receiver
    return receiver(timeout_seconds=config.timeout_seconds, device=device)
