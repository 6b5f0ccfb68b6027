"""Settings of the generators: ``generator.*``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrlhf.validation import check, check_choice, check_range

VLLM_MAX_TOP_K = 128  # each kept token is one more log-prob that vLLM makes a Python object of
VLLM_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class FakeConfig:
    """The fake engine's world: how long a response is and how long it takes, drawn from the request's seed.

    A request takes ``latency_median`` seconds times a log-normal factor of ``latency_sigma``, capped at
    ``latency_max_ratio`` times the median. With probability ``tail_probability`` it takes that cap itself.
    """

    latency_median: float = 0.05
    latency_sigma: float = 0.5
    latency_max_ratio: float = 50.0
    tail_probability: float = 0.0
    length_mean: float = 8.0
    length_sigma: float = 0.5
    correct_probability: float = 0.5  # how often the reference answer is what it writes
    failure_probability: float = 0.0

    def __post_init__(self) -> None:
        for key in ("latency_median", "latency_sigma", "length_sigma"):
            check_range(f"generator.fake.{key}", getattr(self, key), low=0)
        check_range("generator.fake.latency_max_ratio", self.latency_max_ratio, low=1)
        check_range("generator.fake.length_mean", self.length_mean, low=1)
        for key in ("tail_probability", "correct_probability", "failure_probability"):
            check_range(f"generator.fake.{key}", getattr(self, key), low=0, high=1)


@dataclass(frozen=True)
class VllmConfig:
    """What ``generator.engine=vllm`` hands on to vLLM, under vLLM's own names where it has one; 0 is vLLM's choice.

    ``dtype=auto`` is ``model.dtype``; ``max_model_len=0`` the model's context. ``kv_cache_gb=0``: on a CPU enough for
    all slots at full length (at most a quarter of the free memory), on GPUs what ``gpu_memory_utilization`` leaves.
    ``enable_sleep_mode``: a replica that takes turns with the learner frees its GPUs' memory meanwhile.
    ``enforce_eager=None`` is true on a CPU, where compiling takes minutes, and false on GPUs. A replica has
    ``tensor_parallel_size * pipeline_parallel_size`` workers; what data parallelism is elsewhere is
    ``generator.replicas`` here.
    """

    dtype: str = "auto"
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    block_size: int = 0
    kv_cache_gb: float = 0.0
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool | None = None
    enable_prefix_caching: bool = True
    enable_sleep_mode: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False

    def __post_init__(self) -> None:
        check_choice("generator.vllm.dtype", self.dtype, VLLM_DTYPES)
        for key in ("max_model_len", "max_num_batched_tokens", "block_size", "kv_cache_gb"):
            check_range(f"generator.vllm.{key}", getattr(self, key), low=0)
        check_range(
            "generator.vllm.gpu_memory_utilization", self.gpu_memory_utilization, low=0, high=1, exclusive_low=True
        )
        check_range("generator.vllm.tensor_parallel_size", self.tensor_parallel_size, low=1)
        check_range("generator.vllm.pipeline_parallel_size", self.pipeline_parallel_size, low=1)

    @property
    def workers(self) -> int:
        """vLLM workers of one replica, one a GPU."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class GroupConfig:
    """Replicas that are alike, ``generator.groups.NAME``: what is null, or not named in ``fake`` and ``vllm``, is as
    ``generator.*`` says. Sampling settings are common to all replicas."""

    replicas: int = 1
    max_replicas: int = 0
    engine: str | None = None
    slots: int | None = None
    threads: int | None = None
    gpus: float | None = None
    virtual_step_seconds: float | None = None
    fake: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GeneratorConfig:
    """``slots``: responses one replica generates at once; ``threads``: CPU threads of one replica (0: Ray's choice).

    ``replicas`` is a number of replicas that are alike; ``groups`` gives several kinds by name, as :class:`GroupConfig`
    says. ``max_replicas`` > ``replicas`` lets a Ray cluster that grows start more of them.
    """

    engine: str = "hf"
    replicas: Any = 1  # Any: replica_kinds says what is wrong with a value that is no number
    max_replicas: int = 0
    groups: Any = None  # of GroupConfig by name
    slots: int = 128
    max_completion_length: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0  # tokens below this share of the largest probability are dropped
    threads: int = 1
    gpus: float = 0.0  # GPUs of one replica; 0 runs it on the CPU
    ignore_eos: bool = False  # every response has max_completion_length tokens: for measurements
    max_restarts: int = 3  # a replica that dies is started again this often
    virtual_step_seconds: float = 0.01  # runtime=local: what one decode iteration costs on the virtual clock
    fake: FakeConfig = field(default_factory=FakeConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)

    @property
    def truncated(self) -> bool:
        """Whether some tokens are left without a chance."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def __post_init__(self) -> None:
        check_choice("generator.engine", self.engine, ("hf", "vllm", "fake"))
        for key in ("slots", "max_completion_length"):
            check_range(f"generator.{key}", getattr(self, key), low=1)
        for key in ("max_replicas", "temperature", "top_k", "threads", "gpus", "max_restarts", "virtual_step_seconds"):
            check_range(f"generator.{key}", getattr(self, key), low=0)
        check_range("generator.top_p", self.top_p, low=0, high=1, exclusive_low=True)
        check_range("generator.min_p", self.min_p, low=0, high=1, exclusive_high=True)
        check(
            self.engine != "vllm" or self.gpus > 0 or self.vllm.pipeline_parallel_size == 1,
            f"generator.vllm.pipeline_parallel_size={self.vllm.pipeline_parallel_size} needs generator.gpus; "
            f"on a CPU vLLM has no pipeline stages.",
        )
        check(
            self.engine != "vllm" or self.gpus > 0 or not self.vllm.enable_sleep_mode,
            "generator.vllm.enable_sleep_mode=true needs generator.gpus; on a CPU vLLM has no sleep mode.",
        )
        check(
            self.engine != "vllm" or self.gpus == 0 or max(1.0, self.gpus) == self.vllm.workers,
            f"generator.gpus={self.gpus:g} is not the {self.vllm.workers} of generator.vllm.tensor_parallel_size="
            f"{self.vllm.tensor_parallel_size} times pipeline_parallel_size={self.vllm.pipeline_parallel_size}.",
        )
