"""Says what carries the bytes of chunks between two machines, and carries them over plain sockets.

Everything else of a stream (who may send, what, from where on, and that it is whole) goes as frames over the link,
whatever the transport: a lost peer is a broken link, and the next stream resumes at the first missing chunk.
"""

from collections.abc import Sequence
from typing import Protocol

from laminar.relay.chunks import checksum_of
from laminar.relay.links import Kind, Link, LinkError
from laminar.relay.segments import Segment


class Outlet(Protocol):
    """The sending end of one stream. Both may raise OSError; chunks come in order."""

    def send(self, index: int, chunk: memoryview, spans: Sequence[slice], checksum: int) -> None:
        """spans: where the chunk's bytes lie in the version, in order; more than one for a rank's shard."""
        ...

    def flush(self) -> None:
        """Return when every chunk has been received, or is on its way in a stream that keeps order."""
        ...

    def close(self) -> None:
        """The stream ended, well or not: nothing is read from the body any more."""
        ...


class Inlet(Protocol):
    """The receiving end of one stream."""

    offer: bytes
    """What the sender must know to reach the segment; goes to it with the answer to its hello."""

    def receive(self, index: int, targets: Sequence[memoryview], what: str) -> int:
        """Fill the targets with the next chunk and verify it; returns its checksum. OSError if it is not `what`."""
        ...


class Transport(Protocol):
    name: str
    writes_remotely: bool
    """Whether a peer writes into the segment itself, and so may go on when its stream was given up."""

    def inlet(self, link: Link, segment: Segment) -> Inlet: ...

    def outlet(self, link: Link, offer: bytes, body: memoryview) -> Outlet:
        """body: the memory that all of the stream's chunks lie in."""
        ...


class SocketTransport:
    """Chunks as frames over the link itself."""

    name = "sockets"
    writes_remotely = False

    def inlet(self, link: Link, segment: Segment) -> "SocketInlet":
        return SocketInlet(link)

    def outlet(self, link: Link, offer: bytes, body: memoryview) -> "SocketOutlet":
        return SocketOutlet(link)


class SocketOutlet:
    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, index: int, chunk: memoryview, spans: Sequence[slice], checksum: int) -> None:
        self._link.send(Kind.CHUNK, chunk, index=index, checksum=checksum)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class SocketInlet:
    offer = b""

    def __init__(self, link: Link) -> None:
        self._link = link

    def receive(self, index: int, targets: Sequence[memoryview], what: str) -> int:
        link, length = self._link, sum(map(len, targets))
        header = link.receive_header(Kind.CHUNK)
        if header.index != index or header.length != length:
            raise LinkError(
                f"{link.peer} sent chunk {header.index} of {header.length} bytes instead of {what}, {length} bytes"
            )
        link.receive_scattered(targets, what)
        check_chunk(targets, header.checksum, what, link.peer)
        return header.checksum


def check_chunk(targets: Sequence[memoryview], checksum: int, what: str, peer: str) -> None:
    if checksum_of(targets) != checksum:
        raise LinkError(f"{what} from {peer} does not match its checksum")
