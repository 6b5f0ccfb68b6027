"""The episodes under way, as the controller's loops share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from asyncrlhf.actors.episodes import TurnWanted

OPENING_SMOOTHING = 0.05
DEATHS_ALLOWED = 2  # of its worker while an episode's environment is at work; with one more, the episode has failed


@dataclass
class EpisodeTable:
    """The episodes under way by rollout id: the worker that plays each (``at``), the turn that it waits for
    (``wanted``), the replica that sampled its turn before (``last``), and the time at which its environment was last
    given something to do (``since``). Empty if a rollout is one answer. ``deaths``: of workers with it, also of
    episodes that are to begin again. ``opening``: seconds from an episode's start to its first turn, smoothed.
    ``call_off``: give episodes up."""

    at: dict[int, str] = field(default_factory=dict)
    wanted: dict[int, TurnWanted] = field(default_factory=dict)
    last: dict[int, str] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    deaths: Counter[int] = field(default_factory=Counter)
    opening: float = 0.0
    call_off: Callable[[Collection[int]], None] = lambda rollout_ids: None

    @property
    def round_is_whole(self) -> bool:
        """Whether every episode waits for a turn, and none for its environment; evaluations do not count."""
        return sum(i >= 0 for i in self.at) == sum(i >= 0 for i in self.wanted)

    @property
    def playing(self) -> list[int]:
        """Episodes whose environment is at work, the longest first."""
        return sorted((i for i in self.at if i not in self.wanted), key=lambda i: self.since.get(i, 0.0))

    def waits_for_another(self, rollout_id: int) -> bool:
        """Whether the episode may not begin yet: of those with which workers have died as often as is allowed, only
        one is under way at a time, so that the next death tells which of them is the cause."""
        if self.deaths[rollout_id] < DEATHS_ALLOWED:
            return False
        return any(count >= DEATHS_ALLOWED and i in self.at for i, count in self.deaths.items() if i != rollout_id)

    def opened(self, rollout_id: int, now: float) -> None:
        """The first turn of the episode has come."""
        self.opening += OPENING_SMOOTHING * (now - self.since[rollout_id] - self.opening)

    def forget(self, rollout_id: int) -> None:
        """The episode is not under way any more."""
        for known in (self.at, self.wanted, self.last, self.since):
            known.pop(rollout_id, None)
