"""Settings of the learner and of the algorithm: ``learner.*`` and ``algorithm.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check, check_choice, check_range

ADVANTAGES = ("raw", "group_mean", "loo", "group_norm", "whiten", "gae")
ANCHORS = ("self", "mu", "prox")
LEVELS = ("token", "geo", "prod")
COEFFICIENTS = ("one", "clip", "cap", "band")
CORRECTIONS = ("none", "truncate", "mask")
KL_PLACES = ("none", "reward", "loss")
KL_ESTIMATORS = ("k1", "k2", "k3")
AGGREGATES = ("token", "seq_mean", "seq_sum", "const")
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class AlgorithmConfig:
    """The switches of the one policy-loss kernel; ``conf/algorithm/`` holds the presets. Names follow TRL."""

    name: str = "decoupled_grpo"
    advantage: str = "group_norm"
    advantage_eps: float = 1e-4  # group_norm: (R - mean) / (std + eps)
    whiten: bool = False  # whiten the advantages over the step's tokens
    anchor: str = "prox"
    level: str = "token"
    coef: str = "clip"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float = 0.0  # 0 is off
    cap_low: float = 0.0
    cap_high: float = 5.0  # cap_low and cap_high bound the ratio itself, under coef=cap and coef=band
    correction: str = "mask"
    correction_level: str = "token"
    correction_low: float = 0.0
    correction_high: float = 5.0
    kl: str = "none"
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_importance_weighted: bool = True
    aggregate: str = "token"
    num_iterations: int = 1
    minibatches: int = 1
    entropy_coef: float = 0.0
    # critic
    gamma: float = 1.0
    lam: float = 1.0
    value_coef: float = 0.5
    value_clip: float = 0.5

    def __post_init__(self) -> None:
        check_choice("algorithm.advantage", self.advantage, ADVANTAGES)
        check_choice("algorithm.anchor", self.anchor, ANCHORS)
        check_choice("algorithm.level", self.level, LEVELS)
        check_choice("algorithm.coef", self.coef, COEFFICIENTS)
        check_choice("algorithm.correction", self.correction, CORRECTIONS)
        check_choice("algorithm.correction_level", self.correction_level, LEVELS)
        check_choice("algorithm.kl", self.kl, KL_PLACES)
        check_choice("algorithm.kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_choice("algorithm.aggregate", self.aggregate, AGGREGATES)
        for key in (
            "epsilon",
            "epsilon_high",
            "dual_clip",
            "cap_low",
            "correction_low",
            "beta",
            "entropy_coef",
            "value_coef",
        ):
            check_range(f"algorithm.{key}", getattr(self, key), low=0)
        check(
            self.dual_clip == 0 or self.dual_clip > 1,
            f"algorithm.dual_clip={self.dual_clip} is out of range; allowed: 0 (off) or > 1.",
        )
        for key in ("advantage_eps", "cap_high", "correction_high", "value_clip"):
            check_range(f"algorithm.{key}", getattr(self, key), low=0, exclusive_low=True)
        for key in ("gamma", "lam"):
            check_range(f"algorithm.{key}", getattr(self, key), low=0, high=1)
        for key in ("num_iterations", "minibatches"):
            check_range(f"algorithm.{key}", getattr(self, key), low=1)
        check(
            not (self.anchor == "mu" and self.correction != "none"),
            "algorithm.anchor=mu together with algorithm.correction counts the behavior policy twice; "
            "allowed: anchor=prox or self with a correction, or anchor=mu with correction=none.",
        )
        check(
            self.kl == "none" or self.beta > 0,
            f"algorithm.kl={self.kl} needs algorithm.beta > 0.",
        )

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.kl != "none"

    @property
    def group_relative(self) -> bool:
        return self.advantage in ("group_mean", "loo", "group_norm")


@dataclass(frozen=True)
class LearnerConfig:
    """``token_budget``: packed tokens of one forward pass; ``threads``: CPU threads of one rank."""

    backend: str = "torch"
    ranks: int = 1
    threads: int = 1
    gpus: float = 0.0  # GPUs of one rank; 0 runs it on the CPU
    learning_rate: float = 5e-5
    critic_learning_rate: float = 0.0  # 0: the policy's
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    token_budget: int = 4096
    mixed_precision: str = "none"  # none | bfloat16 | float16: autocast over float32 master weights
    gradient_checkpointing: bool = False
    compile: bool = False
    max_skipped_steps: int = 10  # non-finite steps in a row before the run fails
    virtual_step_seconds: float = 0.1  # runtime=local: what one train step costs on the virtual clock

    def __post_init__(self) -> None:
        check_choice("learner.backend", self.backend, ("torch",))
        check_choice("learner.lr_schedule", self.lr_schedule, SCHEDULES)
        check_choice("learner.mixed_precision", self.mixed_precision, ("none", "bfloat16", "float16"))
        check_range("learner.learning_rate", self.learning_rate, low=0)
        for key in ("ranks", "threads", "token_budget", "max_skipped_steps"):
            check_range(f"learner.{key}", getattr(self, key), low=1)
        for key in (
            "gpus",
            "critic_learning_rate",
            "weight_decay",
            "warmup_steps",
            "virtual_step_seconds",
            "max_grad_norm",
        ):
            check_range(f"learner.{key}", getattr(self, key), low=0)
        for key in ("adam_beta1", "adam_beta2"):
            check_range(f"learner.{key}", getattr(self, key), low=0, high=1, exclusive_high=True)
