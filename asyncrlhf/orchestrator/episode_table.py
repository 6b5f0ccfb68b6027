"""The episodes under way, as the controller's loops share them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from asyncrlhf.actors.episodes import TurnWanted


@dataclass
class EpisodeTable:
    """The episodes under way by rollout id: the worker that plays each (``at``), the turn that it waits for
    (``wanted``), and the replica that sampled its turn before (``last``). Empty if a rollout is one answer.
    ``call_off``: give episodes up."""

    at: dict[int, str] = field(default_factory=dict)
    wanted: dict[int, TurnWanted] = field(default_factory=dict)
    last: dict[int, str] = field(default_factory=dict)
    call_off: Callable[[Collection[int]], None] = lambda rollout_ids: None

    @property
    def round_is_whole(self) -> bool:
        """Whether every episode waits for a turn, and none for its environment; evaluations do not count."""
        return sum(i >= 0 for i in self.at) == sum(i >= 0 for i in self.wanted)
