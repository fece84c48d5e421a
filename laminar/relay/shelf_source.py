"""Gives a version on a relay's shelf to whoever sends it on, chunk by chunk as they arrive."""

import threading
from collections.abc import Callable

from laminar.relay.ring import StoredVersion
from laminar.relay.shards import Shard
from laminar.relay.stream import Superseded


class ShelfSource:
    """changed: the shelf's, which is notified of every chunk. The version is held until the source is put back."""

    shard: Shard | None = None

    def __init__(self, changed: threading.Condition, stored: StoredVersion, arrival_deadline_s: float) -> None:
        self.stored = stored
        self.manifest = stored.manifest
        self._changed = changed
        self._arrival_deadline_s = arrival_deadline_s

    @property
    def view(self) -> memoryview:
        """Only valid once the first chunk is there: until then the segment may be on its way."""
        return self.stored.segment.view

    def wait_chunk(self, index: int, still_wanted: Callable[[], bool]) -> int:
        """The chunk's checksum, once it is there and verified; raises Superseded if it will not come."""
        self._wait(lambda: len(self.stored.checksums) > index, f"chunk {index}", still_wanted)
        return self.stored.checksums[index]

    def wait_complete(self, still_wanted: Callable[[], bool]) -> int:
        self._wait(lambda: self.stored.complete, "the end", still_wanted)
        assert self.stored.checksum is not None
        return self.stored.checksum

    def _wait(self, there: Callable[[], bool], what: str, still_wanted: Callable[[], bool]) -> None:
        changed, stored = self._changed, self.stored
        with changed:
            in_time = changed.wait_for(
                lambda: there() or stored.removed or not still_wanted(), self._arrival_deadline_s
            )
            if not in_time:
                raise Superseded(f"{what} of version {stored.version} did not come for {self._arrival_deadline_s:g} s")
            if stored.removed or not still_wanted():
                raise Superseded(f"version {stored.version} is not sent on from here any more")
