"""How fast one replica is: the time that its rollouts take, estimated from ended rollouts and those still under way."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

REMEMBERED = 16  # rollouts that ended last; the median of them speaks of the replica and not of one long response
LAG_SMOOTHING = 0.2


def median_time(finished: Iterable[float], cut_off: Iterable[float]) -> float | None:
    """Median seconds of a rollout, by Kaplan and Meier (1958). ``finished``: durations of finished rollouts;
    ``cut_off``: lower bounds for rollouts that still run or were cancelled. With too few finished rollouts, the longest
    time seen, which is a lower bound; None without any."""
    ended, open_ = sorted(finished), sorted(cut_off)
    surviving = 1.0
    for place, seconds in enumerate(ended):
        at_risk = len(ended) - place + len(open_) - bisect_left(open_, seconds)
        surviving *= 1 - 1 / at_risk
        if surviving <= 0.5 + 1e-9:
            return seconds
    return max(ended[-1:] + open_[-1:], default=None)


@dataclass
class Pace:
    """``latency``: median seconds from submit to finish, None before the first estimate. ``window``: rollouts that the
    replica may hold, None for as many as its slots; 0 holds it back until a probe finds it faster."""

    latency: float | None = None
    window: float | None = None
    slow: bool = False  # takes longer than the others need for a whole batch
    late: bool = False  # and too long for the staleness bound
    finished: int = 0  # rollouts, since the run began
    version_lag: float = 0.0  # mean of the learner's version less the replica's when it was given work
    _started: dict[int, float] = field(default_factory=dict)
    _ended: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _fresh_until: float = 0.0
    _news: int = 0  # rollouts that finished since the last estimate
    _stale: bool = False  # something ended since then

    @property
    def held_back(self) -> bool:
        return self.window is not None and self.window < 1

    @property
    def cut_off(self) -> bool:
        """Whether most of the ended rollouts were cancelled, so that ``latency`` is only a lower bound."""
        return 2 * sum(cancelled for _, cancelled in self._ended) > len(self._ended)

    def begin(self, rollout_id: int, now: float, version_lag: int) -> None:
        self._started[rollout_id] = now
        self.version_lag += LAG_SMOOTHING * (version_lag - self.version_lag)

    def end(self, rollout_id: int, now: float, *, finished: bool) -> None:
        """A rollout left the replica; not ``finished``: it failed or was cancelled."""
        started = self._started.pop(rollout_id, None)
        if started is None:
            return
        self._ended.append((now - started, not finished))
        self._stale = True
        self.finished += finished
        self._news += finished

    def estimate(self, now: float) -> int:
        """Update ``latency``; returns how many rollouts finished since the last call."""
        if self._stale or now >= self._fresh_until:
            done = [t for t, censored in self._ended if not censored]
            open_ = [t for t, censored in self._ended if censored] + [now - t for t in self._started.values()]
            self.latency = median_time(done, open_)
            self._fresh_until = now + (self.latency or 0.0) / 4
        finished, self._news, self._stale = self._news, 0, False
        return finished

    def probed(self, seconds: float) -> None:
        """One rollout on the idle replica took ``seconds``; this replaces all earlier measurements."""
        self._ended.clear()
        self._ended.append((seconds, False))
        self.latency = seconds
