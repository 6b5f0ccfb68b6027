"""The share of a GPU's memory for vLLM if a sleeping learner keeps some of it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import load_shape

CONTEXT_BYTES = 3 << 29  # 1.5 GiB: a learner's process on the device without its tensors, including NCCL's buffers
MARGIN = 0.02  # share of a device for other memory


def memory_share(name: str, total: int, free: int, beside: int, weights: int, part: float = 1.0) -> float:
    """``gpu_memory_utilization`` of the replica ``name``, in hundredths.

    Args:
        total, free: bytes of the device, and those free now, while the learner sleeps.
        beside: bytes that the learner keeps there asleep.
        weights: bytes of the replica's own weights on the device.
        part: of the device, if several replicas share it.

    Raises ConfigError if the weights alone do not fit.
    """
    room = min(free, total - beside - CONTEXT_BYTES) * part / total
    share = math.floor(100 * (room - MARGIN * part)) / 100
    if share * total <= weights:
        raise ConfigError(
            f"{name} takes turns with a learner that keeps {(beside + CONTEXT_BYTES) / 1e9:.1f} of {total / 1e9:.1f} "
            f"GB of their GPU while it sleeps, which leaves {max(share, 0.0) * total / 1e9:.1f} GB for its weights of "
            f"{weights / 1e9:.1f} GB and its cache; allowed: a larger tensor_parallel_size, more learner.ranks with "
            "learner.sharding=fsdp2, or cluster.placement=separate."
        )
    return share


def with_share(config: GeneratorConfig, model: ModelConfig, name: str, beside: int) -> GeneratorConfig:
    """``config`` with the share of this process's GPU; unchanged if the user has set one, and without GPUs."""
    if config.engine != "vllm" or config.gpus == 0 or config.vllm.gpu_memory_utilization is not None:
        return config
    free, total = torch.cuda.mem_get_info()
    part = min(1.0, config.gpus)
    share = memory_share(name, total, total if part < 1 else free, beside, weight_bytes(config, model), part)
    return replace(config, vllm=replace(config.vllm, gpu_memory_utilization=share))


def weight_bytes(config: GeneratorConfig, model: ModelConfig) -> int:
    """Bytes of the model's weights on each device of a replica."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        blank = AutoModelForCausalLM.from_config(load_shape(model), trust_remote_code=model.trust_remote_code)
    dtype = model.dtype if config.vllm.dtype == "auto" else config.vllm.dtype
    return sum(p.numel() for p in blank.parameters()) * getattr(torch, dtype).itemsize // config.vllm.workers
