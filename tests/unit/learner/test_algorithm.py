"""Every combination of switches that says one thing twice, or that nothing would read, is refused in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import conf_folder
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig, LossConfig
from tests.unit.learner.worlds import needs

PRESETS = sorted((conf_folder() / "algorithm").glob("*.yaml"))
MU = {"anchor": "mu", "correction": "none"}
HEAD = {"advantage": "raw", "coef": "one", "correction": "none", "aggregate": "seq_sum", "anchor": "ref", "beta": 0.1}
REGRESS, PAIR = HEAD | {"head": "regress"}, HEAD | {"head": "pair"}

# The settings, and words of the sentence that refuses them.
REFUSED = [
    ({"anchor": "mu"}, "counts the behavior policy twice"),
    ({"anchor": "mu", "level": "prod", "correction": "truncate"}, "counts the behavior policy twice"),
    ({"anchor": "ref"}, "anchor=ref is the heads' anchor"),
    ({"anchor": "self"}, "coef=clip looks at a ratio that is always 1"),
    ({"anchor": "ema"}, "anchor=ema with algorithm.ema_decay=0 does not fit"),
    ({"ema_decay": 0.9}, "anchor=prox with algorithm.ema_decay=0.9 does not fit"),
    ({"anchor": "ema", "ema_decay": 1.0}, "ema_decay=1.0 is out of range"),
    (MU | {"coef": "gamma"}, "coef=gamma is defined on the prod ratio"),
    ({"coef": "geoclip", "level": "geo"}, "coef=geoclip is defined on the token ratio"),
    ({"coef": "geoclip"}, "which algorithm.aggregate=token with algorithm.advantage=group_norm is not"),
    ({"coef": "geoclip", "aggregate": "seq_sum"}, "which algorithm.aggregate=seq_sum"),
    ({"coef": "geoclip", "aggregate": "seq_mean", "advantage": "gae"}, "with algorithm.advantage=gae is not"),
    ({"coef": "geoclip", "aggregate": "seq_mean", "advantage": "vtrace"}, "with algorithm.advantage=vtrace is not"),
    (MU | {"coef": "dprob", "level": "prod"}, "coef=dprob is defined on the token ratio"),
    ({"coef": "dprob"}, "allowed: anchor=mu"),
    ({"gate": "m2"}, "gate=m2 looks at each token's ratio to the behavior policy"),
    ({"gate": "sat"}, "gate=sat looks at each token's ratio to the behavior policy"),
    (MU | {"gate": "m2", "level": "geo"}, "allowed: anchor=mu with level=token"),
    (MU | {"gate": "sat", "coef": "cap"}, "gate=sat shrinks the bounds of PPO's clip"),
    ({"kl": "loss"}, "kl=loss needs algorithm.beta > 0"),
    ({"kl": "reward", "beta": 0.1, "kl_target": "mu"}, "not the sampler"),
    ({"advantage_shift": -0.1}, "allowed: advantage=group_mean"),
    ({"advantage": "opob"}, "weighs whole sequences"),
    (MU | {"advantage": "opob"}, "weighs whole sequences"),
    ({"advantage": "opob", "correction": "none", "whiten": True}, "whiten moves the baseline"),
    ({"advantage": "batch_mean", "whiten": True}, "allowed: whiten=false, or advantage=raw"),
    ({"advantage": "batch_mean", "credit": "turn"}, "advantage=batch_mean has one advantage for a whole sequence"),
    ({"off_policy_mask_threshold": 0.005}, "allowed: algorithm.gate=m2, entropy, opsm or binary_kl"),
    (REGRESS | {"gate": "binary_kl"}, "gate=binary_kl has no place"),
    (MU | {"advantage": "vtrace"}, "counts it twice"),
    (REGRESS | {"advantage": "gae"}, "advantage=gae has no place in algorithm.head=regress"),
    (PAIR | {"advantage": "vtrace"}, "advantage=vtrace has no place in algorithm.head=pair"),
    (REGRESS | {"kl": "loss"}, "kl=loss has no place in algorithm.head=regress"),
    (PAIR | {"kl": "reward"}, "kl=reward has no place in algorithm.head=pair"),
    (REGRESS | {"coef": "clip"}, "coef=clip has no place"),
    (REGRESS | {"correction": "mask"}, "correction=mask has no place"),
    (REGRESS | {"level": "prod"}, "level=prod has no place"),
    (REGRESS | {"gate": "opsm"}, "gate=opsm has no place"),
    (REGRESS | {"aggregate": "token"}, "allowed: aggregate=seq_sum"),
    (REGRESS | {"lr": "sqrt_ess"}, "lr=sqrt_ess has no place"),
    (REGRESS | {"whiten": True}, "allowed: whiten=false"),
    (REGRESS | {"anchor": "prox"}, "allowed: ref or mu"),
    (PAIR | {"anchor": "ref", "pair_loss": "best"}, "allowed: self"),
    (REGRESS | {"beta": 0.0}, "head=regress needs algorithm.beta > 0"),
    (PAIR | {"beta": 0.0}, "head=pair needs algorithm.beta > 0"),
    (PAIR | {"loss": LossConfig("a:b")}, "replaces the policy loss"),
    ({"loss": LossConfig("a:b"), "gate": "opsm"}, "gate=opsm would be ignored"),
    ({"cap_low": 6.0}, "cap_low=6.0 is above algorithm.cap_high=5.0"),
    ({"correction_low": 6.0}, "correction_low=6.0 is above"),
    ({"dual_clip": 0.5}, "allowed: 0 (off) or > 1"),
    ({"sat_quantile": 1.5}, "sat_quantile=1.5 is out of range"),
    ({"rho_bar": 0.0}, "rho_bar=0.0 is out of range"),
    ({"ratio_bound": 0.5}, "ratio_bound=0.5 is below the ratio of equal policies"),
    ({"ratio_bound": float("nan")}, "ratio_bound=nan is out of range"),
    ({"ema_ratio_cap": 2.0}, "ema_ratio_cap=2 brings the sampler into"),
    ({"anchor": "ema", "ema_decay": 0.9, "ema_ratio_cap": 2.0}, "anchor=ema with correction=none"),
    ({"advantage": "loop"}, "did you mean loo?"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_wrong_combinations_are_refused_in_one_sentence(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        AlgorithmConfig(**settings)
    sentence = str(refusal.value)
    assert words in sentence and sentence.endswith(".") and "\n" not in sentence
    assert "allowed" in sentence or "needs" in sentence


@pytest.mark.parametrize(
    "settings",
    [
        {"anchor": "prox_interp", "correction": "none"},
        {"anchor": "prox_interp"},
        {"advantage": "vtrace", "anchor": "ema", "ema_decay": 0.9},
        {"kl": "loss", "beta": 0.1, "kl_target": "mu"},
        {"gate": "opsm"},
        {"gate": "binary_kl"},
        {"advantage": "batch_mean"},
        {"coef": "geoclip", "aggregate": "seq_mean", "whiten": True},
        {"ratio_bound": 0.0},
        {"loss": LossConfig("package.module:function"), "anchor": "self"},
        MU | {"gate": "sat"},
        REGRESS | {"anchor": "mu"},
    ],
)
def test_sensible_combinations_are_allowed(settings: dict[str, object]) -> None:
    AlgorithmConfig(**settings)


@pytest.mark.parametrize("target", ["mine", "mine:", ":loss", "my module:loss"])
def test_a_loss_target_names_a_function(target: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: package\.module:function"):
        LossConfig(target)


@pytest.mark.in_turn
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
@pytest.mark.more_but(every=6)
def test_a_preset_opens_with_what_it_needs(path: Path) -> None:
    """The comment's list is the one that the switches themselves give."""
    algorithm = load_config([f"algorithm={path.stem}"]).algorithm
    comment = " ".join(line.strip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    named = re.search(r"Needs ([a-z, ]+)\.", comment)
    assert named, comment
    listed = [] if named.group(1) == "nothing else" else named.group(1).split(", ")
    assert sorted(needs(algorithm)) == sorted(listed)
    assert algorithm.name == path.stem
    assert re.search(r"\d{4}\.\d{4,5}|no arXiv id|as in verl", comment), comment


@pytest.mark.parametrize("preset", ["online_dpo", "best_of_n", "tba", "apo", "vcpo", "rloo"])
def test_one_rollout_a_prompt_has_nothing_to_be_compared_with(preset: str) -> None:
    with pytest.raises(ConfigError, match=f"num_generations=1 with algorithm={preset} .* allowed: >= 2"):
        load_config([f"algorithm={preset}", "num_generations=1"])
    for alone in ("sao", "flash_reinforce"):
        load_config([f"algorithm={alone}", "num_generations=1"])
