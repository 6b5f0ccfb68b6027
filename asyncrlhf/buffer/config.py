"""Settings of staleness and of the replay buffer: ``async.*`` and ``buffer.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check_choice, check_range

MODES = ("sync", "one_step", "async", "fixed_lag")
OVER_STALE = ("drop", "mask", "wait", "downweight")
ON_WEIGHT_UPDATE = ("drain", "interrupt", "in_flight")
SAMPLING = ("fifo", "lifo", "uniform", "priority")
PRIORITIES = ("reward_spread", "age")


@dataclass(frozen=True)
class AsyncConfig:
    """How generation and training overlap: ``max_staleness`` bounds ``mode=async``, ``lag`` is ``fixed_lag``'s."""

    mode: str = "async"
    max_staleness: int = 2
    lag: int = 1
    on_weight_update: str = "in_flight"
    over_stale: str = "drop"

    def __post_init__(self) -> None:
        check_choice("async.mode", self.mode, MODES)
        check_range("async.max_staleness", self.max_staleness, low=0)
        check_range("async.lag", self.lag, low=0)
        check_choice("async.on_weight_update", self.on_weight_update, ON_WEIGHT_UPDATE)
        check_choice("async.over_stale", self.over_stale, OVER_STALE)

    @property
    def fixed_lag(self) -> int | None:
        """The exact lag of every batch, or None when the loop runs free under ``max_staleness``."""
        return {"sync": 0, "one_step": 1, "fixed_lag": self.lag, "async": None}[self.mode]

    @property
    def bound(self) -> int:
        """The largest staleness that may reach a loss."""
        return self.max_staleness if self.fixed_lag is None else self.fixed_lag


@dataclass(frozen=True)
class BufferConfig:
    """``capacity`` in rollouts (0: twice what staleness admits at once); ``max_reuse`` uses of one rollout."""

    capacity: int = 0
    sampling: str = "fifo"
    max_reuse: int = 1
    priority: str = "reward_spread"
    filter_zero_spread: bool = False  # DAPO's dynamic sampling: groups without reward spread are dropped, untrainable

    def __post_init__(self) -> None:
        check_range("buffer.capacity", self.capacity, low=0)
        check_choice("buffer.sampling", self.sampling, SAMPLING)
        check_range("buffer.max_reuse", self.max_reuse, low=1)
        check_choice("buffer.priority", self.priority, PRIORITIES)
