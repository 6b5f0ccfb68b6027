"""The metrics that the report draws: one panel each, in sections, for each command that records curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrlhf.report.load import TRAIN, Group, heldout_measure


@dataclass(frozen=True)
class Panel:
    """One set of axes. A series looks the same in all panels, so that each panel has one metric.

    ``band``: metrics of its lower and upper edge; by default the band is over seeds. ``points``: a second metric, known
    at few steps. ``note`` explains band and points. ``limits`` fixes the vertical range. ``quiet`` panels are left out
    if all values are zero.
    """

    title: str
    unit: str
    metric: str
    section: str = ""
    band: tuple[str, str] | None = None
    points: str = ""
    note: str = ""
    limits: tuple[float, float] | None = None
    bound: bool = False  # draws the staleness bound
    quiet: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(name for name in (self.metric, *(self.band or ()), self.points) if name)

    @property
    def from_zero(self) -> bool:
        """Whether the axis begins at 0: for counts, shares, times and rates, which are never negative."""
        return self.unit.startswith(("policy versions", "fraction", "seconds", "trained", "since"))


_FRACTION = (0.0, 1.0)
_QUALITY, _UPDATES, _AGE, _SPEED = "Quality", "Updates", "Staleness", "Time and throughput"


def _age(title: str, name: str, bound: bool = False) -> Panel:
    """Staleness as a distribution over time."""
    note = "mean of each batch; band: 10th to 90th percentile of its rollouts"
    edges = (f"staleness{name}_p10", f"staleness{name}_p90")
    return Panel(title, "policy versions", f"staleness{name}_mean", _AGE, edges, note=note, bound=bound)


_ENTROPY = Panel("Entropy", "nats per token", "entropy", _UPDATES)
_HELDOUT = Panel("Held-out accuracy", "fraction solved", "heldout_accuracy", _QUALITY, limits=_FRACTION)
_HELDOUT_REWARD = Panel("Held-out reward", "mean reward of the answers", "heldout_accuracy", _QUALITY)
PANELS = (
    Panel("Reward", "mean reward of a batch", "reward_mean", _QUALITY),
    _HELDOUT,
    Panel("Response length", "tokens, mean", "response_length_mean", _QUALITY),
    Panel("Loss", "of a step", "loss", _UPDATES),
    Panel("Gradient norm", "before clipping", "grad_norm", _UPDATES),
    Panel("KL of policy and data", "behavior KL, nats per token", "behavior_kl", _UPDATES),
    Panel("KL of policy and reference", "nats per token", "ref_kl", _UPDATES),
    _ENTROPY,
    Panel("Clipped tokens", "fraction of the tokens", "clip_fraction", _UPDATES),
    Panel(
        "Clipped where the advantage is positive",
        "fraction of these tokens",
        "clip_fraction_positive",
        _UPDATES,
        quiet=True,
    ),
    Panel(
        "Clipped where the advantage is negative",
        "fraction of these tokens",
        "clip_fraction_negative",
        _UPDATES,
        quiet=True,
    ),
    Panel(
        "Truncated importance weights", "fraction of the tokens", "behavior_truncated_fraction", _UPDATES, quiet=True
    ),
    Panel(
        "Masked by their importance weight", "fraction of the tokens", "behavior_masked_fraction", _UPDATES, quiet=True
    ),
    _age("Staleness of the trained data", "", bound=True),
    _age("Staleness that arose in flight", "_in_flight"),
    _age("Staleness that arose in the queue", "_in_queue"),
    Panel("Effective sample size, tokens", "fraction of the tokens", "ess_fraction", _AGE, limits=(0.0, 1.05)),
    Panel("Effective sample size, sequences", "fraction of the samples", "ess_fraction_seq", _AGE, limits=(0.0, 1.05)),
    Panel("What a smaller cache changes", "KL, nats per token at one version", "cache_kl", _AGE, quiet=True),
    Panel("Lower tail under a smaller cache", "whole / sampler, 5% quantile", "cache_ratio_low", _AGE, quiet=True),
    Panel("Learner idle", "fraction of the time", "learner_idle_fraction", _SPEED, limits=_FRACTION),
    Panel("Generators idle", "fraction of the time", "generator_idle_fraction", _SPEED, limits=_FRACTION),
    Panel("Throughput", "trained samples/s", "samples_per_second", _SPEED),
    Panel("Throughput in tokens", "trained tokens/s", "tokens_per_second", _SPEED),
    Panel(
        "Latency of the reward",
        "seconds",
        "reward_latency_p50",
        _SPEED,
        ("reward_latency_p50", "reward_latency_p95"),
        note="median of a batch; band: up to the 95th percentile",
    ),
    Panel("Dropped rollouts", "since the beginning", "dropped", _SPEED),
    Panel("Bytes of a publish", "to each replica", "weights_sent_bytes", _SPEED, quiet=True),
    Panel("Weights that change", "fraction of the numbers", "weights_changed_fraction", _SPEED, quiet=True),
)


def _both(title: str, unit: str, metric: str, limits: tuple[float, float] | None = None) -> Panel:
    """A metric of training, and the same of the held-out rows."""
    return Panel(
        title, unit, metric, points=f"heldout_{metric}", note="line: training; points: held out", limits=limits
    )


_LOSS = _both("Loss", "nats", "loss")
_OPTIMIZER = (
    Panel("Gradient norm", "before clipping", "grad_norm"),
    Panel("Learning rate", "", "learning_rate"),
)
_SCORES = Panel(
    "Scores", "of a batch", "mean_reward", band=("min_reward", "max_reward"), note="mean; band: smallest to largest"
)
STAGE_PANELS = {
    TRAIN: PANELS,
    "sft": (
        _LOSS,
        _both("Token accuracy", "fraction of the tokens", "mean_token_accuracy", _FRACTION),
        _ENTROPY,
        *_OPTIMIZER,
    ),
    "reward-model": (
        _LOSS,
        _both("Accuracy", "fraction of the pairs", "accuracy", _FRACTION),
        _both("Margin", "chosen less rejected, mean", "margin"),
        _SCORES,
        *_OPTIMIZER,
    ),
}

# The diagnostics by version lag: heading and unit of each.
BY_LAG = {
    "ess_fraction": ("Effective sample size by lag", "fraction of the bucket's tokens"),
    "kl": ("KL by lag", "behavior KL, nats per token"),
    "ratio_mean": ("Importance ratio by lag", "mean over the bucket's tokens"),
    "reward_mean": ("Reward by lag", "mean of the sequences with such a token"),
    "token_fraction": ("Tokens by lag", "fraction of all tokens"),
}


def shown_panels(groups: Sequence[Group]) -> list[Panel]:
    """Panels for which at least one run has data. Held-out rewards that are no accuracy have no limits."""
    runs = [run for group in groups for run in group.runs]
    panels = STAGE_PANELS.get(runs[0].stage, PANELS)
    if runs[0].stage == TRAIN and heldout_measure(runs) == "reward":
        panels = tuple(_HELDOUT_REWARD if panel is _HELDOUT else panel for panel in panels)

    def worth(panel: Panel) -> bool:
        columns = [c for run in runs for name in panel.metrics if (c := run.column(name)) is not None]
        return any(np.nanmax(np.abs(column)) > 0 for column in columns) if panel.quiet else bool(columns)

    return [panel for panel in panels if worth(panel)]


def step_name(groups: Sequence[Group]) -> str:
    """The name of these runs' steps."""
    return "learner steps" if groups[0].runs[0].stage == TRAIN else "optimizer steps"


def is_sparse(metric: str) -> bool:
    """Whether the metric has values at few steps only, and is drawn as points joined by lines."""
    return metric.startswith("heldout_")


def staleness_bound(groups: Sequence[Group]) -> float | None:
    """The bound that all runs share, from their summaries; None when they differ or one is unknown."""
    bounds = {((run.summary or {}).get("staleness") or {}).get("bound") for group in groups for run in group.runs}
    return bounds.pop() if len(bounds) == 1 else None
