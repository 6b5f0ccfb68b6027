"""Settings of the algorithm, ``algorithm.*``: the switches of the one policy-gradient kernel, and what they need."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from asyncrlhf.learner.algorithm_checks import check_algorithm
from asyncrlhf.validation import check

GROUP_ADVANTAGES = ("group_mean", "loo", "group_norm", "opob", "vstar")
CRITIC_ADVANTAGES = ("gae", "vtrace")


@dataclass(frozen=True)
class LossConfig:
    """``target``: the user's own loss as ``package.module:function``; it takes the place of anchor, level, coef, gate
    and correction, see ``learner.user_loss``."""

    target: str = ""

    def __post_init__(self) -> None:
        module, _, function = self.target.partition(":")
        check(
            not self.target or (module and function and " " not in self.target),
            f"algorithm.loss.target={self.target} names no function; allowed: package.module:function.",
        )


@dataclass(frozen=True)
class AlgorithmConfig:
    """The switches of the one policy-loss kernel; ``conf/algorithm/`` holds the presets. Names follow TRL."""

    name: str = "decoupled_grpo"
    head: str = "policy"
    advantage: str = "group_norm"
    advantage_eps: float = 1e-4  # group_norm: (R - mean) / (std + eps)
    advantage_shift: float = 0.0  # group_mean: R - (mean + shift)
    vstar_beta: float = 1.0  # V* = vstar_beta log mean exp(R / vstar_beta), of advantage and regress_target
    whiten: bool = False  # whiten the advantages over the step's tokens
    anchor: str = "prox"
    ema_decay: float = 0.0  # anchor=ema: target = ema_decay target + (1 - ema_decay) policy after each learner step
    ema_ratio_cap: float = 0.0  # anchor=ema: ratio min(mu / target, ema_ratio_cap) policy / mu (IMPACT); 0 is off
    level: str = "token"
    coef: str = "clip"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float = 0.0  # 0 is off
    cap_low: float = 0.0
    cap_high: float = 5.0  # bounds on the ratio itself, under coef=cap, band and signed; dprob has cap_high only
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    delta_low: float = 0.2  # coef=dprob: bounds on the change of a token's probability
    delta_high: float = 0.2
    gate: str = "none"
    m2_threshold: float = 0.04
    sat_quantile: float = 0.9
    off_policy_mask_threshold: float = 0.1  # gate=opsm: nats a token
    correction: str = "mask"
    correction_level: str = "token"
    correction_low: float = 0.0
    correction_high: float = 5.0
    ratio_bound: float = 100.0  # the largest ratio, and behavior weight, that counts in the loss; 0 is off
    kl: str = "none"
    beta: float = 0.0  # of the KL; of the head under head=regress and head=pair
    kl_estimator: str = "auto"  # k1 in the reward, where it alone is a penalty; k3 in the loss
    kl_importance_weighted: bool = True
    kl_target: str = "ref"
    aggregate: str = "token"
    num_iterations: int = 1
    minibatches: int = 1
    entropy_coef: float = 0.0
    lr: str = "none"
    lr_ess_base: float = 1.0  # lr=sqrt_ess: rate x min(1, ESS fraction / base)^0.5
    regress_target: str = "group"
    pair_loss: str = "dpo"
    # critic
    gamma: float = 1.0
    lam: float = 1.0
    value_coef: float = 0.5
    value_clip: float = 0.5
    rho_bar: float = 1.0  # advantage=vtrace
    c_bar: float = 1.0
    purge_on_publish: bool = False  # the buffer is emptied at each publish (OAPL)
    truncated: str = "keep"  # answers cut at max_completion_length: keep, mask out of the loss, bootstrap by the critic
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        check_algorithm(self)

    @property
    def largest_ratio(self) -> float:
        """``ratio_bound``, as the losses take it."""
        return self.ratio_bound or math.inf

    @property
    def corrects_values(self) -> bool:
        """Whether GAE's value targets are corrected for the behavior policy: where the policy's loss is."""
        return self.advantage == "gae" and self.correction != "none"

    @property
    def looks_first(self) -> bool:
        """Whether the proximal log-probs are known before the first update, which takes a forward pass of their own."""
        vtrace = self.advantage == "vtrace" and self.anchor != "ema"
        return self.minibatches > 1 or vtrace or self.corrects_values or self.kl == "reward"

    @property
    def loss_estimator(self) -> str:
        """Of the KL in the loss."""
        return "k3" if self.kl_estimator == "auto" else self.kl_estimator

    @property
    def whole_sequences(self) -> str:
        """The setting by which a token counts for its whole sequence, such as ``level=prod``; empty where none does."""
        if self.head == "policy" or self.pair_loss != "best":
            for key, values in (
                ("head", ("regress", "pair")),
                ("level", ("geo", "prod")),
                ("coef", ("geoclip",)),
                ("gate", ("opsm",)),
                ("advantage", ("opob",)),
            ):
                if getattr(self, key) in values:
                    return f"{key}={getattr(self, key)}"
        if self.correction != "none" and self.correction_level != "token":
            return f"correction_level={self.correction_level}"
        return ""

    @property
    def inert_clip(self) -> bool:
        """Whether the clip can never act: the one update of a step starts at the anchor, where every ratio is 1."""
        clips = self.head == "policy" and self.coef in ("clip", "geoclip", "soft", "cap") and not self.loss.target
        return clips and self.anchor == "prox" and self.num_iterations == self.minibatches == 1

    @property
    def needs_critic(self) -> bool:
        return self.advantage in CRITIC_ADVANTAGES

    @property
    def needs_reference(self) -> bool:
        return self.anchor == "ref" or (self.kl != "none" and self.kl_target == "ref")

    @property
    def group_relative(self) -> bool:
        """Whether a rollout is worth something only beside its siblings."""
        return self.head != "policy" or self.advantage in GROUP_ADVANTAGES

    @property
    def comparison(self) -> str:
        """The setting that ranks a rollout by its siblings, for sentences: ``head=pair`` or ``advantage=loo``."""
        return f"advantage={self.advantage}" if self.head == "policy" else f"head={self.head}"
