"""The share of a GPU's memory for an engine beside a learner, which keeps some of it asleep, or needs more awake."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import transformers

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import load_shape

CONTEXT_BYTES = 3 << 29  # 1.5 GiB: a learner's process on the device without its tensors, including NCCL's buffers
MARGIN = 0.02  # share of a device for other memory


def memory_share(
    name: str, total: int, free: int, beside: int, weights: int, part: float = 1.0, *, asleep: bool = True
) -> float:
    """``gpu_memory_utilization`` of the replica ``name``, in hundredths.

    Args:
        total, free: bytes of the device, and those free now.
        beside: bytes that the learner keeps there ``asleep``, or else needs at work.
        weights: bytes of the replica's own weights on the device.
        part: of what the learner leaves, if several replicas share it.

    Raises ConfigError if the weights alone do not fit.
    """
    room = min(free, total - beside - CONTEXT_BYTES) * part / total
    share = math.floor(100 * (room - MARGIN * part)) / 100
    if share * total <= weights:
        how, ways = (
            ("takes turns with a learner that keeps", "a larger tensor_parallel_size, more learner.ranks with "
             "learner.sharding=fsdp2, or cluster.placement=separate")
            if asleep
            else ("works beside a learner that needs", "cluster=flatten, where they take turns, a smaller "
                  "learner.token_budget, learner.gradient_checkpointing=true, or fewer replicas")
        )  # fmt: skip
        raise ConfigError(
            f"{name} {how} {(beside + CONTEXT_BYTES) / 1e9:.1f} of {total / 1e9:.1f} GB of their GPU"
            f"{' while it sleeps' if asleep else ''}, which leaves {max(share, 0.0) * total / 1e9:.1f} GB for its "
            f"weights of {weights / 1e9:.1f} GB and its cache; allowed: {ways}."
        )
    return share


def with_share(
    config: GeneratorConfig, model: ModelConfig, name: str, beside: int, part_of_rest: float = 0.0
) -> GeneratorConfig:
    """``config`` with the share of this process's GPU; unchanged if the user has set one, and without GPUs.
    ``part_of_rest``: of what an awake learner leaves; 0: the learner sleeps, and the part is ``config.gpus``."""
    if config.engine != "vllm" or config.gpus == 0 or config.vllm.gpu_memory_utilization is not None:
        return config
    free, total = torch.cuda.mem_get_info()
    part, weights = part_of_rest or min(1.0, config.gpus), weight_bytes(config, model)
    free = total if part < 1 else free
    share = memory_share(name, total, free, beside, weights, part, asleep=not part_of_rest)
    return replace(config, vllm=replace(config.vllm, gpu_memory_utilization=share))


def weight_bytes(config: GeneratorConfig, model: ModelConfig) -> int:
    """Bytes of the model's weights on each device of a replica."""
    own = config.engine == "vllm" and config.vllm.dtype != "auto"
    dtype = config.vllm.dtype if own else model.dtype
    parameters = sum(p.numel() for p in blank_model(model).parameters())
    return parameters * getattr(torch, dtype).itemsize // config.vllm.workers


def blank_model(model: ModelConfig) -> transformers.PreTrainedModel:
    """The model without values, on the device ``meta``."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        blank: transformers.PreTrainedModel = AutoModelForCausalLM.from_config(
            load_shape(model), trust_remote_code=model.trust_remote_code
        )
    return blank
