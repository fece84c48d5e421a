"""Keeps virtual time: a heap of what is to happen, each at its time, equal times in the order they were set."""

import heapq
from collections.abc import Callable, Iterable

from laminar.control.messages import AnyEvent

Happening = Callable[[], Iterable[AnyEvent]]
"""Does something to the world and returns the events that control hears of, in order; it may be a generator."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Happening, bool]] = []
        self._order = 0

    def at(self, at_s: float, happen: Happening, *, has_arrived: bool = False) -> None:
        """Let this happen then (now, if that is past). has_arrived: its events are at control's door already."""
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, happen, has_arrived))

    def tell(self, delay_s: float, event: AnyEvent) -> None:
        """Send control an event after so long."""
        self.at(self.now + delay_s, lambda: (event,))

    def next(self) -> tuple[Happening, bool]:
        """Go to what happens next; the world never runs out, since it looks at its replicas again and again."""
        at_s, _, happen, has_arrived = heapq.heappop(self._heap)
        self.now = max(self.now, at_s)
        return happen, has_arrived
