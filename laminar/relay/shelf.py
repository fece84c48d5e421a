"""Holds a relay's weight versions for all of its threads: one writes the arriving version, others read and forward.

Every change is made, and the happening that tells of it is queued, under one lock, so happenings come in the order in
which things happened. `changed` wakes whoever waits for a chunk, for a version, or for a stream to leave.
"""

import threading
import time
from collections.abc import Callable, Sequence

from laminar.config import RelayConfig
from laminar.control.messages import MachineId, VersionComplete, VersionEvicted
from laminar.relay.chunks import combine_checksums
from laminar.relay.happenings import LeaseExpired, RelayHappening
from laminar.relay.lease import VersionGone
from laminar.relay.links import Link, LinkError, Refusal
from laminar.relay.manifest import Manifest
from laminar.relay.ring import Ring, StoredVersion
from laminar.relay.stream import Superseded

STREAM_LEAVES_S = 5.0
"""A stream that was cut off for a better one must have left its segment within this long."""


class Refused(Exception):
    """A version that this relay does not take, and why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.cause)
        self.refusal = refusal


class Shelf:
    def __init__(self, machine: int, config: RelayConfig, tell: Callable[[RelayHappening], None]) -> None:
        self.machine = machine
        self.changed = threading.Condition()
        self.ring = Ring(config.num_versions_kept)
        """Read and changed with `changed` held."""
        self.incoming: StoredVersion | None = None
        self._stream: Link | None = None
        self._epoch = -1
        self._arrival_deadline_s = config.publish_deadline_s
        self._tell = tell

    # ------------------------------------------------------------------------------------------------- the stream in

    def begin(self, manifest: Manifest, epoch: int, link: Link) -> StoredVersion:
        """Make `link` the one stream in, for this version; it resumes where an earlier stream of it ended.

        A stream of an older version, or an older stream of this one, is cut off first. Raises Refused for a version
        that is not newer than what is complete, and for a sender that the chain has left behind.
        """
        with self.changed:
            stored = self._admit(manifest, epoch, link)
        try:
            stored.segment.reserve(manifest.num_bytes)
        except OSError as error:
            self._give_up(stored, link)
            raise Refused(Refusal(str(error))) from error
        return stored

    def add_chunk(self, stored: StoredVersion, link: Link, checksum: int) -> None:
        """Count one more verified chunk; raises Superseded if this stream is not the one any more."""
        with self.changed:
            self._still_mine(stored, link)
            stored.checksums.append(checksum)
            self.changed.notify_all()

    def complete(self, stored: StoredVersion, link: Link, checksum: int) -> None:
        """Check the whole version and show it to readers; raises LinkError if it is not what was sent.

        That happens if two senders used one version number for different weights; it is then received anew.
        """
        with self.changed:
            self._still_mine(stored, link)
            found = combine_checksums(stored.checksums)
            if found != checksum:
                self._discard(stored)
                raise LinkError(
                    f"version {stored.version} does not match its checksum ({found:016x}, sent {checksum:016x})"
                )
            stored.checksum = checksum
            self.incoming = None
            self._tell(VersionComplete(MachineId(self.machine), stored.version))
            self.changed.notify_all()

    def leave(self, link: Link) -> None:
        """The stream ended; what came stays, to be resumed."""
        with self.changed:
            if self._stream is link:
                self._stream = None
                self.changed.notify_all()

    # -------------------------------------------------------------------------------------------- readers, forwarder

    def lease(self, version: int | None) -> StoredVersion:
        """Hold a complete version, until `end_lease`; None: the newest. Raises VersionGone."""
        with self.changed:
            stored = self.ring.find(version)
            if stored is None:
                raise VersionGone(self.machine, version, tuple(self.ring.complete_versions))
            self.ring.hold(stored)
            return stored

    def expire_lease(self, stored: StoredVersion, held_s: float) -> None:
        with self.changed:
            stored.num_expired += 1
            self._tell(LeaseExpired(self.machine, stored.version, held_s))

    def end_lease(self, stored: StoredVersion, *, expired: bool) -> None:
        with self.changed:
            stored.num_expired -= expired
            self.ring.let_go(stored)

    def retain(self, versions: Sequence[int]) -> None:
        with self.changed:
            self.ring.retain(versions)

    def take_newest_after(self, version: int) -> "ShelfSource | None":
        """Hold the newest version, arriving or complete, if newer than `version`. Called with `changed` held."""
        stored = self.incoming or self.ring.find(None)
        if stored is None or stored.version <= version:
            return None
        self.ring.hold(stored)
        return ShelfSource(self, stored, self._arrival_deadline_s)

    def put_back(self, source: "ShelfSource") -> None:
        with self.changed:
            self.ring.let_go(source.stored)

    def _give_up(self, stored: StoredVersion, link: Link) -> None:
        with self.changed:
            if self.incoming is stored:
                self._discard(stored)
            self._stream = None if self._stream is link else self._stream
            self.changed.notify_all()

    # ------------------------------------------------------------------------------------- below: `changed` is held

    def _admit(self, manifest: Manifest, epoch: int, link: Link) -> StoredVersion:
        self._refuse_unless_wanted(manifest, epoch)
        deadline = time.monotonic() + STREAM_LEAVES_S
        while self._stream is not None:
            self._stream.shutdown()
            # Two threads must never write one segment, so the old one has to be out before the new one starts.
            if not self.changed.wait(deadline - time.monotonic()):
                raise Refused(Refusal(f"the previous stream did not end within {STREAM_LEAVES_S:g} s"))
            self._refuse_unless_wanted(manifest, epoch)
        self._stream = link
        self._epoch = epoch
        if self.incoming is not None and self.incoming.manifest != manifest:
            self._discard(self.incoming)
        if self.incoming is None:
            self.incoming, evicted = self.ring.begin(manifest)
            for gone in evicted:
                self._tell(VersionEvicted(MachineId(self.machine), gone))
        self.changed.notify_all()
        return self.incoming

    def _refuse_unless_wanted(self, manifest: Manifest, epoch: int) -> None:
        newest = self.ring.newest
        if newest is not None and manifest.version <= newest:
            raise Refused(Refusal(f"version {manifest.version} is not newer than version {newest}, complete", newest))
        if epoch < self._epoch:
            raise Refused(Refusal(f"chain epoch {epoch} is over; it is {self._epoch}", newest))
        arriving = self.incoming
        if arriving is not None and self._stream is not None and manifest.version < arriving.version:
            raise Refused(Refusal(f"version {arriving.version} is arriving, newer than {manifest.version}", newest))

    def _still_mine(self, stored: StoredVersion, link: Link) -> None:
        if self._stream is not link or self.incoming is not stored:
            raise Superseded(f"version {stored.version} now comes from elsewhere, or a newer one does")

    def _discard(self, stored: StoredVersion) -> None:
        self.ring.discard(stored)
        self.incoming = None
        self.changed.notify_all()


class ShelfSource:
    """A version on the shelf as the forwarder sends it: chunk by chunk, as they arrive."""

    def __init__(self, shelf: Shelf, stored: StoredVersion, arrival_deadline_s: float) -> None:
        self.stored = stored
        self.manifest = stored.manifest
        self._shelf = shelf
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
        changed, stored = self._shelf.changed, self.stored
        with changed:
            in_time = changed.wait_for(
                lambda: there() or stored.removed or not still_wanted(), self._arrival_deadline_s
            )
            if not in_time:
                raise Superseded(f"{what} of version {stored.version} did not come for {self._arrival_deadline_s:g} s")
            if stored.removed or not still_wanted():
                raise Superseded(f"version {stored.version} is not sent on from here any more")
