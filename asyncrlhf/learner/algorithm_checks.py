"""What ``algorithm.*`` refuses: values out of range, and switches that contradict each other."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from asyncrlhf.errors import ContradictionError
from asyncrlhf.validation import check, check_range, check_settings

if TYPE_CHECKING:
    from asyncrlhf.learner.algorithm import AlgorithmConfig


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
    clips = own or coef in ("clip", "geoclip") or config.gate == "sat"
    caps, corrects = ("cap", "band", "signed"), own or config.correction != "none"
    traces = config.advantage == "vtrace" or config.corrects_values
    for names, read, allowed in (
        (("beta",), config.kl != "none" or not policy, "kl=loss or kl=reward"),
        (("kl_estimator", "kl_target"), config.kl != "none", "kl=loss or kl=reward"),
        (("kl_importance_weighted",), config.kl == "loss", "kl=loss"),
        (("advantage_eps",), config.advantage == "group_norm", "advantage=group_norm"),
        (("vstar_beta",), on_vstar, "advantage=vstar, or head=regress with regress_target=vstar"),
        (("epsilon", "epsilon_high"), clips, "coef=clip or geoclip"),
        (("dual_clip",), own or coef == "clip", "coef=clip"),
        (("cap_low",), own or coef in caps, "coef=cap, band or signed"),
        (("cap_high",), own or coef in (*caps, "dprob"), "coef=cap, band, signed or dprob"),
        (("sapo_temperature_pos", "sapo_temperature_neg"), own or coef == "soft", "coef=soft"),
        (("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), own or coef == "gamma", "coef=gamma"),
        (("delta_low", "delta_high"), own or coef == "dprob", "coef=dprob"),
        (("m2_threshold",), config.gate == "m2", "gate=m2"),
        (("sat_quantile",), config.gate == "sat", "gate=sat"),
        (("off_policy_mask_threshold",), config.gate == "opsm", "gate=opsm"),
        (("correction_level", "correction_low", "correction_high"), corrects, "correction=truncate or mask"),
        (("lr_ess_base",), config.lr == "sqrt_ess", "lr=sqrt_ess"),
        (("regress_target",), config.head == "regress", "head=regress"),
        (("pair_loss",), config.head == "pair", "head=pair"),
        (("gamma",), config.needs_critic or config.advantage == "whiten", "advantage=gae, vtrace or whiten"),
        (("lam", "value_coef", "value_clip"), config.needs_critic, "advantage=gae or vtrace"),
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
    own |= {"kl": "none", "aggregate": "seq_sum", "lr": "none", "whiten": False, "truncated": "keep"}
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
