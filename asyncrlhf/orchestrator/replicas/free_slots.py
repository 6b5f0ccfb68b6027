"""The replicas that may be given work, by their free slots."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from asyncrlhf.orchestrator.state import Replica


class FreeSlots:
    """The replicas that may be given work, in heaps by free slots; slow ones have a heap of their own, for they share a
    quota.

    An entry is valid only while ``_offered`` holds the same values, and is checked against the replica when it comes to
    the top. So no call is needed when a replica loses free slots or cannot take work any more; :meth:`offer` reports
    the opposite.
    """

    def __init__(self, able: Callable[[Replica], bool]) -> None:
        self._able = able
        self._places: dict[str, int] = {}  # of equals the first one is chosen
        self._replicas: dict[int, Replica] = {}
        self._offered: dict[int, tuple[bool, int]] = {}
        self._heaps: dict[bool, list[tuple[int, int]]] = {False: [], True: []}

    def clear(self) -> None:
        """Forget all offers."""
        self._offered = {}
        self._heaps = {False: [], True: []}

    def offer(self, replica: Replica) -> None:
        """Call it when the replica may take work again, became faster or slower, or has more free slots."""
        place = self._places.setdefault(replica.name, len(self._places))
        self._replicas[place] = replica
        slow = replica.pace.slow
        entry = (slow, -replica.free_slots)
        if self._able(replica) and self._offered.get(place) != entry:
            self._offered[place] = entry
            heapq.heappush(self._heaps[slow], (entry[1], place))

    def most(self, *, slow: bool) -> tuple[int, int, Replica] | None:
        """(key, place, replica) with most free slots, so the smallest key, of the slow or of the other replicas; or
        None."""
        heap = self._heaps[slow]
        while heap:
            key, place = heap[0]
            replica = self._replicas[place]
            if self._offered.get(place) == (slow, key):
                if replica.pace.slow == slow and replica.free_slots == -key and self._able(replica):
                    return key, place, replica
                del self._offered[place]
                heapq.heappop(heap)
                self.offer(replica)
            else:
                heapq.heappop(heap)
        return None
