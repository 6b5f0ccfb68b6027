"""How fast one replica is, as the controller sees it: the time its rollouts take, those still under way included."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

REMEMBERED = 16  # rollouts that ended last; the median of them speaks of the replica and not of one long response
LAG_SMOOTHING = 0.2


def median_time(finished: Iterable[float], cut_off: Iterable[float]) -> float | None:
    """Median of the seconds that rollouts take, by Kaplan and Meier (1958): ``finished`` took so long, ``cut_off``
    longer than this (they run still, or were cancelled). Where too few finished to tell, the longest time seen, which
    is a lower bound; None without any."""
    events = sorted([(t, False) for t in finished] + [(t, True) for t in cut_off])
    surviving = 1.0
    for place, (seconds, censored) in enumerate(events):
        if not censored:
            surviving *= 1 - 1 / (len(events) - place)
        if surviving <= 0.5 + 1e-9:
            return seconds
    return events[-1][0] if events else None


@dataclass
class Pace:
    """``latency``: median seconds from submit to finish, None before anything is known. ``window``: rollouts that the
    replica may hold, None for as many as it has slots for; 0 holds it back until a probe finds it faster."""

    latency: float | None = None
    window: float | None = None
    slow: bool = False  # takes longer than the others need for a whole batch
    late: bool = False  # and too long for the staleness bound
    finished: int = 0  # rollouts, since the run began
    version_lag: float = 0.0  # mean of the learner's version less the replica's when it was given work
    _started: dict[int, float] = field(default_factory=dict)
    _ended: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _fresh_until: float = 0.0

    @property
    def held_back(self) -> bool:
        return self.window is not None and self.window < 1

    @property
    def cut_off(self) -> bool:
        """Whether most of what ended was cancelled, so that ``latency`` is no more than a lower bound."""
        return 2 * sum(cancelled for _, cancelled in self._ended) > len(self._ended)

    def begin(self, rollout_id: int, now: float, version_lag: int) -> None:
        self._started[rollout_id] = now
        self.version_lag += LAG_SMOOTHING * (version_lag - self.version_lag)

    def observe(self, in_flight: Set[int], is_live: Callable[[int], bool], now: float) -> int:
        """Take note of what left ``in_flight`` since the last look: the ledger's ``is_live`` tells what was finished
        from what was cancelled. Returns how many rollouts finished."""
        ended = self._started.keys() - in_flight
        finished = 0
        for rollout_id in sorted(ended):
            done = is_live(rollout_id)
            self._ended.append((now - self._started.pop(rollout_id), not done))
            finished += done
        self.finished += finished
        if ended or now >= self._fresh_until:
            self._estimate(now)
        return finished

    def _estimate(self, now: float) -> None:
        done = [t for t, censored in self._ended if not censored]
        open_ = [t for t, censored in self._ended if censored] + [now - t for t in self._started.values()]
        self.latency = median_time(done, open_)
        self._fresh_until = now + (self.latency or 0.0) / 4

    def probed(self, seconds: float) -> None:
        """One rollout on the idle replica took so long: what was seen before counts no more."""
        self._ended.clear()
        self._ended.append((seconds, False))
        self.latency = seconds
