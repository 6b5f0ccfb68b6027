"""Settings of staleness and of the replay buffer: ``async.*`` and ``buffer.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check, check_choice, check_range, check_ranges

MODES = ("sync", "one_step", "async", "fixed_lag")
OVER_STALE = ("drop", "mask", "wait", "downweight")
ON_WEIGHT_UPDATE = ("drain", "interrupt", "in_flight")
PACING = ("auto", "just_in_time", "fill")
SAMPLING = ("fifo", "lifo", "uniform", "priority")
PRIORITIES = ("reward_spread", "advantage", "age")


@dataclass(frozen=True)
class AsyncConfig:
    """How generation and training overlap: ``max_staleness`` bounds ``mode=async``, ``lag`` is ``fixed_lag``'s.

    ``adaptive`` moves the bound in force between ``min_staleness`` and ``max_staleness``, by ``ess_fraction_seq``.
    ``pacing``: ``fill`` begins all that the bound allows; ``just_in_time`` what makes the learner's batch just ready;
    ``auto`` is ``fill``; sweeps over ``max_staleness`` and the scheduled modes tell it from a choice of the user's."""

    mode: str = "async"
    max_staleness: int = 2
    pacing: str = "auto"
    lag: int = 1
    on_weight_update: str = "in_flight"
    over_stale: str = "drop"
    adaptive: bool = False
    ess_floor: float = 0.5  # the bound is halved when the mean of the last adapt_every steps is lower
    min_staleness: int = 0
    adapt_every: int = 5  # steps between two looks
    adapt_patience: int = 4  # good looks in a row before the bound grows by one

    def __post_init__(self) -> None:
        check_choice("async.mode", self.mode, MODES)
        check_ranges("async", self, "max_staleness", "lag", "min_staleness", low=0)
        check_choice("async.pacing", self.pacing, PACING)
        check_choice("async.on_weight_update", self.on_weight_update, ON_WEIGHT_UPDATE)
        check_choice("async.over_stale", self.over_stale, OVER_STALE)
        check_range("async.ess_floor", self.ess_floor, low=0, high=1, exclusive_low=True)
        check_ranges("async", self, "adapt_every", "adapt_patience", low=1)
        if self.adaptive:
            self._check_adaptive()

    def _check_adaptive(self) -> None:
        check(
            self.mode == "async",
            f"async.adaptive=true has no bound to move in async.mode={self.mode}; allowed: mode=async.",
        )
        check(
            self.min_staleness < self.max_staleness,
            f"async.adaptive=true has no room between async.min_staleness={self.min_staleness} and "
            f"async.max_staleness={self.max_staleness}; allowed: min_staleness < max_staleness.",
        )

    @property
    def fixed_lag(self) -> int | None:
        """The exact lag of every batch, or None when the loop runs free under ``max_staleness``."""
        return {"sync": 0, "one_step": 1, "fixed_lag": self.lag, "async": None}[self.mode]

    @property
    def bound(self) -> int:
        """The largest staleness that may ever reach a loss."""
        return self.max_staleness if self.fixed_lag is None else self.fixed_lag

    @property
    def least_bound(self) -> tuple[str, int]:
        """The setting that names the lowest bound that may come into force, and its value."""
        return ("min_staleness", self.min_staleness) if self.adaptive else ("max_staleness", self.max_staleness)


@dataclass(frozen=True)
class BufferConfig:
    """``capacity`` in rollouts (0: twice what staleness admits at once); ``max_reuse`` trainings of a rollout at most.

    With ``replay_fraction`` r > 0 a batch is r / (1 + r) replay, drawn by ``sampling`` from groups trained before, and
    the rest fresh, oldest first: 0.5 is two thirds fresh (2606.04560's 100% fresh and 50% replay). The batch keeps its
    size: fresh groups fill what replay cannot. Fresh ones start under half the bound, see :meth:`admission_bound`.
    With 0 each group is trained ``max_reuse`` times, staleness permitting, and ``sampling`` draws from all that is
    held."""

    capacity: int = 0
    sampling: str = "fifo"
    max_reuse: int = 1
    priority: str = "reward_spread"
    filter_zero_spread: bool = False  # DAPO's dynamic sampling: groups without reward spread are dropped, untrainable
    replay_fraction: float = 0.0
    max_age: int = 0  # largest staleness of a replayed group; 0: that of any group
    warmup_steps: int = 0  # steps before the first replay
    sampling_correction: float = 1.0  # exponent of the weight 1/p under sampling=priority; 0 corrects nothing

    def __post_init__(self) -> None:
        check_range("buffer.capacity", self.capacity, low=0)
        check_choice("buffer.sampling", self.sampling, SAMPLING)
        check_range("buffer.max_reuse", self.max_reuse, low=1)
        check_choice("buffer.priority", self.priority, PRIORITIES)
        check_ranges("buffer", self, "replay_fraction", "max_age", "warmup_steps", low=0)
        check_range("buffer.sampling_correction", self.sampling_correction, low=0, high=1)

    @property
    def replays(self) -> bool:
        return self.replay_fraction > 0

    @property
    def plain(self) -> bool:
        """Whether it is a queue: nothing is chosen, and each group is trained once."""
        return self.sampling == "fifo" and self.max_reuse == 1 and not self.replays

    @property
    def places(self) -> int:
        """Places of batches that one group is sure to fill. A replayed group is not: it may never be drawn again."""
        return 1 if self.replays else self.max_reuse

    def admission_bound(self, bound: int) -> int:
        """The staleness up to which fresh rollouts are asked for. Fast generators fill whatever they are given, so that
        without this half nothing would be young enough for a second training."""
        return min(self.max_age or bound, bound) // 2 if self.replays else bound

    def replay_groups(self, groups_per_step: int) -> int:
        """Groups of a full batch that come from replay."""
        share = self.replay_fraction / (1 + self.replay_fraction)
        return min(groups_per_step - 1, int(groups_per_step * share + 1e-9))
