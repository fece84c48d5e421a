"""Decides which segment takes the next version and which version goes: a relay's fixed ring of host memory.

Not thread-safe; the shelf around it holds the lock. In words:
- the newest complete version, the one arriving, those held and those retained are needed; the rest is kept until its
  memory is wanted;
- when memory is wanted, the oldest version that is not needed goes first, then the oldest retained one;
- a version that someone holds never goes, and its segment is never written; if all are held, one more is taken, and
  counted. That is also the fate of a segment whose reader is hung: its lease expires, which is told, and it stays with
  the reader, counting against the ring, until the reader's socket closes.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laminar.relay.manifest import Manifest
from laminar.relay.segments import Segment

if TYPE_CHECKING:
    from laminar.relay.arrival import Assembly


@dataclass(eq=False, slots=True)
class StoredVersion:
    """One version in the ring, complete or arriving."""

    manifest: Manifest
    segment: Segment
    checksums: list[int] = field(default_factory=list[int])
    """Of the chunks that came, in order."""
    checksum: int | None = None
    """The whole version's, once complete."""
    num_holds: int = 0
    """Readers that have not closed their lease, and the forwarder while it sends from here."""
    assembly: "Assembly | None" = None
    """How far the shards are, of a version that comes from several ranks."""
    reserving: threading.Lock = field(default_factory=threading.Lock)
    """Held while the segment takes its memory, which several streams may want at once."""
    num_expired: int = 0
    """Those of the readers that are beyond their deadline."""
    removed: bool = False

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def complete(self) -> bool:
        return self.checksum is not None

    @property
    def num_bytes_received(self) -> int:
        return min(len(self.checksums) * self.manifest.chunk_bytes, self.manifest.num_bytes)


class Ring:
    def __init__(self, num_versions_kept: int) -> None:
        self.num_versions_kept = num_versions_kept
        self.num_segments = 0
        """Segments whose memory is taken, in use or free."""
        self.num_overflows = 0
        """Times that every segment was held and one more was taken."""
        self._stored: dict[int, StoredVersion] = {}
        self._retained: frozenset[int] = frozenset()
        self._free: list[Segment] = []
        self._tainted: list[Segment] = []

    @property
    def complete_versions(self) -> list[int]:
        return sorted(version for version, stored in self._stored.items() if stored.complete)

    @property
    def newest(self) -> int | None:
        return max(self.complete_versions, default=None)

    @property
    def num_holds(self) -> int:
        return sum(stored.num_holds for stored in self._stored.values())

    @property
    def num_expired(self) -> int:
        return sum(stored.num_expired for stored in self._stored.values())

    @property
    def segments(self) -> list[Segment]:
        """Those that a reader may be lent now or later; one that left the ring is only in its readers' hands."""
        return [*self._free, *(stored.segment for stored in self._stored.values())]

    def begin(self, manifest: Manifest) -> tuple[StoredVersion, list[int]]:
        """A place for a version that starts to arrive, and the versions that had to go for it.

        The segment may still have to be reserved, which takes long and so is left to the caller.
        """
        assert manifest.version not in self._stored
        evicted: list[int] = []
        while not self._free and self.num_segments >= self.num_versions_kept:
            victim = self._next_to_go()
            if victim is None:
                self.num_overflows += 1
                break
            evicted.append(victim.version)
            self._remove(victim)
        if self._free:
            segment = self._free.pop()
        else:
            segment = Segment()
            self.num_segments += 1
        stored = StoredVersion(manifest, segment)
        self._stored[manifest.version] = stored
        return stored, evicted

    def discard(self, stored: StoredVersion) -> None:
        """Drop a version that will never be complete."""
        assert not stored.complete
        self._remove(stored)

    def has(self, version: int) -> bool:
        """Whether it is here, complete or arriving."""
        return version in self._stored

    def find(self, version: int | None) -> StoredVersion | None:
        """A complete version; None: the newest."""
        if version is None:
            version = self.newest
        stored = None if version is None else self._stored.get(version)
        return stored if stored is not None and stored.complete else None

    def retain(self, versions: Sequence[int]) -> None:
        self._retained = frozenset(versions)

    def hold(self, stored: StoredVersion) -> None:
        assert not stored.removed
        stored.num_holds += 1

    def let_go(self, stored: StoredVersion) -> None:
        stored.num_holds -= 1
        if stored.removed and stored.num_holds == 0:
            self._recycle(stored.segment)

    def close(self) -> None:
        """Give back all memory; readers keep what they mapped."""
        for segment in [*self._free, *self._tainted, *(stored.segment for stored in self._stored.values())]:
            segment.close()
        self._free.clear()
        self._stored.clear()

    def _next_to_go(self) -> StoredVersion | None:
        newest = self.newest
        candidates = [
            stored
            for stored in self._stored.values()
            if stored.complete and stored.version != newest and stored.num_holds == 0
        ]
        return min(candidates, key=lambda stored: (stored.version in self._retained, stored.version), default=None)

    def _remove(self, stored: StoredVersion) -> None:
        stored.removed = True
        del self._stored[stored.version]
        if stored.num_holds == 0:
            self._recycle(stored.segment)

    def _recycle(self, segment: Segment) -> None:
        if segment.is_tainted:
            # It stays as it is, counts against the ring, and is given back when the relay ends.
            self._tainted.append(segment)
        elif self.num_segments > self.num_versions_kept:
            segment.close()
            self.num_segments -= 1
        else:
            self._free.append(segment)
