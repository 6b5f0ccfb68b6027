"""Settings of the learner and of the services beside it: ``learner.*``, ``reference.*``, ``critic.*``; the
spec of a learner rank, and the result of a learner step."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import MISSING, dataclass, fields
from typing import Any

from asyncrlhf.data.number_formats import AUTO, PRECISIONS, suits_bfloat16
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.validation import DAY, check, check_choice, check_keywords, check_settings, overlay, setting

# Sizes of groups of ranks that are given the same share of a batch.
PARALLEL = (
    "sequence_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size",
    "tensor_parallel_size",
)  # fmt: skip


@dataclass(frozen=True)
class WorkersConfig:
    """Where a model other than the policy runs: in the learner or in separate workers."""

    workers: int = setting(
        0,
        "Workers that ask the model for each rollout as it ends; 0: the learner does, in each step.",
        low=0,
        high=10**4,
    )
    threads: int = setting(1, "CPU threads of one worker.", low=1, high=1024)
    gpus: float = setting(0.0, "GPUs of one worker, at most 1; 0 runs it on the CPU.", low=0)
    token_budget: int = setting(16384, "Tokens of one call, and of one forward pass.", low=1)

    def check(self, key: str, model: str) -> None:
        """Raise ConfigError, naming settings under ``key``, for a value out of range or without effect. ``model``: what
        a worker holds, in sentences."""
        check_settings(key, self)
        check(
            self.gpus <= 1,
            f"{key}.gpus={self.gpus:g} is more than one worker can use; allowed: 0 to 1, or {key}.workers=0 with "
            f"learner.zero_stage=3 or learner.sharding=fsdp2, which shard the {model}.",
        )
        for declared in fields(self) if not self.workers else ():
            value, mapping = getattr(self, declared.name), declared.default is MISSING
            given = f"{key}.{declared.name}" if mapping else f"{key}.{declared.name}={value}"
            check(
                not value if mapping else value == declared.default,
                f"{given} has no effect with {key}.workers=0; allowed: {key}.workers >= 1.",
            )


@dataclass(frozen=True)
class Teacher:
    """One of several references."""

    path: str = setting("", "The teacher's checkpoint: with the policy's tokens.")
    weight: float = setting(1.0, "The teacher's share of the mixture, of the sum of all weights.", low=0)


@dataclass(frozen=True)
class ReferenceConfig(WorkersConfig):
    """``workers=0``: the learner holds the frozen model and uses it in each step. Otherwise: separate workers
    use it for each rollout as it ends."""

    path: str = setting(
        "", "The reference policy's checkpoint, such as a teacher's: with the policy's tokens; empty: model.path's."
    )
    teachers: dict[str, Any] = setting(
        {},
        "Several references by name in place of path: a rollout is compared with the teacher that its row's column "
        "teacher names, or else with the mixture of all, token by token.",
        entries=Teacher,
    )
    dtype: str = setting(
        "auto",
        "Number format of the frozen weights; auto is float32 under learner.mixed_precision, as the learner computes, "
        "and model.dtype otherwise.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )

    def __post_init__(self) -> None:
        self.check("reference", "reference model")
        check(not (self.path and self.teachers), "reference.path and reference.teachers are both given; allowed: one.")
        for name, teacher in self.each.items():
            check_settings(f"reference.teachers.{name}", teacher)
            check(teacher.path, f"reference.teachers.{name}.path is empty; allowed: a checkpoint.")
        check(
            not self.teachers or sum(teacher.weight for teacher in self.each.values()) > 0,
            "The weights of reference.teachers are all 0; allowed: at least one above 0.",
        )

    @property
    def each(self) -> dict[str, Teacher]:
        """``teachers`` by name. OmegaConf has no frozen dataclasses as values of a dictionary: typed here."""
        return {str(name): overlay(Teacher(), raw, f"reference.teachers.{name}") for name, raw in self.teachers.items()}

    @property
    def given(self) -> dict[str, str]:
        """The checkpoints that are not the policy's own, by their settings."""
        own = {"reference.path": self.path} if self.path else {}
        return own | {f"reference.teachers.{name}.path": teacher.path for name, teacher in self.each.items()}


@dataclass(frozen=True)
class CriticConfig(WorkersConfig):
    """``workers=0``: the learner's critic computes the batch's values before a step's first update.
    Otherwise: workers with a copy of it compute each rollout's values as it ends. The learner trains the critic
    in both cases."""

    def __post_init__(self) -> None:
        self.check("critic", "critic")


SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "muon", "adamw_8bit")
OFFLOADS = ("none", "cpu", "cpu_params")
# PPO's usual weight of the critic's loss; Adam's steps do not depend on it, only where the gradient is clipped does.
VALUE_COEF = 0.5
# Steps in a row without a finite gradient: a burst of bad rollouts ends sooner, a broken policy never.
MOST_SKIPPED = 10
SHARDINGS = ("none", "fsdp2")
REDUCTIONS = ("microbatch", "update")


@dataclass(frozen=True)
class LearnerConfig:
    """The learner: its backend and ranks, its optimizer, its memory."""

    backend: str = setting("torch", "What holds and updates the weights.", choices=("torch", "deepspeed"), common=True)
    ranks: int = setting(1, "Learner processes; each trains its share of every batch.", low=1, high=10**4, common=True)
    sharding: str = setting(
        "none", "backend=torch: every rank holds everything (none), or FSDP2 deals the weights out.", choices=SHARDINGS
    )
    dp_replicate_size: int = setting(
        1, "sharding=fsdp2: copies of the sharded weights (HSDP); each is dealt out over its part of the ranks.", low=1
    )
    tensor_parallel_size: int = setting(
        1, "backend=torch: ranks over which each matrix is dealt out, by the model's own plan.", low=1
    )
    expert_parallel_size: int = setting(
        1, "backend=torch: ranks over which the experts of a mixture-of-experts model are dealt out.", low=1
    )
    context_parallel_size: int = setting(
        1, "backend=torch: ranks over which the tokens of a share are dealt out; attention goes round a ring.", low=1
    )
    pipeline_parallel_size: int = setting(
        1, "backend=torch: ranks over which the layers are dealt out, the stages of one pipeline.", low=1
    )
    gradient_reduction: str = setting(
        "microbatch",
        "sharding=fsdp2: gradients are dealt out after each microbatch, or once an update, which holds them whole till "
        "then: 4 bytes a parameter on each rank.",
        choices=REDUCTIONS,
    )
    zero_stage: int = setting(
        0, "backend=deepspeed: 1 shards the optimizer's states over the ranks, 2 gradients, too, 3 weights, too.",
        low=0, high=3,
    )  # fmt: skip
    zero_offload: str = setting(
        "none",
        "backend=deepspeed: keeps and updates the optimizer's states in host memory (cpu); at stage 3 the weights, too "
        "(cpu_params).",
        choices=OFFLOADS,
    )
    sequence_parallel_size: int = setting(
        1, "backend=deepspeed: ranks that take one share of the batch together, token by token.", low=1
    )
    threads: int = setting(1, "CPU threads of one rank.", low=1, high=1024)
    gpus: float = setting(0.0, "GPUs of one rank; 0 runs it on the CPU.", low=0, high=1024, common=True)
    learning_rate: float = setting(5e-5, "AdamW's learning rate, after warm-up.", low=0, common=True)
    critic_learning_rate: float = setting(0.0, "The critic's learning rate; 0 is the policy's.", low=0)
    weight_decay: float = setting(0.0, "AdamW's weight decay; not of biases and norms.", low=0)
    optim: str = setting(
        "adamw",
        "The optimizer: adamw, muon (torch's, with AdamW for what is not a hidden matrix), adamw_8bit (GPUs, by "
        "bitsandbytes), or package.module:callable.",
    )
    optim_args: Any = setting(None, "More keywords of the optimizer, by name.")
    adam_beta1: float = setting(0.9, "AdamW's decay of the gradient's mean.", low=0, high=1, exclusive_high=True)
    adam_beta2: float = setting(0.95, "AdamW's decay of the squared gradient.", low=0, high=1, exclusive_high=True)
    max_grad_norm: float = setting(1.0, "Gradients of a larger norm are scaled down to it; 0 leaves them.", low=0)
    lr_schedule: str = setting("constant", "How the learning rate falls over the run's steps.", choices=SCHEDULES)
    warmup_steps: int = setting(0, "Learner steps over which the learning rate rises from 0.", low=0)
    token_budget: int = setting(4096, "Packed tokens of one forward pass; more need more memory.", low=1)
    packing: bool | None = setting(
        None,
        "Sequences pass the model packed, or one at a time by the model's own forward, slower; null: packed if that "
        "equals each sequence alone, compared at the start.",
    )
    mixed_precision: str = setting(
        "none",
        "Format of the passes; the optimizer's weights stay float32. bfloat16 casts them once an update, float16 by "
        "autocast; auto is bfloat16 on GPUs and on CPUs that have instructions for it, else none.",
        choices=(*PRECISIONS, AUTO),
    )
    float32_head: bool = setting(
        False, "Under mixed_precision the output layer works in float32, so that its logits are not rounded."
    )
    gradient_checkpointing: bool | None = setting(
        False,
        "Computes activations again in the backward pass, to save memory; null: on a GPU, of as many decoder layers as "
        "its free memory asks for.",
    )
    compile: bool = setting(
        False, "Compiles the policy's decoder layers by torch.compile, all of them as one; the first step waits for it."
    )
    routing_replay: bool = setting(
        False,
        "Mixtures of experts: each token passes the experts that the generator chose for it; else those that the "
        "present weights choose.",
    )
    deterministic: bool = setting(
        False,
        "The passes and updates of the policy, the reference and the critic use only algorithms that give the same "
        "bits again on the same GPU; slower.",
    )
    virtual_step_seconds: float = setting(
        0.1, "runtime=local: seconds that one learner step costs on the virtual clock.", low=0, high=DAY
    )

    def __post_init__(self) -> None:
        check_settings("learner", self)
        if self.mixed_precision == AUTO:
            object.__setattr__(self, "mixed_precision", "bfloat16" if suits_bfloat16(self.gpus) else "none")
        self._check_optimizer()
        check(
            self.mixed_precision != "none" or not self.float32_head,
            "learner.float32_head=true changes nothing under learner.mixed_precision=none, where all is float32; "
            "allowed: float32_head=false, or mixed_precision bfloat16 or float16.",
        )
        check(
            self.sharding == "fsdp2" or self.gradient_reduction == "microbatch",
            "learner.gradient_reduction=update needs learner.sharding=fsdp2; elsewhere gradients are added up over the "
            "ranks once an update, or, under learner.zero_stage 2 and 3, after each microbatch.",
        )
        check_layout(self)
        (self._check_deepspeed if self.backend == "deepspeed" else self._check_torch)()
        check(
            not (self.routing_replay and self.compile),
            "learner.routing_replay does not work with learner.compile, which would compile the routers' own choice; "
            "allowed: compile=false.",
        )
        together = self.sharded or self.zero_stage or self.sequence_parallel_size * self.context_parallel_size > 1
        check(
            self.gradient_checkpointing is not None or not together,
            "learner.gradient_checkpointing=null does not work with ranks that pass one layer together "
            f"({self.dealt_out or self.layout}), which must repeat the same ones; allowed: true or false.",
        )
        check(
            not (self.compile and self.zero_stage == 3),
            f"learner.compile does not work with {self.layout}, which gathers the weights module by module; allowed: "
            "learner.sharding=fsdp2.",
        )
        check(
            not (self.compile and self.tensor_parallel_size > 1),
            f"learner.compile does not work with learner.tensor_parallel_size={self.tensor_parallel_size}: torch's "
            "compiler fails on layers that transformers' plan divides; allowed: tensor_parallel_size=1.",
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
            not (self.in_rows and self.optim in ("muon", "adamw_8bit")),
            f"learner.optim={self.optim} does not work with {self.dealt_out}, where no rank has a whole matrix; "
            "allowed: adamw, or an elementwise optimizer of your own.",
        )

    @property
    def sharded(self) -> bool:
        """Whether no rank holds the weights whole, so that reading them takes all ranks."""
        return self.zero_stage == 3 or self.in_rows or self.pipeline_parallel_size > 1

    @property
    def in_rows(self) -> bool:
        """Whether all parameters are DTensors, each with its layout over the mesh of the ranks."""
        divided = self.sharding == "fsdp2" or self.tensor_parallel_size * self.expert_parallel_size > 1
        return divided and self.pipeline_parallel_size == 1

    @property
    def casts_weights(self) -> bool:
        """Whether the layout has its own copies of the weights in the passes' format: FSDP2's units, ZeRO's engines."""
        return self.in_rows or self.zero_stage > 0

    @property
    def dealt_out(self) -> str:
        """The settings that divide the weights over ranks, as a user would write them."""
        found = [f"learner.{key}={getattr(self, key)}" for key in PARALLEL if getattr(self, key) > 1]
        return " ".join(found if self.sharding == "none" else [f"learner.sharding={self.sharding}", *found])

    @property
    def shares(self) -> int:
        """The number of parts into which a batch is divided: ranks that hold parts of one model or of one sequence get
        the same part."""
        return self.ranks // math.prod(getattr(self, key) for key in PARALLEL)

    @property
    def copies(self) -> int:
        """The number of ranks whose gradients of one weight are summed: those with different shares or different tokens
        of one share."""
        return self.shares * self.context_parallel_size

    @property
    def mesh(self) -> dict[str, int]:
        """The ranks' mesh: the size of each dimension by its name, the one with neighbouring ranks last. Ranks that
        split a share's tokens hold weights like ranks of different shares."""
        replicas = self.dp_replicate_size if self.sharding == "fsdp2" else self.copies
        return {
            "replicate": replicas,
            "shard": self.copies // replicas,
            "pipeline": self.pipeline_parallel_size,
            "expert": self.expert_parallel_size,
            "tensor": self.tensor_parallel_size,
        }

    @property
    def layout(self) -> str:
        """The settings that determine the files of a checkpoint, as a user would write them."""
        if self.in_rows:
            return "learner.sharding=fsdp2"  # with tensor or expert parallelism, too: any such layout reads the files
        return f"learner.backend={self.backend}" + (f" learner.zero_stage={self.zero_stage}" if self.zero_stage else "")

    def _check_torch(self) -> None:
        deepspeed_alone = {"zero_stage": 0, "zero_offload": "none"}
        for key, off in (deepspeed_alone | {"sequence_parallel_size": 1}).items():
            value = getattr(self, key)
            check(value == off, f"learner.{key}={value} needs learner.backend=deepspeed, not {self.backend}.")
        check(
            not self.in_rows or self.mixed_precision != "float16",
            "learner.mixed_precision=float16 needs learner.sharding=none and no tensor or expert parallelism; "
            f"allowed with {self.dealt_out}: none, bfloat16.",
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
        for key in PARALLEL[1:]:
            check(
                getattr(self, key) == 1,
                f"learner.{key}={getattr(self, key)} needs learner.backend=torch, not deepspeed.",
            )
        check(
            self.mixed_precision != "float16",
            "learner.mixed_precision=float16 needs learner.backend=torch; allowed with deepspeed: none, bfloat16.",
        )
        least = {"none": 0, "cpu": 1, "cpu_params": 3}[self.zero_offload]
        check(
            self.zero_stage >= least,
            f"learner.zero_offload={self.zero_offload} needs learner.zero_stage of at least {least}, not "
            f"{self.zero_stage}.",
        )


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """The settings of a backend, beside its models and its place among the ranks.

    Args:
        steps: learner steps of the whole run, for the learning-rate schedule.
        temperature: the generator's sampling temperature; policy log-probs are taken at the same one, so that policy
            and behavior log-probs refer to one distribution; the sampler's filters come with the batch, as the sets of
            tokens that they kept. 0, greedy, counts as 1.
        max_completion_length: in tokens, the constant of ``algorithm.aggregate=const``.
        reference_served: batches come with the reference's log-probs, so that no such model is needed.
        critic_served: batches come with the critic's values, so that the backend makes no pass for them.
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
    """The outcome of one learner step. ``skipped``: the gradient was not finite and the weights did not move."""

    metrics: dict[str, float]
    skipped: bool = False
    seconds: float = 0.0


def check_layout(config: LearnerConfig) -> None:
    """Raise ConfigError for sizes that do not fit the ranks or each other."""
    _check_pipeline(config)
    _check_mesh(config)
    if config.packing is False:
        check_whole_sequences(config, "learner.packing=false")


def check_whole_sequences(config: LearnerConfig, why: str) -> None:
    """Raise ConfigError for settings that need packed sequences. ``why`` the run has none, as a part of a sentence."""
    for key in PARALLEL:
        size = getattr(config, key)
        check(
            size == 1,
            f"learner.{key}={size} needs packed sequences, but they pass this model one at a time ({why}); "
            f"allowed: {key}=1, or learner.sharding=fsdp2 or learner.zero_stage=3 for a model of this size.",
        )
    check(
        not config.routing_replay,
        f"learner.routing_replay needs packed sequences, but they pass this model one at a time ({why}); "
        "allowed: false.",
    )


def _check_pipeline(config: LearnerConfig) -> None:
    size = config.pipeline_parallel_size
    others = {
        "backend": "torch", "sharding": "none", "sequence_parallel_size": 1, "context_parallel_size": 1,
        "compile": False, "optim": "adamw",
    }  # fmt: skip
    for key, allowed in others.items() if size > 1 else ():
        value = getattr(config, key)
        check(
            value == allowed,
            f"learner.{key}={value} does not work with learner.pipeline_parallel_size={size}; "
            f"allowed: {key}={allowed}.",
        )
    check(
        size == 1 or config.mixed_precision != "float16",
        f"learner.mixed_precision=float16 does not work with learner.pipeline_parallel_size={size}; "
        "allowed: none, bfloat16.",
    )


def _check_mesh(config: LearnerConfig) -> None:
    for key in PARALLEL:
        size = getattr(config, key)
        check(
            config.ranks % size == 0,
            f"learner.{key}={size} does not divide learner.ranks={config.ranks}; "
            "so many ranks at a time take one share of the batch.",
        )
    together = math.prod(getattr(config, key) for key in PARALLEL)
    check(
        config.ranks % together == 0,
        f"learner.ranks={config.ranks} is not a multiple of {together}, the product of {config.dealt_out}: "
        "so many ranks at a time take one share of the batch.",
    )
    check(
        config.sharding == "fsdp2" or config.dp_replicate_size == 1,
        f"learner.dp_replicate_size={config.dp_replicate_size} needs learner.sharding=fsdp2; without sharding each "
        "of the ranks' groups holds a copy.",
    )
    check(
        config.copies % config.dp_replicate_size == 0,
        f"learner.dp_replicate_size={config.dp_replicate_size} does not divide the {config.copies} ranks over which "
        f"learner.ranks={config.ranks} deal out the tokens of a batch.",
    )
