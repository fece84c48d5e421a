"""Streams one version over one link: `push` sends what a source has; the receiving half is intake.py.

push                                   take (intake.py)
  HELLO(manifest, epoch)  ───────────►   begin: refuse, start, or resume
                          ◄───────────  ANSWER(first chunk wanted)
  CHUNK(index, xxh3, bytes) ─────────►   received into the segment, verified, counted
  … as they become available …           (a bad one ends the link; the next HELLO resumes before it)
  END(xxh3 of all)        ───────────►   checked, shown to readers
                          ◄───────────  DONE
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from laminar.relay.chunks import chunk_span, count_chunks
from laminar.relay.links import Kind, Link, LinkError, LinkRefused
from laminar.relay.manifest import Manifest

SEND_STALL_S = 5.0
"""A receiver that takes no byte for so long is taken for lost. It never waits for anybody else, so it has no excuse."""


class Hello(msgspec.Struct, frozen=True):
    """Announces a version; a receiver refuses an epoch of the chain older than the newest it has heard of."""

    manifest: Manifest
    epoch: int


class Superseded(Exception):
    """A version will not be completed, or no longer from here: a newer one, or a newer stream, took its place."""


class Source(Protocol):
    """A version that can be sent, complete or still arriving. The waits raise Superseded."""

    manifest: Manifest

    @property
    def view(self) -> memoryview: ...

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
    *,
    answer_deadline_s: float,
    still_wanted: Callable[[], bool],
    on_progress: Callable[[int], None],
) -> None:
    """Send a version, following its arrival here; returns when the peer has it complete and checked.

    Raises LinkRefused with the peer's reason, Superseded, or OSError when the link fails. on_progress is called with
    the bytes that the peer has got or been sent so far.
    """
    # The peer may first have to allocate the segment, at about 1 GB/s.
    link.limit_waits(answer_deadline_s)
    try:
        first = _announce(link, source.manifest, epoch)
        on_progress(min(first * source.manifest.chunk_bytes, source.manifest.num_bytes))
        link.limit_waits(SEND_STALL_S)
        _send_from(link, source, first, still_wanted, on_progress)
    except LinkRefused:
        raise
    except LinkError as error:
        raise link.last_word() or error from error


def _announce(link: Link, manifest: Manifest, epoch: int) -> int:
    """Returns the first chunk that the peer lacks."""
    link.send(Kind.HELLO, msgspec.msgpack.encode(Hello(manifest, epoch)))
    answer, _ = link.receive(Kind.ANSWER)
    if answer.index > count_chunks(manifest.num_bytes, manifest.chunk_bytes):
        raise LinkError(f"{link.peer} wants chunk {answer.index}, which version {manifest.version} has not got")
    return answer.index


def _send_from(
    link: Link, source: Source, first: int, still_wanted: Callable[[], bool], on_progress: Callable[[int], None]
) -> None:
    manifest = source.manifest
    for index in range(first, count_chunks(manifest.num_bytes, manifest.chunk_bytes)):
        checksum = source.wait_chunk(index, still_wanted)
        span = chunk_span(index, manifest.num_bytes, manifest.chunk_bytes)
        link.send(Kind.CHUNK, source.view[span], index=index, checksum=checksum)
        on_progress(span.stop)
    link.send(Kind.END, checksum=source.wait_complete(still_wanted))
    link.receive(Kind.DONE)
