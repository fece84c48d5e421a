"""Holds a relay's weight versions for all of its threads: streams write what arrives, others read and forward.

Every change is made, and the happening that tells of it is queued, under one lock, so happenings come in the order in
which things happened. `changed` wakes whoever waits for a chunk, for a version, or for a stream to leave.

The version that the chain brings is `incoming`: it has one stream, or one for each trainer rank. Older versions that
control has sent here come beside it, each by a stream of its own.
"""

import threading
import time
from collections.abc import Callable, Sequence

from laminar.config import RelayConfig
from laminar.control.messages import MachineId, VersionComplete, VersionEvicted
from laminar.relay.arrival import Assembly, Stream
from laminar.relay.chunks import combine_checksums
from laminar.relay.happenings import LeaseExpired, RelayHappening
from laminar.relay.lease import VersionGone
from laminar.relay.links import Link, LinkError, Refusal
from laminar.relay.manifest import Manifest
from laminar.relay.ring import Ring, StoredVersion
from laminar.relay.shelf_source import ShelfSource
from laminar.relay.stream import Hello, Superseded

STREAM_LEAVES_S = 5.0
"""A stream that was cut off for a better one must have left its segment within this long."""
NUM_BESIDE_MAX = 2
"""Older versions that may arrive at once."""


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
        self._feeding: dict[Link, int | None] = {}
        """The streams of `incoming`, by link: the rank whose shard it brings, none for all of the version."""
        self._beside: dict[Link, StoredVersion] = {}
        self._epoch = -1
        self._arrival_deadline_s = config.publish_deadline_s
        self._tell = tell

    # ------------------------------------------------------------------------------------------------- the streams in

    def begin(self, hello: Hello, link: Link) -> Stream:
        """Let `link` bring this version, or its shard of it; it resumes where an earlier stream of it ended.

        A stream of an older version, or an older stream of this one, is cut off first. Raises Refused for a version
        that is not newer than what is complete, and for a sender that the chain has left behind.
        """
        with self.changed:
            stored = self._admit_beside(hello, link) if hello.beside else self._admit(hello, link)
        try:
            with stored.reserving:
                stored.segment.reserve(hello.manifest.num_bytes)
            return self._open(stored, hello, link)
        except LinkError:
            self.leave(link)
            raise
        except OSError as error:
            self._give_up(stored, link)
            raise Refused(Refusal(str(error))) from error

    def add_chunk(self, stream: Stream, index: int, checksum: int) -> None:
        """Count one more verified chunk; raises Superseded if this stream is not the one any more."""
        stored, shard = stream.stored, stream.shard
        stream.checksums.append(checksum)
        if shard is None:
            with self.changed:
                self._still_mine(stream)
                stored.checksums.append(checksum)
                self.changed.notify_all()
            return
        assembly = stored.assembly
        assert assembly is not None
        with assembly.lock:
            assembly.count_in(shard.rank, index)
            self._grow(stream, assembly)

    def end(self, stream: Stream, checksum: int) -> None:
        """The stream brought all that it has: show the whole version to readers, once all of its streams have.

        Raises LinkError if it is not what was sent. That happens if two senders used one version number for different
        weights; it is then received anew.
        """
        stored = stream.stored
        if stream.shard is None:
            with self.changed:
                self._still_mine(stream)
                if combine_checksums(stored.checksums) != checksum:
                    self._discard(stored)
                    raise LinkError(f"version {stored.version} does not match its checksum ({checksum:016x} was sent)")
                self._complete(stored)
            return
        stream.check_shard(checksum)
        assembly = stored.assembly
        assert assembly is not None
        with self.changed:
            self._still_mine(stream)
            assembly.ended.add(stream.shard.rank)
            if len(assembly.ended) == assembly.num_ranks:
                self._complete(stored)
            self._wait_for_other_ranks(stream)

    def leave(self, link: Link) -> None:
        """The stream ended; what came stays, to be resumed, unless it came beside."""
        with self.changed:
            self._feeding.pop(link, None)
            beside = self._beside.pop(link, None)
            if beside is not None and not beside.complete and not beside.removed:
                self._discard(beside)
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

    def take_newest_after(self, version: int) -> ShelfSource | None:
        """Hold the newest version, arriving or complete, if newer than `version`. Called with `changed` held."""
        stored = self.incoming or self.ring.find(None)
        if stored is None or stored.version <= version:
            return None
        self.ring.hold(stored)
        return ShelfSource(self.changed, stored, self._arrival_deadline_s)

    def take(self, version: int) -> ShelfSource:
        """Hold a complete version, to send it beside the chain, until it is put back. Raises VersionGone."""
        return ShelfSource(self.changed, self.lease(version), self._arrival_deadline_s)

    def put_back(self, source: ShelfSource) -> None:
        with self.changed:
            self.ring.let_go(source.stored)

    def _open(self, stored: StoredVersion, hello: Hello, link: Link) -> Stream:
        if hello.shard is None:
            with self.changed:
                return Stream(stored, hello, link)
        assembly = stored.assembly
        assert assembly is not None
        with assembly.lock:
            stream = Stream(stored, hello, link)
            self._grow(stream, assembly)
            return stream

    def _grow(self, stream: Stream, assembly: Assembly) -> None:
        """Sum what the shards that are there complete, and show it to the forwarder. The assembly's lock is held."""
        summed = assembly.sum_up()
        with self.changed:
            self._still_mine(stream)
            stream.stored.checksums += summed
            self.changed.notify_all()

    def _give_up(self, stored: StoredVersion, link: Link) -> None:
        with self.changed:
            self._feeding.pop(link, None)
            self._beside.pop(link, None)
            if not stored.removed and not stored.complete:
                self._discard(stored)
            self.changed.notify_all()

    # ------------------------------------------------------------------------------------- below: `changed` is held

    def _admit(self, hello: Hello, link: Link) -> StoredVersion:
        manifest = hello.manifest
        self._refuse_unless_wanted(manifest, hello.epoch)
        deadline = time.monotonic() + STREAM_LEAVES_S
        while rivals := [other for other in self._feeding if not self._goes_with(other, hello)]:
            for rival in rivals:
                rival.shutdown()
            self.changed.notify_all()
            # Two threads must never write one segment, so the old one has to be out before the new one starts.
            if not self.changed.wait(deadline - time.monotonic()):
                raise Refused(Refusal(f"the previous stream did not end within {STREAM_LEAVES_S:g} s"))
            self._refuse_unless_wanted(manifest, hello.epoch)
        self._feeding[link] = None if hello.shard is None else hello.shard.rank
        self._epoch = hello.epoch
        if self.incoming is not None and self.incoming.manifest != manifest:
            self._discard(self.incoming)
        stored = self.incoming = self.incoming or self._place_for(manifest)
        if hello.shard is None:
            stored.assembly = None
        elif stored.assembly is None or stored.assembly.num_ranks != hello.shard.num_ranks:
            stored.assembly = Assembly(stored, hello.shard.num_ranks)
        self.changed.notify_all()
        return stored

    def _admit_beside(self, hello: Hello, link: Link) -> StoredVersion:
        version = hello.manifest.version
        if self.ring.has(version):
            raise Refused(Refusal(f"version {version} is here or arriving already"))
        if len(self._beside) >= NUM_BESIDE_MAX:
            raise Refused(Refusal(f"{NUM_BESIDE_MAX} older versions are arriving already"))
        stored = self._beside[link] = self._place_for(hello.manifest)
        return stored

    def _place_for(self, manifest: Manifest) -> StoredVersion:
        stored, evicted = self.ring.begin(manifest)
        for gone in evicted:
            self._tell(VersionEvicted(MachineId(self.machine), gone))
        return stored

    def _goes_with(self, other: Link, hello: Hello) -> bool:
        """Whether a stream may go on beside this one: it brings another rank's shard of the same version."""
        rank = self._feeding[other]
        same = self.incoming is not None and self.incoming.manifest == hello.manifest and self._epoch == hello.epoch
        return same and hello.shard is not None and rank is not None and rank != hello.shard.rank

    def _refuse_unless_wanted(self, manifest: Manifest, epoch: int) -> None:
        newest = self.ring.newest
        if newest is not None and manifest.version <= newest:
            raise Refused(Refusal(f"version {manifest.version} is not newer than version {newest}, complete", newest))
        if epoch < self._epoch:
            raise Refused(Refusal(f"chain epoch {epoch} is over; it is {self._epoch}", newest))
        arriving = self.incoming
        if arriving is not None and self._feeding and manifest.version < arriving.version:
            raise Refused(Refusal(f"version {arriving.version} is arriving, newer than {manifest.version}", newest))
        if any(stored.version == manifest.version for stored in self._beside.values()):
            raise Refused(Refusal(f"version {manifest.version} is arriving beside the chain", newest))

    def _still_mine(self, stream: Stream) -> None:
        if stream.beside:
            mine = self._beside.get(stream.link) is stream.stored and not stream.stored.removed
        else:
            mine = stream.link in self._feeding and self.incoming is stream.stored
        if not mine:
            raise Superseded(f"version {stream.stored.version} now comes from elsewhere, or a newer one does")

    def _wait_for_other_ranks(self, stream: Stream) -> None:
        stored = stream.stored

        def settled() -> bool:
            # It waits for others here, not on its link, so nothing but this tells that the link was shut down.
            return stored.complete or stored.removed or stream.link not in self._feeding or stream.link.was_shut_down

        if not self.changed.wait_for(settled, self._arrival_deadline_s):
            raise Superseded(f"other ranks' shards of version {stored.version} did not come")
        if not stored.complete:
            self._still_mine(stream)
            raise Superseded(f"the stream of version {stored.version} was ended before other ranks' shards came")

    def _complete(self, stored: StoredVersion) -> None:
        stored.checksum = combine_checksums(stored.checksums)
        if self.incoming is stored:
            self.incoming = None
        self._tell(VersionComplete(MachineId(self.machine), stored.version))
        self.changed.notify_all()

    def _discard(self, stored: StoredVersion) -> None:
        self.ring.discard(stored)
        if self.incoming is stored:
            self.incoming = None
        self.changed.notify_all()
