"""Settings of staleness and of the replay buffer: ``async.*`` and ``buffer.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.errors import ContradictionError
from asyncrlhf.validation import check, check_settings, setting

MODES = ("sync", "one_step", "async", "fixed_lag")
OVER_STALE = ("drop", "mask", "wait", "downweight")
ON_WEIGHT_UPDATE = ("drain", "interrupt", "in_flight", "pull")
DEFAULT_STALENESS, DEFAULT_LAG = 2, 1
SETTABLE = {"max_staleness": "async", "lag": "fixed_lag"}  # by the one mode in which each may be given
PACING = ("fill", "just_in_time")
PRIORITIES = ("reward_spread", "advantage", "age")
SAMPLING = ("fifo", "lifo", "uniform", *PRIORITIES)


@dataclass(frozen=True)
class AsyncConfig:
    """How generation and training overlap."""

    mode: str = setting(
        "async",
        "How generation and training overlap: alternating (sync), one step apart (one_step), limited only by "
        "max_staleness (async), or exactly lag steps apart, so that runs repeat (fixed_lag).",
        choices=MODES, common=True,
    )  # fmt: skip
    max_staleness: int | None = setting(
        None,
        "Most learner steps by which a trained rollout's oldest token may lag behind. null: 2 with mode=async; the "
        "other modes set it themselves.",
        low=0, common=True,
    )  # fmt: skip
    pacing: str = setting(
        "fill",
        "mode=async: prompts are admitted as soon as the bound allows (fill), or just in time for the learner's next "
        "batch (just_in_time).",
        choices=PACING,
    )
    lag: int | None = setting(
        None, "mode=fixed_lag: learner steps between a batch's generation and its training; null: 1.", low=0
    )
    on_weight_update: str = setting(
        "in_flight",
        "What unfinished responses do when new weights arrive: finish first (drain), recompute the KV cache of their "
        "tokens so far (interrupt), keep it (in_flight), or keep it and wait for the next response's start (pull).",
        choices=ON_WEIGHT_UPDATE,
    )
    over_stale: str = setting(
        "drop",
        "What happens to rollouts beyond the bound: drop them (drop), mask their old tokens (mask), wait for them "
        "before they exceed it (wait), or reduce their weight (downweight).",
        choices=OVER_STALE,
    )
    adaptive: bool = setting(
        False, "mode=async: adapts the bound between min_staleness and max_staleness to ess_fraction_seq."
    )
    ess_floor: float = setting(
        0.5,
        "adaptive=true halves the bound if the effective sample size (share of the batch, mean over five "
        "steps) is lower; four higher means in a row raise it by one.",
        low=0, high=1, exclusive_low=True,
    )  # fmt: skip
    min_staleness: int = setting(0, "Smallest bound, in learner steps, that adaptive=true may set.", low=0)

    def __post_init__(self) -> None:
        check_settings("async", self)
        self._check_mode()
        if self.adaptive:
            self._check_adaptive()

    def _check_mode(self) -> None:
        """Raise ContradictionError for a bound or a lag that the mode sets itself, or does not have."""
        for name, mode in SETTABLE.items():
            given, own = getattr(self, name), self.in_force[name]
            if given is not None and self.mode != mode:
                raise ContradictionError(
                    f"async.{name}={given} contradicts async.mode={self.mode}, which "
                    + ("has none" if own is None else f"itself sets it to {own}")
                    + f"; leave it out, or give async.mode={mode}."
                )

    def _check_adaptive(self) -> None:
        check(
            self.mode == "async",
            f"async.adaptive=true has no bound to move in async.mode={self.mode}; allowed: mode=async.",
        )
        check(
            self.min_staleness < self.bound,
            f"async.adaptive=true has no room between async.min_staleness={self.min_staleness} and "
            f"async.max_staleness={self.bound}; allowed: min_staleness < max_staleness.",
        )

    @property
    def fixed_lag(self) -> int | None:
        """The exact lag of every batch, or None when the loop runs free under ``max_staleness``."""
        lag = DEFAULT_LAG if self.lag is None else self.lag
        return {"sync": 0, "one_step": 1, "fixed_lag": lag, "async": None}[self.mode]

    @property
    def bound(self) -> int:
        """The largest staleness that may ever reach a loss."""
        given = DEFAULT_STALENESS if self.max_staleness is None else self.max_staleness
        return given if self.fixed_lag is None else self.fixed_lag

    @property
    def in_force(self) -> dict[str, int | None]:
        """The values that null settings take, by setting; a free-running mode has no lag."""
        return {"max_staleness": self.bound, "lag": self.fixed_lag}

    @property
    def least_bound(self) -> tuple[str, int]:
        """The name and the value of the setting with the lowest bound that may come into force."""
        return ("min_staleness", self.min_staleness) if self.adaptive else ("max_staleness", self.bound)


@dataclass(frozen=True)
class BufferConfig:
    """How finished rollouts wait for the learner, and how often each is trained."""

    capacity: int = setting(0, "Rollouts that it holds; 0: twice what the staleness bound admits.", low=0)
    sampling: str = setting(
        "fifo",
        "Which groups a batch takes: oldest first, newest first, at random, or by priority: those of unequal rewards, "
        "of large advantages, or young ones.",
        choices=SAMPLING,
    )
    max_reuse: int = setting(1, "Most times that a rollout is trained, within the staleness bound.", low=1)
    filter_zero_spread: bool = setting(
        False, "Drops groups of equal rewards (DAPO's dynamic sampling), at most nine for each group of a batch."
    )
    # 0.5 is two thirds fresh: 2606.04560's 100% fresh and 50% replay.
    replay_fraction: float = setting(
        0.0,
        "Replayed rollouts per fresh one, drawn from groups trained before (0.5: a third of a batch); fresh ones "
        "fill up missing ones and are admitted under half the staleness bound.",
        low=0,
    )
    max_age: int = setting(
        0, "Largest staleness of a replayed group, in learner steps; 0: the bound of all groups.", low=0
    )
    warmup_steps: int = setting(0, "Learner steps before the first replay.", low=0)
    sampling_correction: float = setting(
        1.0, "sampling by priority: exponent of the weight 1/p; 0: no correction.", low=0, high=1
    )

    def __post_init__(self) -> None:
        check_settings("buffer", self)

    @property
    def replays(self) -> bool:
        return self.replay_fraction > 0

    @property
    def plain(self) -> bool:
        """Whether the buffer is a queue: groups leave oldest first and train once."""
        return self.sampling == "fifo" and self.max_reuse == 1 and not self.replays

    @property
    def places(self) -> int:
        """Places of batches that one group surely fills; a replay is not counted, for it may never be drawn."""
        return 1 if self.replays else self.max_reuse

    def admission_bound(self, bound: int) -> int:
        """The staleness up to which fresh rollouts are requested. With replay it is half the bound: fast generators
        fill any bound, and no group would be young enough for a second training."""
        return min(self.max_age or bound, bound) // 2 if self.replays else bound

    def replay_groups(self, groups_per_step: int) -> int:
        """Groups of a full batch that come from replay."""
        share = self.replay_fraction / (1 + self.replay_fraction)
        return min(groups_per_step - 1, int(groups_per_step * share + 1e-9))
