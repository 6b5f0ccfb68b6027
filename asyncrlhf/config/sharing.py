"""Checks of settings between parts that share devices in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from asyncrlhf.config.run_config import RunConfig

KEEPS_MEMORY = (
    "cluster.placement=flatten with a learner that keeps its memory (cluster.offload=false, "
    "learner.backend=deepspeed, or learner.pipeline_parallel_size over 1) leaves vLLM an unknown share; set "
    "generator.vllm.gpu_memory_utilization."
)


def check_sharing(config: RunConfig) -> None:
    """Raise ConfigError for the first disagreement."""
    _check_offload(config)
    _check_ipc(config)


def _check_ipc(config: RunConfig) -> None:
    kinds = [kind.config for kind in replica_kinds(config.generator)]
    one = sum(max(kind.replicas, kind.max_replicas) * kind.gpus for kind in kinds) <= 1 and config.learner.ranks == 1
    on_gpu = config.learner.gpus > 0 and all(kind.gpus > 0 for kind in kinds)
    check(
        config.weights.transport != "cuda_ipc" or (config.cluster.placement == "flatten" and one and on_gpu),
        "weights.transport=cuda_ipc hands over memory of one GPU that learner and generators share; allowed: "
        "cluster.placement=flatten with learner.ranks=1, learner.gpus over 0, and generators on one GPU together.",
    )


def _check_offload(config: RunConfig) -> None:
    kinds = [kind.config for kind in replica_kinds(config.generator)]
    shared = [kind for kind in kinds if kind.engine == "vllm" and kind.gpus and config.learner.gpus]
    derived = any(kind.vllm.gpu_memory_utilization is None for kind in shared)
    check(config.cluster.placement != "flatten" or config.offloads or not derived, KEEPS_MEMORY)
    if not config.cluster.offload:
        return
    check(
        config.cluster.placement == "flatten",
        f"cluster.offload=true frees devices that learner and generators share, and under "
        f"cluster.placement={config.cluster.placement} they share none; allowed: cluster.placement=flatten.",
    )
    check(
        config.learner.backend == "torch",
        f"cluster.offload=true does not work with learner.backend={config.learner.backend}, whose memory belongs to "
        "its engines; allowed: learner.backend=torch, or learner.zero_offload=cpu.",
    )
    check(
        config.learner.pipeline_parallel_size == 1,
        "cluster.offload=true does not work with learner.pipeline_parallel_size over 1; allowed: false.",
    )
    check(
        not any(kind.engine == "vllm" and kind.gpus == 0 for kind in kinds),
        "cluster.offload=true does not work with generator.engine=vllm on a CPU, where vLLM has no sleep mode; "
        "allowed: generator.engine=hf.",
    )
