"""Streams one version over one link: `push` sends what a source has; the receiving half is intake.py.

push                                   take (intake.py)
  HELLO(manifest, epoch)  ───────────►   begin: refuse, start, or resume
                          ◄───────────  ANSWER(first chunk wanted)
  CHUNK(index, xxh3, bytes) ─────────►   received into the segment, verified, counted
  … as they become available …           (a bad one ends the link; the next HELLO resumes before it)
  END(xxh3 of all)        ───────────►   checked, shown to readers
                          ◄───────────  DONE

A trainer rank that holds a part of the version (a shard) streams that part in the same way; DONE then comes when the
parts of all ranks are there.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from laminar.relay.chunks import chunk_span, count_chunks
from laminar.relay.links import Kind, Link, LinkError, LinkRefused
from laminar.relay.manifest import Manifest
from laminar.relay.shards import Body, Shard
from laminar.relay.transport import Transport

SEND_STALL_S = 5.0
"""A receiver that takes no byte for so long is taken for lost. It never waits for anybody else, so it has no excuse."""


class Hello(msgspec.Struct, frozen=True):
    """Announces a version; a receiver refuses an epoch of the chain older than the newest it has heard of.

    shard: the part that this stream carries; none: all of it. beside: an older version, on order, beside whatever the
    chain brings.
    """

    manifest: Manifest
    epoch: int
    transport: str
    shard: Shard | None = None
    beside: bool = False


class Superseded(Exception):
    """A version will not be completed, or no longer from here: a newer one, or a newer stream, took its place."""


class Source(Protocol):
    """A version that can be sent, complete or still arriving, or a rank's shard of one. The waits raise Superseded."""

    manifest: Manifest
    shard: Shard | None

    @property
    def view(self) -> memoryview:
        """What is sent, end to end: the whole version, or the shard."""
        ...

    def wait_chunk(self, index: int, still_wanted: Callable[[], bool]) -> int:
        """Wait until the chunk is there; returns its checksum."""
        ...

    def wait_complete(self, still_wanted: Callable[[], bool]) -> int:
        """Wait until the version is complete; returns its checksum."""
        ...


def push(
    link: Link,
    source: Source,
    epoch: int,
    transport: Transport,
    *,
    answer_deadline_s: float,
    still_wanted: Callable[[], bool],
    on_progress: Callable[[int], None],
    beside: bool = False,
) -> None:
    """Send a version, following its arrival here; returns when the peer has it complete and checked.

    Raises LinkRefused with the peer's reason, Superseded, or OSError when the link fails. on_progress is called with
    the bytes that the peer has got or been sent so far.
    """
    # The peer may first have to allocate the segment, at about 1 GB/s.
    link.limit_waits(answer_deadline_s)
    try:
        link.send(
            Kind.HELLO, msgspec.msgpack.encode(Hello(source.manifest, epoch, transport.name, source.shard, beside))
        )
        answer, offer = link.receive(Kind.ANSWER)
        link.limit_sends(SEND_STALL_S)
        _send_from(link, source, answer.index, transport, offer, still_wanted, on_progress)
    except LinkRefused:
        raise
    except LinkError as error:
        raise link.last_word() or error from error


def _send_from(
    link: Link,
    source: Source,
    first: int,
    transport: Transport,
    offer: bytes,
    still_wanted: Callable[[], bool],
    on_progress: Callable[[int], None],
) -> None:
    manifest = source.manifest
    body = None if source.shard is None else Body(source.shard)
    num_bytes = manifest.num_bytes if body is None else body.num_bytes
    num_chunks = count_chunks(num_bytes, manifest.chunk_bytes)
    if first > num_chunks:
        raise LinkError(f"{link.peer} wants chunk {first}, which version {manifest.version} has not got")
    on_progress(min(first * manifest.chunk_bytes, num_bytes))
    if first < num_chunks:
        # A source that still arrives has no memory before its first chunk.
        source.wait_chunk(first, still_wanted)
        outlet = transport.outlet(link, offer, source.view)
        try:
            for index in range(first, num_chunks):
                checksum = source.wait_chunk(index, still_wanted)
                span = chunk_span(index, num_bytes, manifest.chunk_bytes)
                spans = [span] if body is None else body.spans(span.start, span.stop)
                outlet.send(index, source.view[span], spans, checksum)
                on_progress(span.stop)
            outlet.flush()
        finally:
            outlet.close()
    link.send(Kind.END, checksum=source.wait_complete(still_wanted))
    link.receive(Kind.DONE)
