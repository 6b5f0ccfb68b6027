"""Settings of the learner and of the services beside it: ``learner.*``, ``reference.*``, ``critic.*``; what a learner
rank is built from, and what a learner step gives."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from typing import Any

from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.validation import check, check_choice, check_keywords, check_ranges


@dataclass(frozen=True)
class WorkersConfig:
    """``where``: ``learner`` or ``service``, which alone has workers."""

    where: str = "learner"
    workers: int = 1
    threads: int = 1  # CPU threads of one worker
    gpus: float = 0.0  # GPUs of one worker; 0 runs it on the CPU
    token_budget: int = 16384  # tokens of one call, and padded tokens of one forward pass
    max_restarts: int = 3  # a worker that dies so often in a row is not started again

    def check(self, key: str, model: str) -> None:
        """Raise ConfigError, naming settings under ``key``, for a value out of range or without effect. ``model``: what
        a worker holds, in sentences."""
        check_choice(f"{key}.where", self.where, ("learner", "service"))
        check_ranges(key, self, "workers", "threads", "token_budget", low=1)
        check_ranges(key, self, "gpus", "max_restarts", low=0)
        check(
            self.gpus <= 1,
            f"{key}.gpus={self.gpus:g} is more than one worker can use; allowed: 0 to 1, or {key}.where=learner with "
            f"learner.zero_stage=3 or learner.sharding=fsdp2, which shard the {model}.",
        )
        for setting in fields(self) if self.where == "learner" else ():
            value = getattr(self, setting.name)
            check(
                value == setting.default,
                f"{key}.{setting.name}={value} has no effect with {key}.where=learner; allowed: {key}.where=service.",
            )


@dataclass(frozen=True)
class ReferenceConfig(WorkersConfig):
    """``where=learner``: the learner holds the frozen model and asks it in each step. ``where=service``: workers of
    their own do, for each rollout as it ends.

    ``dtype=auto``: float32 weights under ``learner.mixed_precision``, which is what the learner would compute.
    """

    dtype: str = "auto"  # auto | float32 | bfloat16 | float16: of the frozen weights

    def __post_init__(self) -> None:
        check_choice("reference.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        self.check("reference", "reference model")


@dataclass(frozen=True)
class CriticConfig(WorkersConfig):
    """``where=learner``: the learner's critic passes over the batch before a step's first update. ``where=service``:
    workers with a copy of it give each rollout its values as it ends. The learner trains the critic either way."""

    def __post_init__(self) -> None:
        self.check("critic", "critic")


SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "muon", "adamw_8bit")
OFFLOADS = ("none", "cpu")


@dataclass(frozen=True)
class LearnerConfig:
    """``token_budget``: packed tokens of one forward pass; ``threads``: CPU threads of one rank."""

    backend: str = "torch"  # torch | deepspeed
    ranks: int = 1
    sharding: str = "none"  # torch: none (each rank holds everything) | fsdp2
    zero_stage: int = 0  # deepspeed: 1 shards the optimizer's states over the ranks, 2 gradients too, 3 weights too
    zero_offload: str = "none"  # deepspeed: none | cpu, the optimizer's states lie and are updated in host memory
    zero_offload_params: str = "none"  # deepspeed, stage 3: none | cpu, the weights lie there too
    sequence_parallel_size: int = 1  # deepspeed: ranks that take one share of the batch together, token by token
    threads: int = 1
    gpus: float = 0.0  # GPUs of one rank; 0 runs it on the CPU
    learning_rate: float = 5e-5
    critic_learning_rate: float = 0.0  # 0: the policy's
    weight_decay: float = 0.0
    optim: str = "adamw"  # adamw | muon (AdamW for what is not a hidden matrix) | adamw_8bit | package.module:callable
    optim_args: Any = None  # more keywords of it
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    token_budget: int = 4096
    mixed_precision: str = "none"  # none | bfloat16 | float16: autocast over float32 master weights
    float32_head: bool = False  # under mixed_precision: the output layer works in float32, its logits are not rounded
    gradient_checkpointing: bool = False
    compile: bool = False
    max_skipped_steps: int = 10  # non-finite steps in a row before the run fails
    virtual_step_seconds: float = 0.1  # runtime=local: what one train step costs on the virtual clock

    def __post_init__(self) -> None:
        check_choice("learner.backend", self.backend, ("torch", "deepspeed"))
        check_choice("learner.lr_schedule", self.lr_schedule, SCHEDULES)
        self._check_optimizer()
        check_choice("learner.mixed_precision", self.mixed_precision, ("none", "bfloat16", "float16"))
        check(
            self.mixed_precision != "none" or not self.float32_head,
            "learner.float32_head=true changes nothing under learner.mixed_precision=none, where all is float32; "
            "allowed: float32_head=false, or mixed_precision bfloat16 or float16.",
        )
        whole = ("ranks", "sequence_parallel_size", "threads", "token_budget", "max_skipped_steps")
        check_ranges("learner", self, *whole, low=1)
        optimizer = ("learning_rate", "critic_learning_rate", "weight_decay", "warmup_steps", "max_grad_norm")
        check_ranges("learner", self, *optimizer, "gpus", "virtual_step_seconds", low=0)
        check_ranges("learner", self, "adam_beta1", "adam_beta2", low=0, high=1, exclusive_high=True)
        check_ranges("learner", self, "zero_stage", low=0, high=3)
        check_choice("learner.sharding", self.sharding, ("none", "fsdp2"))
        check_choice("learner.zero_offload", self.zero_offload, OFFLOADS)
        check_choice("learner.zero_offload_params", self.zero_offload_params, OFFLOADS)
        check(
            self.ranks % self.sequence_parallel_size == 0,
            f"learner.sequence_parallel_size={self.sequence_parallel_size} does not divide learner.ranks={self.ranks}; "
            "so many ranks at a time take one share of the batch.",
        )
        (self._check_deepspeed if self.backend == "deepspeed" else self._check_torch)()
        check(
            not (self.compile and self.sharded),
            f"learner.compile does not work with {self.layout}, which gathers the weights module by module.",
        )

    def _check_optimizer(self) -> None:
        check_keywords("learner.optim_args", self.optim_args)
        if ":" not in self.optim:
            check_choice("learner.optim", self.optim, OPTIMIZERS)
        check(
            self.optim != "adamw_8bit" or self.gpus > 0,
            "learner.optim=adamw_8bit needs learner.gpus: its 8-bit states live on a GPU; allowed here: adamw, muon.",
        )
        check(
            self.backend != "deepspeed" or self.optim == "adamw",
            f"learner.optim={self.optim} does not work with learner.backend=deepspeed, whose ZeRO lays out AdamW's "
            "states; allowed: adamw, or learner.backend=torch.",
        )
        check(
            self.sharding != "fsdp2" or self.optim not in ("muon", "adamw_8bit"),
            f"learner.optim={self.optim} does not work with learner.sharding=fsdp2, where no rank has a whole matrix; "
            "allowed: adamw, or an elementwise optimizer of your own.",
        )

    @property
    def sharded(self) -> bool:
        """Whether no rank holds the weights whole, so that reading them takes all ranks."""
        return self.zero_stage == 3 or self.sharding == "fsdp2"

    @property
    def shares(self) -> int:
        """Into how many parts a batch is dealt out."""
        return self.ranks // self.sequence_parallel_size

    @property
    def layout(self) -> str:
        """What decides over the files of a checkpoint, as a user would write it."""
        if self.sharding != "none":
            return f"learner.sharding={self.sharding}"
        return f"learner.backend={self.backend}" + (f" learner.zero_stage={self.zero_stage}" if self.zero_stage else "")

    def _check_torch(self) -> None:
        deepspeed_alone = {"zero_stage": 0, "zero_offload": "none", "zero_offload_params": "none"}
        for key, off in (deepspeed_alone | {"sequence_parallel_size": 1}).items():
            value = getattr(self, key)
            check(value == off, f"learner.{key}={value} needs learner.backend=deepspeed, not {self.backend}.")
        check(
            self.sharding == "none" or self.mixed_precision != "float16",
            "learner.mixed_precision=float16 needs learner.sharding=none; allowed with fsdp2: none, bfloat16.",
        )

    def _check_deepspeed(self) -> None:
        check(
            importlib.util.find_spec("deepspeed"),
            "learner.backend=deepspeed needs the package deepspeed, which is not installed: "
            "pip install 'asyncrlhf[deepspeed]', or learner.backend=torch.",
        )
        check(
            self.sharding == "none",
            f"learner.sharding={self.sharding} needs learner.backend=torch; with deepspeed, learner.zero_stage shards.",
        )
        check(
            self.mixed_precision != "float16",
            "learner.mixed_precision=float16 needs learner.backend=torch; allowed with deepspeed: none, bfloat16.",
        )
        for key, least in (("zero_offload", 1), ("zero_offload_params", 3)):
            check(
                getattr(self, key) == "none" or self.zero_stage >= least,
                f"learner.{key}=cpu needs learner.zero_stage of at least {least}, not {self.zero_stage}.",
            )


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """What a backend is built from, beside its models and its place among the ranks.

    Args:
        steps: learner steps of the whole run, for the learning-rate schedule.
        temperature: the generator's sampling temperature; policy log-probs are taken at the same one, so that policy
            and behavior log-probs speak of one distribution; filters of the sampler come with the batch, as the sets
            of tokens that they kept. 0, greedy, counts as 1.
        max_completion_length: in tokens, the constant of ``algorithm.aggregate=const``.
        reference_served: batches come with the reference's log-probs, so that no such model is needed.
        critic_served: batches come with the critic's values, so that the backend makes no pass of its own for them.
    """

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    steps: int
    temperature: float = 1.0
    max_completion_length: int | None = None
    reference_served: bool = False
    critic_served: bool = False


@dataclass(frozen=True)
class StepResult:
    """What one learner step did. ``skipped``: the gradient was not finite and the weights did not move."""

    metrics: dict[str, float]
    skipped: bool = False
    seconds: float = 0.0
