"""Settings of the algorithm, ``algorithm.*``: the switches of the one policy-gradient kernel, and what they need."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from asyncrlhf.errors import ContradictionError
from asyncrlhf.validation import check, check_range, check_settings, group, setting

HEADS = ("policy", "regress", "pair")
LEVELS = ("token", "geo", "prod")
KL_PLACES = ("none", "reward", "loss")
LRS = ("none", "sqrt_ess")
GROUP_ADVANTAGES = ("group_mean", "loo", "group_norm", "mean_norm", "opob", "vstar")
CRITIC_ADVANTAGES = ("gae", "vtrace")


@dataclass(frozen=True)
class LossConfig:
    """A loss of the user's own."""

    target: str = setting(
        "",
        "The user's own loss as package.module:function, see docs/algorithms.md; it takes the place of anchor, level, "
        "coef, gate and correction.",
    )

    def __post_init__(self) -> None:
        module, _, function = self.target.partition(":")
        check(
            not self.target or (module and function and " " not in self.target),
            f"algorithm.loss.target={self.target} names no function; allowed: package.module:function.",
        )


@dataclass(frozen=True)
class AlgorithmConfig:
    """The switches of the one policy-loss kernel; ``conf/algorithm/`` holds the presets. Names follow TRL."""

    name: str = setting("decoupled_grpo", "The preset's name, in records and messages.")
    head: str = setting(
        "policy", "Policy-gradient loss, or a regression or pair loss on a group's sequence sums.", choices=HEADS
    )
    advantage: str = setting(
        "group_norm",
        "What a rollout's reward is measured against: nothing (raw), its group's mean, the other siblings, the group's "
        "mean and deviation, the group's mean as its unit, the batch's mean, the batch (whiten), a critic, the "
        "least-variance baseline, or V*. none: it does not count, and only kl=loss trains.",
        choices=(
            "none",
            "raw",
            "group_mean",
            "loo",
            "group_norm",
            "mean_norm",
            "batch_mean",
            "whiten",
            "gae",
            "vtrace",
            "opob",
            "vstar",
        ),
    )
    credit: str = setting(
        "episode",
        "What a reward is credited to: the whole episode, or, where turns earn rewards, each to the tokens of its turn "
        "and of the turns before it.",
        choices=("episode", "turn"),
    )
    advantage_shift: float = setting(0.0, "advantage=group_mean: R - (mean + shift).")
    vstar_beta: float = setting(
        1.0, "V* = vstar_beta log mean exp(R / vstar_beta), of advantage and regress_target.", low=0, exclusive_low=True
    )
    whiten: bool = setting(False, "Whitens the advantages over the step's tokens.")
    anchor: str = setting(
        "prox",
        "The ratio's denominator: the policy itself, the sampler (mu), the policy before the step (prox), prox "
        "interpolated by version lag, a slow copy (ema), or the frozen reference (heads).",
        choices=("self", "mu", "prox", "prox_interp", "ema", "ref"),
    )
    ema_decay: float = setting(
        0.0,
        "anchor=ema: target = ema_decay target + (1 - ema_decay) policy after each learner step.",
        low=0,
        high=1,
        exclusive_high=True,
    )
    ema_ratio_cap: float = setting(
        0.0, "anchor=ema: the ratio is min(mu / target, ema_ratio_cap) policy / mu (IMPACT); 0 is off.", low=0
    )
    level: str = setting(
        "token", "A ratio is a token's, the sequence's geometric mean, or its product.", choices=LEVELS
    )
    coef: str = setting(
        "clip",
        "What becomes of the ratio: dropped (one), PPO's clip, a cap, a band, tapered below 0 (signed), a soft gate, a "
        "gamma-shaped weight, a bound on probabilities (dprob), or a clip before the geometric mean.",
        choices=("one", "clip", "cap", "band", "signed", "soft", "gamma", "dprob", "geoclip"),
    )
    epsilon: float = setting(0.2, "Lower bound of the clip: ratios below 1 - epsilon stop training.", low=0)
    epsilon_high: float = setting(0.2, "Upper bound of the clip: ratios above 1 + epsilon_high stop training.", low=0)
    dual_clip: float = setting(0.0, "Largest ratio that counts for negative advantages, above 1; 0 is off.", low=0)
    cap_low: float = setting(0.0, "coef=band and signed: smallest ratio that counts.", low=0)
    cap_high: float = setting(
        5.0, "coef=cap, band, signed and dprob: largest ratio that counts.", low=0, exclusive_low=True
    )
    sapo_temperature_pos: float = setting(
        1.0, "coef=soft: steepness of the gate for positive advantages.", low=0, exclusive_low=True
    )
    sapo_temperature_neg: float = setting(
        1.05, "coef=soft: steepness of the gate for negative advantages.", low=0, exclusive_low=True
    )
    vespo_k_pos: float = setting(2.0, "coef=gamma: the weight's power for positive advantages.", low=0)
    vespo_lambda_pos: float = setting(3.0, "coef=gamma: the weight's decay for positive advantages.", low=0)
    vespo_k_neg: float = setting(3.0, "coef=gamma: the weight's power for negative advantages.", low=0)
    vespo_lambda_neg: float = setting(2.0, "coef=gamma: the weight's decay for negative advantages.", low=0)
    gate: str = setting(
        "none",
        "Takes tokens out of the loss that drifted too far: M2PO's second moment, SAT's shrinking clip, ESTR's bound "
        "that grows with a token's entropy, or whole sequences (opsm, and FlashREINFORCE's binary_kl).",
        choices=("none", "m2", "sat", "entropy", "opsm", "binary_kl"),
    )
    sat_quantile: float = setting(
        0.9, "gate=sat: quantile of |log ratio| beyond which the clip shrinks.", low=0, high=1, exclusive_low=True
    )
    off_policy_mask_threshold: float = setting(
        0.1,
        "What goes at a gate: sequences whose mean drift (opsm, if the advantage is negative) or mean binary KL from "
        "the sampler (binary_kl) is larger, in nats a token; tokens whose squared log-ratio to the sampler is larger "
        "per nat of entropy (entropy); as many harmful ones as make the mean of it larger (m2).",
        low=0,
    )
    correction: str = setting(
        "mask",
        "How the behavior weight prox / mu of stale samples counts: not at all, cut at its bounds (truncate), or, "
        "outside them, as 0 (mask).",
        choices=("none", "truncate", "mask"),
        common=True,
    )
    correction_level: str = setting(
        "token", "The behavior weight is a token's, the sequence's geometric mean, or its product.", choices=LEVELS
    )
    correction_low: float = setting(0.0, "Smallest behavior weight.", low=0)
    correction_high: float = setting(5.0, "Largest behavior weight.", low=0, exclusive_low=True)
    ratio_bound: float = setting(
        100.0, "The largest ratio, and behavior weight, that counts in the loss, from 1 on; 0 is off.", low=0
    )
    kl: str = setting("none", "Where the KL counts: nowhere, off the reward, or in the loss.", choices=KL_PLACES)
    beta: float = setting(0.0, "Weight of the KL; of the head under head=regress and head=pair.", low=0)
    kl_estimator: str = setting(
        "auto",
        "Estimator of the KL; auto is k1 in the reward and k3 in the loss. forward: of KL(ref || policy) in the loss, "
        "whose weights are ref / mu; jsd: of the Jensen-Shannon divergence in the loss.",
        choices=("auto", "k1", "k2", "k3", "forward", "jsd"),
    )
    kl_importance_weighted: bool = setting(True, "kl=loss: weighs the KL by the policy term's ratio, as it must be.")
    kl_target: str = setting("ref", "The KL is from the frozen reference, or from the sampler.", choices=("ref", "mu"))
    aggregate: str = setting(
        "token",
        "What a step's loss is the mean over: tokens, sequences' means, sequences' sums, or a constant count.",
        choices=("token", "seq_mean", "seq_sum", "const"),
    )
    num_iterations: int = setting(1, "Passes over each batch.", low=1, high=1000)
    minibatches: int = setting(1, "Optimizer updates of one pass; at most the groups of a batch.", low=1)
    entropy_coef: float = setting(0.0, "Weight of the entropy, which the loss raises.", low=0)
    lr: str = setting(
        "none", "sqrt_ess multiplies the learning rate with the root of the effective sample size (VCPO).", choices=LRS
    )
    regress_target: str = setting(
        "group", "head=regress: what a rollout is regressed on.", choices=("group", "mean", "vstar")
    )
    pair_loss: str = setting("dpo", "head=pair: loss of a group's best and worst.", choices=("dpo", "ipo", "best"))
    gamma: float = setting(
        1.0, "Critic: discount of a token further on; credit=turn: of a turn further on.", low=0, high=1
    )
    lam: float = setting(1.0, "Critic: GAE's and V-trace's lambda.", low=0, high=1)
    value_clip: float = setting(0.5, "Critic: largest change of a value in a step.", low=0, exclusive_low=True)
    rho_bar: float = setting(1.0, "advantage=vtrace: bound of the weight rho.", low=0, exclusive_low=True)
    c_bar: float = setting(1.0, "Bound of V-trace's traces c.", low=0, exclusive_low=True)
    purge_on_publish: bool = setting(False, "Empties the buffer at each publish (OAPL).")
    truncated: str = setting(
        "keep",
        "Answers cut at max_completion_length: trained as scored, masked out of the loss, or valued by the critic.",
        choices=("keep", "mask", "bootstrap"),
    )
    loss: LossConfig = group(LossConfig, "A loss of your own.")

    def __post_init__(self) -> None:
        check_algorithm(self)

    @property
    def largest_ratio(self) -> float:
        """``ratio_bound``, as the losses take it."""
        return self.ratio_bound or math.inf

    @property
    def corrects_values(self) -> bool:
        """Whether GAE's value targets are corrected for the behavior policy, as the policy's loss is."""
        return self.advantage == "gae" and self.correction != "none"

    @property
    def looks_first(self) -> bool:
        """Whether the proximal log-probs must be computed before the first update, by an extra forward pass."""
        vtrace = self.advantage == "vtrace" and self.anchor != "ema"
        return self.minibatches > 1 or vtrace or self.corrects_values or self.kl == "reward"

    @property
    def loss_estimator(self) -> str:
        """The estimator of the KL in the loss."""
        return "k3" if self.kl_estimator == "auto" else self.kl_estimator

    @property
    def whole_sequences(self) -> str:
        """The setting by which a token counts for its whole sequence, such as ``level=prod``; empty if none does."""
        if self.head == "policy" or self.pair_loss != "best":
            for key, values in (
                ("head", ("regress", "pair")),
                ("level", ("geo", "prod")),
                ("coef", ("geoclip",)),
                ("gate", ("opsm", "binary_kl")),
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
    def saved_parts(self) -> dict[str, tuple[str, bool]]:
        """Further models that a checkpoint may contain: the setting that requests each, and whether it does."""
        return {"critic": ("advantage", self.needs_critic), "ema": ("anchor", self.anchor == "ema")}

    @property
    def needs_reference(self) -> bool:
        return self.anchor == "ref" or (self.kl != "none" and self.kl_target == "ref")

    @property
    def group_relative(self) -> bool:
        """Whether a rollout's advantage depends on the other rollouts of its group."""
        return self.head != "policy" or self.advantage in GROUP_ADVANTAGES

    @property
    def comparison(self) -> str:
        """The setting that compares a rollout with its group, for messages: ``head=pair`` or ``advantage=loo``."""
        return f"advantage={self.advantage}" if self.head == "policy" else f"head={self.head}"


def check_earned(config: AlgorithmConfig, rewards: Iterable[float]) -> None:
    """Raise ConfigError for rewards of a step that the advantage is not defined for."""
    least = min(rewards, default=0.0)
    check(
        config.advantage != "mean_norm" or least >= 0,
        f"algorithm={config.name}: advantage=mean_norm has a group's mean reward as its unit, and a rollout earned "
        f"{least:g}; allowed: rewards of at least 0, or another advantage.",
    )


def check_algorithm(config: AlgorithmConfig) -> None:
    check_settings("algorithm", config)
    _check_bounds(config)
    if config.head == "policy":
        _check_advantage(config)
        _check_ratio(config)
        _check_kl(config)
    else:
        _check_head(config)
    check(
        config.truncated != "bootstrap" or config.needs_critic,
        f"algorithm.truncated=bootstrap needs a critic, and algorithm.advantage={config.advantage} has none; "
        "allowed: keep or mask, or advantage=gae or vtrace.",
    )
    check(
        not (config.loss.target and config.head != "policy"),
        f"algorithm.loss.target replaces the policy loss, and algorithm.head={config.head} has none; "
        "allowed: head=policy with loss.target, or no loss.target.",
    )
    check(
        not (config.loss.target and config.gate != "none"),
        f"algorithm.loss.target decides itself which tokens count, so that algorithm.gate={config.gate} would be "
        "ignored; allowed: gate=none.",
    )
    _check_effects(config)


def _check_effects(config: AlgorithmConfig) -> None:
    """Refuse a setting that is not its default but has no effect under the others, such as a KL's weight without a
    KL."""
    own, policy = bool(config.loss.target), config.head == "policy"
    coef = config.coef if policy else ""
    on_vstar = config.advantage == "vstar" or (config.head == "regress" and config.regress_target == "vstar")
    clips = own or coef in ("clip", "geoclip", "dprob") or config.gate == "sat"
    caps, corrects = ("cap", "band", "signed"), own or config.correction != "none"
    masks = config.gate in ("m2", "entropy", "opsm", "binary_kl")
    traces = config.advantage == "vtrace" or config.corrects_values
    discounts = config.needs_critic or config.advantage == "whiten" or config.credit == "turn"
    for names, read, allowed in (
        (("beta",), config.kl != "none" or not policy, "kl=loss or kl=reward"),
        (("kl_estimator", "kl_target"), config.kl != "none", "kl=loss or kl=reward"),
        (("kl_importance_weighted",), config.kl == "loss", "kl=loss"),
        (("vstar_beta",), on_vstar, "advantage=vstar, or head=regress with regress_target=vstar"),
        (("epsilon", "epsilon_high"), clips, "coef=clip, geoclip or dprob"),
        (("dual_clip",), own or coef == "clip", "coef=clip"),
        (("cap_low",), own or coef in caps, "coef=cap, band or signed"),
        (("cap_high",), own or coef in (*caps, "dprob"), "coef=cap, band, signed or dprob"),
        (("sapo_temperature_pos", "sapo_temperature_neg"), own or coef == "soft", "coef=soft"),
        (("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), own or coef == "gamma", "coef=gamma"),
        (("sat_quantile",), config.gate == "sat", "gate=sat"),
        (("off_policy_mask_threshold",), masks, "gate=m2, entropy, opsm or binary_kl"),
        (("correction_level", "correction_low", "correction_high"), corrects, "correction=truncate or mask"),
        (("regress_target",), config.head == "regress", "head=regress"),
        (("pair_loss",), config.head == "pair", "head=pair"),
        (("gamma",), discounts, "advantage=gae, vtrace or whiten, or credit=turn"),
        (("lam", "value_clip"), config.needs_critic, "advantage=gae or vtrace"),
        (("rho_bar",), config.advantage == "vtrace", "advantage=vtrace"),
        (("c_bar",), traces, "advantage=vtrace, or gae with a correction"),
    ):
        for declared in fields(config):
            value = getattr(config, declared.name)
            if declared.name in names and not read and value != declared.default:
                raise ContradictionError(
                    f"algorithm.{declared.name}={value} has no effect under the other settings of algorithm="
                    f"{config.name}; allowed: algorithm.{allowed}, or {declared.name}={declared.default}."
                )


def _check_bounds(config: AlgorithmConfig) -> None:
    check_range("algorithm.advantage_shift", config.advantage_shift)
    check(
        config.ratio_bound == 0 or config.ratio_bound >= 1,
        f"algorithm.ratio_bound={config.ratio_bound:g} is below the ratio of equal policies; allowed: 0 (off) or >= 1.",
    )
    for low, high in (("cap_low", "cap_high"), ("correction_low", "correction_high")):
        check(
            getattr(config, low) <= getattr(config, high),
            f"algorithm.{low}={getattr(config, low)} is above algorithm.{high}={getattr(config, high)}; "
            f"allowed: {low} <= {high}.",
        )
    check(
        config.dual_clip == 0 or config.dual_clip > 1,
        f"algorithm.dual_clip={config.dual_clip} is out of range; allowed: 0 (off) or > 1.",
    )


def _check_head(config: AlgorithmConfig) -> None:
    """The heads compute their own coefficients, so a switch of the policy loss would be ignored."""
    own: dict[str, object] = {"advantage": "raw", "level": "token", "coef": "one", "gate": "none", "correction": "none"}
    own |= {
        "kl": "none",
        "aggregate": "seq_sum",
        "lr": "none",
        "whiten": False,
        "truncated": "keep",
        "credit": "episode",
    }
    for key, value in own.items():
        given = getattr(config, key)
        check(
            given == value,
            f"algorithm.{key}={given} has no place in algorithm.head={config.head}, which makes its own coefficients "
            f"from sequence sums; allowed: {key}={str(value).lower()}.",
        )
    anchors = ("self",) if config.head == "pair" and config.pair_loss == "best" else ("ref", "mu")
    check(
        config.anchor in anchors,
        f"algorithm.anchor={config.anchor} is not what algorithm.head={config.head} measures from; "
        f"allowed: {' or '.join(anchors)}.",
    )
    check(config.beta > 0 or anchors == ("self",), f"algorithm.head={config.head} needs algorithm.beta > 0.")


def _check_advantage(config: AlgorithmConfig) -> None:
    level = config.correction_level
    check(
        config.advantage != "none" or config.kl == "loss" or bool(config.loss.target),
        f"algorithm.advantage=none leaves nothing to learn from with algorithm.kl={config.kl}; allowed: kl=loss, or "
        "another advantage.",
    )
    check(
        config.advantage_shift == 0 or config.advantage == "group_mean",
        f"algorithm.advantage_shift moves the group's mean, which algorithm.advantage={config.advantage} does not "
        "subtract; allowed: advantage=group_mean, or advantage_shift=0.",
    )
    check(
        config.advantage != "opob" or (config.anchor != "mu" and (config.correction == "none" or level != "token")),
        "algorithm.advantage=opob weighs whole sequences by the behavior weight; allowed: correction=none, or a "
        "correction with correction_level=geo or prod, and any anchor but mu.",
    )
    check(
        not (config.advantage == "opob" and config.whiten),
        "algorithm.whiten moves the baseline away from the one of least variance that algorithm.advantage=opob "
        "finds; allowed: whiten=false with opob.",
    )
    check(
        not (config.advantage == "batch_mean" and config.whiten),
        "algorithm.whiten subtracts a mean of its own, and then that of algorithm.advantage=batch_mean has no effect; "
        "allowed: whiten=false, or advantage=raw.",
    )
    for key, value in (("advantage", "opob"), ("advantage", "batch_mean"), ("coef", "geoclip")):
        check(
            config.credit == "episode" or getattr(config, key) != value,
            f"algorithm.{key}={value} has one advantage for a whole sequence, and algorithm.credit=turn one for each "
            f"turn; allowed: credit=episode, or another {key}.",
        )
    check(
        config.advantage != "vtrace" or config.anchor != "mu",
        "algorithm.advantage=vtrace holds the ratio to the behavior policy already, and algorithm.anchor=mu counts "
        "it twice; allowed: anchor=self, prox, prox_interp or ema.",
    )


def _check_ratio(config: AlgorithmConfig) -> None:
    check(
        not (config.anchor == "mu" and config.correction != "none"),
        "algorithm.anchor=mu together with algorithm.correction counts the behavior policy twice; "
        "allowed: anchor=prox or self with a correction, or anchor=mu with correction=none.",
    )
    check(
        config.anchor != "ref",
        "algorithm.anchor=ref is the heads' anchor; allowed with head=policy: self, mu, prox, prox_interp, ema.",
    )
    check(
        config.anchor != "self" or config.coef == "one" or bool(config.loss.target),
        f"algorithm.coef={config.coef} looks at a ratio that is always 1 under algorithm.anchor=self; "
        "allowed: coef=one, or another anchor.",
    )
    check(
        (config.anchor == "ema") == (config.ema_decay > 0),
        f"algorithm.anchor={config.anchor} with algorithm.ema_decay={config.ema_decay:g} does not fit; "
        "allowed: anchor=ema with ema_decay > 0, or another anchor with ema_decay=0.",
    )
    check(
        config.ema_ratio_cap == 0 or (config.anchor == "ema" and config.correction == "none"),
        f"algorithm.ema_ratio_cap={config.ema_ratio_cap:g} brings the sampler into the ratio to a slow network; "
        "allowed: anchor=ema with correction=none, or 0 (off).",
    )
    for coef, level in (("gamma", "prod"), ("geoclip", "token"), ("dprob", "token")):
        check(
            config.coef != coef or config.level == level,
            f"algorithm.coef={coef} is defined on the {level} ratio only, not on algorithm.level={config.level}; "
            f"allowed: level={level}.",
        )
    check(
        config.coef != "geoclip"
        or (config.aggregate == "seq_mean" and config.advantage not in ("gae", "vtrace", "whiten")),
        "algorithm.coef=geoclip (GMPO) is a sequence's geometric mean of ratios times its one advantage, which "
        f"algorithm.aggregate={config.aggregate} with algorithm.advantage={config.advantage} is not; "
        "allowed: aggregate=seq_mean with any advantage but gae, vtrace and whiten.",
    )
    check(
        config.coef != "dprob" or config.anchor == "mu",
        "algorithm.coef=dprob compares the probabilities of policy and sampler; allowed: anchor=mu.",
    )
    check(
        config.gate not in ("m2", "sat") or (config.anchor == "mu" and config.level == "token"),
        f"algorithm.gate={config.gate} looks at each token's ratio to the behavior policy; "
        "allowed: anchor=mu with level=token.",
    )
    check(
        config.gate != "sat" or config.coef == "clip",
        f"algorithm.gate=sat shrinks the bounds of PPO's clip, not those of algorithm.coef={config.coef}; "
        "allowed: coef=clip.",
    )


def _check_kl(config: AlgorithmConfig) -> None:
    check(config.kl == "none" or config.beta > 0, f"algorithm.kl={config.kl} needs algorithm.beta > 0.")
    check(
        config.kl_estimator != "forward" or config.kl_importance_weighted,
        "algorithm.kl_estimator=forward is a weight of each token, which algorithm.kl_importance_weighted=false drops; "
        "allowed: kl_importance_weighted=true.",
    )
    check(
        not (config.kl == "reward" and config.kl_target == "mu"),
        "algorithm.kl=reward is a penalty for leaving the reference, not the sampler (algorithm.kl_target=mu); "
        "allowed: kl=loss with kl_target=mu, or kl_target=ref.",
    )
    check(
        config.kl != "reward" or config.kl_estimator in ("auto", "k1"),
        f"algorithm.kl_estimator={config.kl_estimator} is no penalty under algorithm.kl=reward: the gradient of such a "
        "reward is not that of the KL (k3's is that of KL(pi||ref) - KL(ref||pi), which nearly cancels); "
        "allowed: k1 or auto, or kl=loss.",
    )
