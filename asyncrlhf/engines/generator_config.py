"""Settings of the generators, ``generator.*``, and the kinds of replicas that they make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_choice, check_keywords, check_ranges, overlay

VLLM_MAX_TOP_K = 128  # each kept token is one more log-prob that vLLM makes a Python object of
VLLM_DTYPES = ("auto", "float32", "bfloat16", "float16")
# Of vLLM's SamplingParams, what follows from other settings.
OWN_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "seed", "n",
    "max_tokens", "logprobs", "prompt_logprobs", "detokenize", "output_kind",
)  # fmt: skip
_GROUP = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_INHERITED = ("engine", "slots", "threads", "gpus", "virtual_step_seconds")  # from ``generator.*`` by a group


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
        where, shares = "generator.fake", ("tail_probability", "correct_probability", "failure_probability")
        check_ranges(where, self, "latency_median", "latency_sigma", "length_sigma", low=0)
        check_ranges(where, self, "latency_max_ratio", "length_mean", low=1)
        check_ranges(where, self, *shares, low=0, high=1)


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
    engine_kwargs: Any = None  # more keywords of vLLM's EngineArgs

    def __post_init__(self) -> None:
        check_keywords("generator.vllm.engine_kwargs", self.engine_kwargs)
        check_choice("generator.vllm.dtype", self.dtype, VLLM_DTYPES)
        where = "generator.vllm"
        check_ranges(where, self, "max_model_len", "max_num_batched_tokens", "block_size", "kv_cache_gb", low=0)
        check_ranges(where, self, "gpu_memory_utilization", low=0, high=1, exclusive_low=True)
        check_ranges(where, self, "tensor_parallel_size", "pipeline_parallel_size", low=1)

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
    repetition_penalty: float = 1.0  # of tokens of the prompt and the response so far; 1 is off
    stop: list[str] = field(default_factory=list)  # texts that end a response
    generation_kwargs: Any = None  # more keywords of vLLM's SamplingParams
    threads: int = 1
    gpus: float = 0.0  # GPUs of one replica; 0 runs it on the CPU
    ignore_eos: bool = False  # every response has max_completion_length tokens: for measurements
    max_restarts: int = 3  # a replica that dies is started again this often
    virtual_step_seconds: float = 0.01  # runtime=local: what one decode iteration costs on the virtual clock
    fake: FakeConfig = field(default_factory=FakeConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def _check_engine(self) -> None:
        """What an engine cannot do, and what would say a second time what has a setting of its own."""
        check_keywords("generator.generation_kwargs", self.generation_kwargs)
        check(all(self.stop), "generator.stop holds an empty text; allowed: texts of at least one character.")
        check(
            self.engine != "fake" or not (self.stop or self.repetition_penalty != 1),
            "generator.stop and generator.repetition_penalty need a model, which generator.engine=fake has not.",
        )
        check(
            self.engine == "vllm" or not self.generation_kwargs,
            f"generator.generation_kwargs={self.generation_kwargs} are vLLM's; generator.engine={self.engine} "
            "samples by temperature, top_p, top_k, min_p, repetition_penalty and stop alone.",
        )
        for name in self.generation_kwargs or ():
            check(
                name not in OWN_SAMPLING,
                f"generator.generation_kwargs.{name} is decided by settings of its own: generator.{name}, or those of "
                "the run.",
            )

    @property
    def truncated(self) -> bool:
        """Whether some tokens are left without a chance."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def __post_init__(self) -> None:
        check_choice("generator.engine", self.engine, ("hf", "vllm", "fake"))
        check_ranges("generator", self, "slots", "max_completion_length", low=1)
        check_ranges("generator", self, "max_replicas", "threads", "gpus", "max_restarts", low=0)
        check_ranges("generator", self, "temperature", "top_k", "virtual_step_seconds", low=0)
        check_ranges("generator", self, "top_p", low=0, high=1, exclusive_low=True)
        check_ranges("generator", self, "min_p", low=0, high=1, exclusive_high=True)
        check_ranges("generator", self, "repetition_penalty", low=0, exclusive_low=True)
        self._check_engine()
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


@dataclass(frozen=True)
class Kind:
    """Replicas that are alike. ``config`` is what each of them gets: its ``replicas`` is their number at the start,
    and it has no groups."""

    prefix: str
    config: GeneratorConfig

    def replica(self, number: int) -> str:
        """The name of the ``number``-th replica, from 0: ``generator-0``, or ``generator-fast-0`` in group ``fast``."""
        return f"{self.prefix}-{number}"


def replica_kinds(config: GeneratorConfig) -> list[Kind]:
    """The kinds in the order given; raises ConfigError with one sentence for what cannot be read as groups."""
    number = config.replicas
    check(
        isinstance(number, int) and not isinstance(number, bool) and number >= 1,
        f"generator.replicas={number} is no whole number from 1 on; replicas of several kinds are set by name, such as "
        "generator.groups={fast:{replicas:2},slow:{slots:16}}.",
    )
    if config.groups is None:
        return [Kind("generator", _sized(config, number, config.max_replicas, "generator"))]
    check(number == 1, f"generator.replicas={number} says nothing beside generator.groups; set it in each group.")
    named = config.groups
    check(
        isinstance(named, Mapping) and named and all(isinstance(entry, Mapping) for entry in named.values()),
        f"generator.groups={named} are no groups by name; allowed: null, or such as "
        "{fast:{replicas:2},slow:{slots:16}}.",
    )
    groups = {str(name): overlay(GroupConfig(), entry, f"generator.groups.{name}") for name, entry in named.items()}
    check(
        config.max_replicas == 0,
        f"generator.max_replicas={config.max_replicas} says nothing beside groups; set it in each group.",
    )
    return [Kind(f"generator-{name}", _resolve(config, name, group)) for name, group in groups.items()]


def _resolve(config: GeneratorConfig, name: str, group: GroupConfig) -> GeneratorConfig:
    where = f"generator.groups.{name}"
    check(_GROUP.fullmatch(name), f"{where}: a group's name has letters, digits and underscores, and a letter first.")
    changes = {key: value for key in _INHERITED if (value := getattr(group, key)) is not None}
    fake = overlay(config.fake, group.fake, f"{where}.fake")
    vllm = overlay(config.vllm, group.vllm, f"{where}.vllm")
    try:
        merged = replace(config, replicas=1, groups=None, fake=fake, vllm=vllm, **changes)
    except ConfigError as error:
        raise ConfigError(f"In {where}: {error}") from None
    return _sized(merged, group.replicas, group.max_replicas, where)


def _sized(config: GeneratorConfig, replicas: int, most: int, where: str) -> GeneratorConfig:
    check(replicas >= 1, f"{where}.replicas={replicas} is out of range; allowed: >= 1.")
    check(
        most == 0 or most >= replicas,
        f"{where}.max_replicas={most} is less than {where}.replicas={replicas}; "
        f"allowed: 0 (no more than at the start) or >= {replicas}.",
    )
    return replace(config, replicas=replicas, max_replicas=most)
