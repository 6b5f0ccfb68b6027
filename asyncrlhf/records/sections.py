"""The section of each metric: the headings under which W&B, TensorBoard and `asyncrlhf watch` group the curves."""

from __future__ import annotations

import re

# By whole name first, then by the patterns in their order. A name with a slash (``lag_1/kl``, ``reward/rule``) has its
# section already.
SECTIONS: dict[str, tuple[str, ...]] = {
    "reward": (
        "reward_mean", "reward_std", "normalized_reward_mean", "normalized_reward_std", "zero_spread_groups",
        "advantage_mean", "advantage_std", "negative_advantage_fraction", "mean_reward", "max_reward", "min_reward",
        "margin", "accuracy",
    ),
    "staleness": ("mixed_version_fraction", "critic_lag_mean"),
    "off_policy": (
        "ess", "ess_fraction", "ess_fraction_seq", "sequence_ess", "mismatch_kl", "harmful_second_moment",
        "masked_token_fraction", "invalid_behavior_tokens", "truncation_mass",
    ),
    "policy": (
        "loss", "grad_norm", "learning_rate", "effective_learning_rate", "entropy", "ref_kl", "skipped",
        "skipped_updates", "mean_token_accuracy",
    ),
    "response": (
        "response_length_mean", "truncation_rate", "truncated_fraction", "response_tokens", "tokens", "sequences",
    ),
    "critic": ("value_loss", "explained_variance"),
    "buffer": ("buffer_size", "buffer_age", "replayed_fraction", "dropped", "rollouts_in_flight"),
    "time": ("wall_time", "loop_lag_p99", "epoch", "policy_version"),
}  # fmt: skip
PATTERNS: tuple[tuple[str, str], ...] = (
    (r"^heldout_", "heldout"),
    (r"^(staleness|version_lag)_", "staleness"),
    (r"prefill", "fusion"),
    (r"_(seconds|per_second|idle_fraction)$|_latency_p\d+$", "time"),
    (r"^(behavior|policy_log_ratio|clip_fraction)", "off_policy"),
    (r"^critic_", "critic"),
    (r"^generators_", "generator"),
)
OF_THE_ALGORITHM = "algorithm"  # what a learner adds that stands nowhere above
_SECTION_OF = {metric: section for section, metrics in SECTIONS.items() for metric in metrics}


def section_of(metric: str) -> str:
    """The heading of a metric, empty for ``step``, the axis of all."""
    if metric == "step":
        return ""
    if "/" in metric:
        return metric.partition("/")[0]
    if metric in _SECTION_OF:
        return _SECTION_OF[metric]
    return next((section for pattern, section in PATTERNS if re.search(pattern, metric)), OF_THE_ALGORITHM)


def titled(metric: str) -> str:
    """The metric under its section: ``staleness/staleness_max``; ``step`` and what has a section stay as they are."""
    return metric if metric == "step" or "/" in metric else f"{section_of(metric)}/{metric}"
