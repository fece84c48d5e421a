"""Receives a version from a relay's upstream straight into its segment: the other half of stream.push."""

from laminar.relay.layout import check_manifest
from laminar.relay.links import Kind, Link, LinkError, decode
from laminar.relay.shards import check_shard
from laminar.relay.shelf import Shelf
from laminar.relay.stream import Hello
from laminar.relay.transport import Transport


def receive_hello(link: Link, transport: Transport) -> Hello:
    """The announcement that opens a stream; raises LinkError for one that cannot be."""
    _, payload = link.receive(Kind.HELLO)
    hello = decode(payload, Hello, link.peer)
    try:
        check_manifest(hello.manifest)
        if hello.shard is not None:
            check_shard(hello.shard, hello.manifest.num_bytes)
    except ValueError as error:
        raise LinkError(f"bad manifest from {link.peer}: {error}") from None
    if hello.transport != transport.name:
        raise LinkError(
            f"{link.peer} sends by {hello.transport[:40]!r}, this relay receives by {transport.name!r}: "
            "set relay.transport alike everywhere"
        )
    return hello


def take(link: Link, hello: Hello, shelf: Shelf, transport: Transport) -> None:
    """Receive the announced version, or a rank's shard of it.

    Raises shelf.Refused, Superseded, or OSError when the link fails or carries what it should not; then everything
    up to the last good chunk stays on the shelf, and the next stream resumes there.
    """
    stream = shelf.begin(hello, link)
    try:
        inlet = transport.inlet(link, stream.stored.segment)
        link.send(Kind.ANSWER, inlet.offer, index=stream.first)
        for index in range(stream.first, stream.num_chunks):
            what = f"chunk {index} of version {hello.manifest.version}"
            shelf.add_chunk(stream, index, inlet.receive(index, stream.targets(index), what))
        shelf.end(stream, link.receive_header(Kind.END).checksum)
        link.send(Kind.DONE)
    except BaseException:
        # A peer that was given up may still write there, if it writes at all: not into another version.
        stream.stored.segment.is_tainted |= transport.writes_remotely
        raise
    finally:
        shelf.leave(link)
