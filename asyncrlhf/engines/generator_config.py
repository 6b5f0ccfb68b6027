"""Settings of the generators, ``generator.*``, and the kinds of replicas that they define."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from asyncrlhf.engines.cache_config import CacheConfig, read_cache
from asyncrlhf.engines.vllm_keywords import check_known
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import DAY, check, check_keywords, check_range, check_settings, group, overlay, setting

MAX_REPLICAS, MAX_SLOTS, MAX_THREADS = 10**4, 10**5, 1024
VLLM_MAX_TOP_K = 128  # vLLM creates a Python object for the log-prob of each kept token
ENGINES = ("hf", "vllm", "fake")
VLLM_DTYPES = ("auto", "float32", "bfloat16", "float16")
# Fields of vLLM's SamplingParams that follow from other settings.
OWN_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "seed", "n",
    "max_tokens", "logprobs", "prompt_logprobs", "detokenize", "output_kind",
)  # fmt: skip
# The same for vLLM's EngineArgs.
OWN_ENGINE = (
    "model", "skip_tokenizer_init", "trust_remote_code", "dtype", "generation_config", "logprobs_mode",
    "max_logprobs", "max_num_seqs", "max_model_len", "gpu_memory_utilization",
    "enable_chunked_prefill", "tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend",
    "enable_sleep_mode", "weight_transfer_config", "worker_extension_cls", "disable_log_stats",
    "kv_cache_memory_bytes", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules",
    "enable_return_routed_experts",
)  # fmt: skip
# Fields of vLLM's EngineArgs that would break the guarantee that a token's version is that of its weights, or
# that engine and learner hold the same model; with the reason.
_OTHER_MODEL = "makes the engine's model differ from the learner's"
_PLACED = "is set by the run, which starts and places every worker"
REFUSED_ENGINE = {
    "stream_interval": "hands tokens on after the step that sampled them, when the weights may be newer",
    "diffusion_config": "samples tokens again that were handed on already",
    "kv_transfer_config": "brings keys and values from engines that may hold other weights",
    "ec_transfer_config": "brings encoded inputs from engines that may hold other weights",
    "logits_processors": "changes what is sampled in ways that no log-prob tells the learner",
    "watermark_config": "changes what is sampled in ways that no log-prob tells the learner",
    "scheduler_cls": "replaces the steps between which weights are loaded",
    "worker_cls": "replaces the workers that load weights",
    "runner": "lets the engine do other things than generate",
    "convert": _OTHER_MODEL,
    "hf_overrides": _OTHER_MODEL,
    "hf_config_path": _OTHER_MODEL,
    "model_weights": _OTHER_MODEL,
    "model_class_overrides": _OTHER_MODEL,
    "revision": _OTHER_MODEL,
    "nnodes": _PLACED,
    "node_rank": _PLACED,
    "master_addr": _PLACED,
    "master_port": _PLACED,
    "prefill_context_parallel_size": _PLACED,
    "enable_elastic_ep": _PLACED,
}
_GROUP = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_INHERITED = ("engine", "slots", "threads", "gpus", "virtual_step_seconds")  # from ``generator.*`` by a group


@dataclass(frozen=True)
class FakeConfig:
    """The fake engine's distributions, drawn from each request's seed: a response's length and its latency."""

    latency_median: float = setting(0.05, "Median time of a request, in seconds; log-normal.", low=0, high=DAY)
    latency_sigma: float = setting(0.5, "Spread of the logarithm of a request's time.", low=0, high=10)
    latency_max_ratio: float = setting(50.0, "Longest time of a request, in medians.", low=1, high=1e6)
    tail_probability: float = setting(0.0, "Share of requests that take the longest time.", low=0, high=1)
    length_mean: float = setting(8.0, "Mean length of a response, in tokens.", low=1, high=1e6)
    length_sigma: float = setting(0.5, "Spread of the logarithm of a response's length.", low=0, high=10)
    correct_probability: float = setting(0.5, "Share of responses that are the reference answer.", low=0, high=1)
    failure_probability: float = setting(0.0, "Share of requests that fail.", low=0, high=1)

    def __post_init__(self) -> None:
        check_settings("generator.fake", self)


@dataclass(frozen=True)
class VllmConfig:
    """The settings that ``generator.engine=vllm`` passes to vLLM, under vLLM's own names if it has them.

    A replica has ``tensor_parallel_size * pipeline_parallel_size`` workers; use ``generator.replicas`` for data
    parallelism.
    """

    dtype: str = setting("auto", "Number format of the engine's weights; auto is model.dtype.", choices=VLLM_DTYPES)
    max_model_len: int = setting(0, "Longest prompt and response together, in tokens; 0 is the model's context.", low=0)
    kv_cache_gb: float = setting(
        0.0,
        "Memory of the KV cache, in GiB; 0: on a CPU enough for all slots at full length (at most a quarter of the "
        "free memory), on GPUs the rest of gpu_memory_utilization.",
        low=0,
        high=1e6,
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Share of a GPU's memory for the engine; null: 0.9, or the rest beside a learner on the same GPU.",
        low=0,
        high=1,
        exclusive_low=True,
    )
    sleep_level: int | None = setting(
        None,
        "What a replica does to free a GPU that it shares with the learner, in the learner's turns: 0 nothing, 1 moves "
        "its weights to host memory, 2 discards them if new ones will follow; null: 1 if it shares one. Needs GPUs.",
        low=0,
        high=2,
    )
    tensor_parallel_size: int = setting(1, "GPUs that hold a share of each layer.", low=1, high=1024)
    pipeline_parallel_size: int = setting(
        1, "Pipeline stages, each with some of the layers; needs GPUs.", low=1, high=1024
    )
    enable_lora: bool | None = setting(
        None,
        "With model.lora.r: true applies the adapter beside the base weights, false merges it into them at each load "
        "(a longer load, a copy of the base in host memory, faster tokens); null: true on GPUs, false on a CPU.",
    )
    engine_kwargs: Any = setting(
        None, "More keywords of vLLM's EngineArgs, by name, such as {enable_expert_parallel: true, block_size: 32}."
    )

    def __post_init__(self) -> None:
        check_keywords("generator.vllm.engine_kwargs", self.engine_kwargs)
        for name in self.engine_kwargs or ():
            check(name not in OWN_ENGINE, f"generator.vllm.engine_kwargs.{name} has its own setting.")
            why = "is generator.replicas here" if name.startswith("data_parallel_") else REFUSED_ENGINE.get(name)
            check(why is None, f"generator.vllm.engine_kwargs.{name} is not allowed: it {why}.")
        check_known("generator.vllm.engine_kwargs", self.engine_kwargs or (), "EngineArgs")
        check_settings("generator.vllm", self)

    @property
    def shares_prompts(self) -> bool:
        """Whether siblings share the KV cache of their prompt."""
        return bool((self.engine_kwargs or {}).get("enable_prefix_caching", True))

    @property
    def workers(self) -> int:
        """vLLM workers of one replica, one per GPU."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class GroupConfig:
    """A group of equal replicas, ``generator.groups.NAME``: settings that are null, or not named in ``fake`` and
    ``vllm``, are those of ``generator.*``. All replicas share the sampling settings."""

    replicas: int = setting(1, "Replicas of this kind at the start.", low=1, high=MAX_REPLICAS)
    max_replicas: int = setting(0, "Most replicas of this kind on a cluster that grows; 0: no more than at the start.")
    engine: str | None = setting(None, "As generator.engine.")
    slots: int | None = setting(None, "As generator.slots.")
    threads: int | None = setting(None, "As generator.threads.")
    gpus: float | None = setting(None, "As generator.gpus.")
    virtual_step_seconds: float | None = setting(None, "As generator.virtual_step_seconds.")
    fake: dict[str, Any] = setting({}, "Differences from generator.fake.")
    vllm: dict[str, Any] = setting({}, "Differences from generator.vllm.")


@dataclass(frozen=True)
class GeneratorConfig:
    """Engines, replicas and sampling."""

    engine: str = setting(
        "hf",
        "The engine: continuous batching on transformers models (hf), vLLM, or random latencies (fake).",
        choices=ENGINES,
        common=True,
    )
    # Any: replica_kinds reports a value that is not a number
    replicas: Any = setting(1, "Number of equal replicas; a whole number from 1 to 10,000.", common=True)
    max_replicas: int = setting(
        0, "Most replicas on a Ray cluster that grows; 0: no more than at the start.", low=0, high=MAX_REPLICAS
    )
    groups: Any = setting(None, "Replicas of several kinds, by name; null: all are equal.", entries=GroupConfig)
    slots: int = setting(128, "Responses that one replica generates at once.", low=1, high=MAX_SLOTS)
    max_completion_length: int = setting(
        16, "Longest response, in tokens; longer ones are cut off.", low=1, high=10**7, common=True
    )
    temperature: float = setting(1.0, "Sampling temperature; log-probs are taken at the same one.", low=0, common=True)
    top_p: float = setting(
        1.0,
        "Samples from the likeliest tokens with this total probability; 1: all.",
        low=0,
        high=1,
        exclusive_low=True,
    )
    top_k: int = setting(0, "Samples from this many of the likeliest tokens; 0: all.", low=0)
    min_p: float = setting(
        0.0, "Leaves out tokens below this share of the largest probability.", low=0, high=1, exclusive_high=True
    )
    repetition_penalty: float = setting(
        1.0, "Divides the logits of tokens of the prompt and the response so far; 1 is off.", low=0, exclusive_low=True
    )
    stop: list[str] = setting([], "Texts that end a response.")
    generation_kwargs: Any = setting(None, "engine=vllm: more keywords of vLLM's SamplingParams, by name.")
    cache: Any = setting(
        "full",
        "engine=hf: keys and values that stay: full, window, heavy_hitters, separators, chunk_sink, or a mapping like "
        "{policy: chunk_sink, share: 0.25, window: 16, every: 8, keep: first}.",
    )
    threads: int = setting(
        1, "CPU threads of one replica, shared by its vLLM workers; 0 is Ray's choice.", low=0, high=MAX_THREADS
    )
    gpus: float = setting(0.0, "GPUs of one replica; 0 runs it on the CPU.", low=0, high=1024, common=True)
    ignore_eos: bool = setting(False, "Every response has max_completion_length tokens: for measurements.")
    virtual_step_seconds: float = setting(
        0.01, "runtime=local: seconds that one decode iteration costs on the virtual clock.", low=0, high=DAY
    )
    fake: FakeConfig = group(FakeConfig, "engine=fake: distributions of lengths and latencies.")
    vllm: VllmConfig = group(VllmConfig, "engine=vllm: settings passed to vLLM, under vLLM's names.")

    def _check_engine(self) -> None:
        """Refuse settings that the engine does not support, and arguments that have their own setting."""
        check_keywords("generator.generation_kwargs", self.generation_kwargs)
        check(all(self.stop), "generator.stop holds an empty text; allowed: texts of at least one character.")
        check(
            self.engine != "fake" or not (self.stop or self.repetition_penalty != 1),
            "generator.stop and generator.repetition_penalty need a model, which generator.engine=fake does not have.",
        )
        check(
            self.engine == "vllm" or not self.generation_kwargs,
            f"generator.generation_kwargs={self.generation_kwargs} are for vLLM; generator.engine={self.engine} "
            "samples only by temperature, top_p, top_k, min_p, repetition_penalty and stop.",
        )
        for name in self.generation_kwargs or ():
            check(
                name not in OWN_SAMPLING,
                f"generator.generation_kwargs.{name} has its own setting: generator.{name}, or those of the run.",
            )
        check_known("generator.generation_kwargs", self.generation_kwargs or (), "SamplingParams")
        check(
            self.kept is None or self.engine == "hf",
            f"generator.cache={self.cache} needs generator.engine=hf; {self.engine} keeps every token.",
        )

    @property
    def kept(self) -> CacheConfig | None:
        """Which keys and values stay; None: all."""
        return read_cache(self.cache, self.max_completion_length)

    @property
    def truncated(self) -> bool:
        """Whether the sampling settings exclude some tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def __post_init__(self) -> None:
        check_settings("generator", self)
        self._check_engine()
        check(
            self.engine != "vllm" or self.gpus > 0 or self.vllm.pipeline_parallel_size == 1,
            f"generator.vllm.pipeline_parallel_size={self.vllm.pipeline_parallel_size} needs generator.gpus; "
            f"on a CPU vLLM has no pipeline stages.",
        )
        check(
            self.engine != "vllm" or self.gpus > 0 or not self.vllm.sleep_level,
            f"generator.vllm.sleep_level={self.vllm.sleep_level} needs generator.gpus; on a CPU vLLM has none.",
        )
        check(
            self.engine != "vllm" or self.gpus == 0 or max(1.0, self.gpus) == self.vllm.workers,
            f"generator.gpus={self.gpus:g} is not the {self.vllm.workers} of generator.vllm.tensor_parallel_size="
            f"{self.vllm.tensor_parallel_size} times pipeline_parallel_size={self.vllm.pipeline_parallel_size}.",
        )


@dataclass(frozen=True)
class Kind:
    """Equal replicas. ``config``: that of each one; its ``replicas`` is their number at the start, and it has no
    groups."""

    prefix: str
    config: GeneratorConfig

    def replica(self, number: int) -> str:
        """The name of the ``number``-th replica, from 0: ``generator-0``, or ``generator-fast-0`` in group ``fast``."""
        return f"{self.prefix}-{number}"


def replica_kinds(config: GeneratorConfig) -> list[Kind]:
    """The kinds in the order given; raises ConfigError with one sentence for an invalid group."""
    number = config.replicas
    check(
        isinstance(number, int) and not isinstance(number, bool) and number >= 1,
        f"generator.replicas={number} is not a whole number >= 1; replicas of several kinds are set by name, such as "
        "generator.groups={fast:{replicas:2},slow:{slots:16}}.",
    )
    if config.groups is None:
        return [Kind("generator", _sized(config, number, config.max_replicas, "generator"))]
    check(number == 1, f"generator.replicas={number} has no effect with generator.groups; set it in each group.")
    named = config.groups
    check(
        isinstance(named, Mapping) and named and all(isinstance(entry, Mapping) for entry in named.values()),
        f"generator.groups={named} does not map names to groups; allowed: null, or such as "
        "{fast:{replicas:2},slow:{slots:16}}.",
    )
    groups = {str(name): overlay(GroupConfig(), entry, f"generator.groups.{name}") for name, entry in named.items()}
    check(
        config.max_replicas == 0,
        f"generator.max_replicas={config.max_replicas} has no effect with groups; set it in each group.",
    )
    return [Kind(f"generator-{name}", _resolve(config, name, group)) for name, group in groups.items()]


def _resolve(config: GeneratorConfig, name: str, group: GroupConfig) -> GeneratorConfig:
    where = f"generator.groups.{name}"
    check(
        _GROUP.fullmatch(name), f"{where}: a group's name starts with a letter and has letters, digits and underscores."
    )
    changes = {key: value for key in _INHERITED if (value := getattr(group, key)) is not None}
    fake = overlay(config.fake, group.fake, f"{where}.fake")
    vllm = overlay(config.vllm, group.vllm, f"{where}.vllm")
    try:
        merged = replace(config, replicas=1, groups=None, fake=fake, vllm=vllm, **changes)
    except ConfigError as error:
        raise ConfigError(f"In {where}: {error}") from None
    return _sized(merged, group.replicas, group.max_replicas, where)


def _sized(config: GeneratorConfig, replicas: int, most: int, where: str) -> GeneratorConfig:
    check_range(f"{where}.replicas", replicas, low=1, high=MAX_REPLICAS)
    check_range(f"{where}.max_replicas", most, low=0, high=MAX_REPLICAS)
    check(
        most == 0 or most >= replicas,
        f"{where}.max_replicas={most} is less than {where}.replicas={replicas}; "
        f"allowed: 0 (no more than at the start) or >= {replicas}.",
    )
    return replace(config, replicas=replicas, max_replicas=most)
