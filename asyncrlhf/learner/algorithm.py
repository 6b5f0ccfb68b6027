"""Settings of the algorithm, ``algorithm.*``: the switches of the one policy-gradient kernel, and what they need."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from asyncrlhf.validation import check, check_choice, check_range

HEADS = ("policy", "regress", "pair")
ADVANTAGES = ("raw", "group_mean", "loo", "group_norm", "whiten", "gae", "vtrace", "opob", "vstar")
ANCHORS = ("self", "mu", "prox", "prox_interp", "ema", "ref")
LEVELS = ("token", "geo", "prod")
COEFFICIENTS = ("one", "clip", "cap", "band", "signed", "soft", "gamma", "dprob", "geoclip")
GATES = ("none", "m2", "sat", "opsm")
CORRECTIONS = ("none", "truncate", "mask")
KL_PLACES = ("none", "reward", "loss")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_TARGETS = ("ref", "mu")
AGGREGATES = ("token", "seq_mean", "seq_sum", "const")
LR_RULES = ("none", "sqrt_ess")
REGRESS_TARGETS = ("group", "mean", "vstar")
PAIR_LOSSES = ("dpo", "ipo", "best")

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
    kl_estimator: str = "k3"
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
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_ranges()
        if self.head == "policy":
            self._check_advantage()
            self._check_ratio()
            self._check_kl()
        else:
            self._check_head()
        check(
            not (self.loss.target and self.head != "policy"),
            f"algorithm.loss.target replaces the policy loss, and algorithm.head={self.head} has none; "
            "allowed: head=policy with loss.target, or no loss.target.",
        )
        check(
            not (self.loss.target and self.gate != "none"),
            f"algorithm.loss.target decides itself which tokens count, so that algorithm.gate={self.gate} would be "
            "ignored; allowed: gate=none.",
        )

    def _check_choices(self) -> None:
        allowed = {
            "head": HEADS,
            "advantage": ADVANTAGES,
            "anchor": ANCHORS,
            "level": LEVELS,
            "coef": COEFFICIENTS,
            "gate": GATES,
            "correction": CORRECTIONS,
            "correction_level": LEVELS,
            "kl": KL_PLACES,
            "kl_estimator": KL_ESTIMATORS,
            "kl_target": KL_TARGETS,
            "aggregate": AGGREGATES,
            "lr": LR_RULES,
            "regress_target": REGRESS_TARGETS,
            "pair_loss": PAIR_LOSSES,
        }
        for key, choices in allowed.items():
            check_choice(f"algorithm.{key}", getattr(self, key), choices)

    def _check_ranges(self) -> None:
        not_negative = ["epsilon", "epsilon_high", "dual_clip", "cap_low", "correction_low", "beta", "entropy_coef"]
        not_negative += ["value_coef", "delta_low", "delta_high", "m2_threshold", "off_policy_mask_threshold"]
        not_negative += ["vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg", "ema_ratio_cap"]
        positive = ["advantage_eps", "cap_high", "correction_high", "value_clip", "vstar_beta"]
        positive += ["sapo_temperature_pos", "sapo_temperature_neg", "rho_bar", "c_bar"]
        for key in not_negative:
            check_range(f"algorithm.{key}", getattr(self, key), low=0)
        for key in positive:
            check_range(f"algorithm.{key}", getattr(self, key), low=0, exclusive_low=True)
        for key in ("gamma", "lam"):
            check_range(f"algorithm.{key}", getattr(self, key), low=0, high=1)
        for key in ("num_iterations", "minibatches"):
            check_range(f"algorithm.{key}", getattr(self, key), low=1)
        check_range("algorithm.advantage_shift", self.advantage_shift)
        check_range("algorithm.ratio_bound", self.ratio_bound, low=0)
        check(
            self.ratio_bound == 0 or self.ratio_bound >= 1,
            f"algorithm.ratio_bound={self.ratio_bound:g} is below that of equal policies; allowed: 0 (off) or >= 1.",
        )
        check_range("algorithm.ema_decay", self.ema_decay, low=0, high=1, exclusive_high=True)
        check_range("algorithm.sat_quantile", self.sat_quantile, low=0, high=1, exclusive_low=True)
        check_range("algorithm.lr_ess_base", self.lr_ess_base, low=0, high=1, exclusive_low=True)
        for low, high in (("cap_low", "cap_high"), ("correction_low", "correction_high")):
            check(
                getattr(self, low) <= getattr(self, high),
                f"algorithm.{low}={getattr(self, low)} is above algorithm.{high}={getattr(self, high)}; "
                f"allowed: {low} <= {high}.",
            )
        check(
            self.dual_clip == 0 or self.dual_clip > 1,
            f"algorithm.dual_clip={self.dual_clip} is out of range; allowed: 0 (off) or > 1.",
        )

    def _check_head(self) -> None:
        """The heads make their own coefficients, so that a switch of the policy loss would be ignored."""
        own: dict[str, object] = {
            "advantage": "raw",
            "level": "token",
            "coef": "one",
            "gate": "none",
            "correction": "none",
        }
        own |= {"kl": "none", "aggregate": "seq_sum", "lr": "none", "whiten": False}
        for key, value in own.items():
            given = getattr(self, key)
            check(
                given == value,
                f"algorithm.{key}={given} has no place in algorithm.head={self.head}, which makes its own coefficients "
                f"from sequence sums; allowed: {key}={str(value).lower()}.",
            )
        anchors = ("self",) if self.head == "pair" and self.pair_loss == "best" else ("ref", "mu")
        check(
            self.anchor in anchors,
            f"algorithm.anchor={self.anchor} is not what algorithm.head={self.head} measures from; "
            f"allowed: {' or '.join(anchors)}.",
        )
        check(
            self.beta > 0 or anchors == ("self",),
            f"algorithm.head={self.head} needs algorithm.beta > 0.",
        )

    def _check_advantage(self) -> None:
        check(
            self.advantage_shift == 0 or self.advantage == "group_mean",
            f"algorithm.advantage_shift moves the group's mean, which algorithm.advantage={self.advantage} does not "
            "subtract; allowed: advantage=group_mean, or advantage_shift=0.",
        )
        check(
            self.advantage != "opob" or (self.anchor != "mu" and not self._token_correction),
            "algorithm.advantage=opob weighs whole sequences by the behavior weight; allowed: correction=none, or a "
            "correction with correction_level=geo or prod, and any anchor but mu.",
        )
        check(
            not (self.advantage == "opob" and self.whiten),
            "algorithm.whiten moves the baseline away from the one of least variance that algorithm.advantage=opob "
            "finds; allowed: whiten=false with opob.",
        )
        check(
            self.advantage != "vtrace" or self.anchor != "mu",
            "algorithm.advantage=vtrace holds the ratio to the behavior policy already, and algorithm.anchor=mu counts "
            "it twice; allowed: anchor=self, prox, prox_interp or ema.",
        )

    @property
    def _token_correction(self) -> bool:
        return self.correction != "none" and self.correction_level == "token"

    def _check_ratio(self) -> None:
        check(
            not (self.anchor == "mu" and self.correction != "none"),
            "algorithm.anchor=mu together with algorithm.correction counts the behavior policy twice; "
            "allowed: anchor=prox or self with a correction, or anchor=mu with correction=none.",
        )
        check(
            self.anchor != "ref",
            "algorithm.anchor=ref is the heads' anchor; allowed with head=policy: self, mu, prox, prox_interp, ema.",
        )
        check(
            self.anchor != "self" or self.coef == "one" or bool(self.loss.target),
            f"algorithm.coef={self.coef} looks at a ratio that is always 1 under algorithm.anchor=self; "
            "allowed: coef=one, or another anchor.",
        )
        check(
            (self.anchor == "ema") == (self.ema_decay > 0),
            f"algorithm.anchor={self.anchor} with algorithm.ema_decay={self.ema_decay:g} does not fit; "
            "allowed: anchor=ema with ema_decay > 0, or another anchor with ema_decay=0.",
        )
        check(
            self.ema_ratio_cap == 0 or (self.anchor == "ema" and self.correction == "none"),
            f"algorithm.ema_ratio_cap={self.ema_ratio_cap:g} brings the sampler into the ratio to a slow network; "
            "allowed: anchor=ema with correction=none, or 0 (off).",
        )
        for coef, level in (("gamma", "prod"), ("geoclip", "token"), ("dprob", "token")):
            check(
                self.coef != coef or self.level == level,
                f"algorithm.coef={coef} is defined on the {level} ratio only, not on algorithm.level={self.level}; "
                f"allowed: level={level}.",
            )
        check(
            self.coef != "geoclip" or (self.aggregate == "seq_mean" and self.advantage not in CRITIC_ADVANTAGES),
            "algorithm.coef=geoclip (GMPO) is a sequence's geometric mean of ratios times its one advantage, which "
            f"algorithm.aggregate={self.aggregate} with algorithm.advantage={self.advantage} is not; "
            "allowed: aggregate=seq_mean with any advantage but gae and vtrace.",
        )
        check(
            self.coef != "dprob" or self.anchor == "mu",
            "algorithm.coef=dprob compares the probabilities of policy and sampler; allowed: anchor=mu.",
        )
        check(
            self.gate not in ("m2", "sat") or (self.anchor == "mu" and self.level == "token"),
            f"algorithm.gate={self.gate} looks at each token's ratio to the behavior policy; "
            "allowed: anchor=mu with level=token.",
        )
        check(
            self.gate != "sat" or self.coef == "clip",
            f"algorithm.gate=sat shrinks the bounds of PPO's clip, not those of algorithm.coef={self.coef}; "
            "allowed: coef=clip.",
        )

    def _check_kl(self) -> None:
        check(self.kl == "none" or self.beta > 0, f"algorithm.kl={self.kl} needs algorithm.beta > 0.")
        check(
            not (self.kl == "reward" and self.kl_target == "mu"),
            "algorithm.kl=reward is the penalty of the sampler, whose distance to algorithm.kl_target=mu, itself, is "
            "always 0; allowed: kl=loss with kl_target=mu, or kl_target=ref.",
        )

    @property
    def largest_ratio(self) -> float:
        """``ratio_bound``, as the losses take it."""
        return self.ratio_bound or math.inf

    @property
    def needs(self) -> frozenset[str]:
        """Which of mu, prox, ref, critic, group, ema the algorithm needs beside the policy of the pass itself."""
        corrected = self.correction != "none"
        own_loss = bool(self.loss.target)
        penalty = self.kl != "none"
        found = {
            "mu": self.anchor in ("mu", "prox_interp") or corrected or self.gate != "none" or own_loss
            or self.ema_ratio_cap > 0
            or self.advantage == "vtrace" or self.lr != "none" or self.kl == "reward"
            or (penalty and self.kl_target == "mu"),
            "prox": self.anchor == "prox" or own_loss or self.lr != "none"
            or (self.anchor != "ema" and (self.advantage == "vtrace" or (corrected and self.anchor == "self"))),
            "ref": self.anchor == "ref" or (penalty and self.kl_target == "ref"),
            "critic": self.advantage in CRITIC_ADVANTAGES,
            "group": self.group_relative,
            "ema": self.anchor == "ema",
        }  # fmt: skip
        return frozenset(name for name, needed in found.items() if needed)

    @property
    def needs_critic(self) -> bool:
        return self.advantage in CRITIC_ADVANTAGES

    @property
    def needs_reference(self) -> bool:
        return "ref" in self.needs

    @property
    def group_relative(self) -> bool:
        """Whether a rollout is worth something only beside its siblings."""
        return self.head != "policy" or self.advantage in GROUP_ADVANTAGES

    @property
    def comparison(self) -> str:
        """The setting that ranks a rollout by its siblings, for sentences: ``head=pair`` or ``advantage=loo``."""
        return f"advantage={self.advantage}" if self.head == "policy" else f"head={self.head}"
