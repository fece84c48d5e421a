"""Receives a version from a relay's upstream straight into its segment: the other half of stream.push."""

from laminar.relay.chunks import chunk_checksum, chunk_span, count_chunks
from laminar.relay.layout import check_manifest
from laminar.relay.links import Kind, Link, LinkError, decode
from laminar.relay.shelf import Shelf
from laminar.relay.stream import Hello


def receive_hello(link: Link) -> Hello:
    """The announcement that opens a stream; raises LinkError for one that cannot be."""
    _, payload = link.receive(Kind.HELLO)
    hello = decode(payload, Hello, link.peer)
    try:
        check_manifest(hello.manifest)
    except ValueError as error:
        raise LinkError(f"bad manifest from {link.peer}: {error}") from None
    return hello


def take(link: Link, hello: Hello, shelf: Shelf) -> None:
    """Receive the announced version.

    Raises shelf.Refused, Superseded, or OSError when the link fails or carries what it should not; then everything
    up to the last good chunk stays on the shelf, and the next stream resumes there.
    """
    manifest = hello.manifest
    stored = shelf.begin(manifest, hello.epoch, link)
    try:
        first = len(stored.checksums)
        link.send(Kind.ANSWER, index=first)
        for index in range(first, count_chunks(manifest.num_bytes, manifest.chunk_bytes)):
            chunk = stored.segment.view[chunk_span(index, manifest.num_bytes, manifest.chunk_bytes)]
            shelf.add_chunk(stored, link, _receive_chunk(link, index, chunk, manifest.version))
        shelf.complete(stored, link, link.receive_header(Kind.END).checksum)
        link.send(Kind.DONE)
    finally:
        shelf.leave(link)


def _receive_chunk(link: Link, index: int, chunk: memoryview, version: int) -> int:
    name = f"chunk {index} of version {version}"
    header = link.receive_header(Kind.CHUNK)
    if header.index != index or header.length != len(chunk):
        raise LinkError(
            f"{link.peer} sent chunk {header.index} of {header.length} bytes instead of {name}, {len(chunk)} bytes"
        )
    link.receive_into(chunk, name)
    if chunk_checksum(chunk) != header.checksum:
        raise LinkError(f"{name} from {link.peer} does not match its checksum")
    return header.checksum
