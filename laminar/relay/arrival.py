"""Counts a version in: what one stream still has to bring, and how the streams of several ranks make one whole.

A version that comes from one upstream comes in order, chunk after chunk. One that comes in shards is whole up to the
first byte that some rank has not sent yet; each chunk below that is summed here, once, and may then be forwarded.
"""

import threading
from collections.abc import Sequence

from laminar.relay.chunks import chunk_checksum, chunk_span, combine_checksums, count_chunks
from laminar.relay.links import Link, LinkError
from laminar.relay.ring import StoredVersion
from laminar.relay.shards import Body, Shard, check_cover
from laminar.relay.stream import Hello


class Assembly:
    """The shards of one version, as far as they came. `lock`: for whoever counts in; its holder alone sums chunks."""

    def __init__(self, stored: StoredVersion, num_ranks: int) -> None:
        self.lock = threading.Lock()
        self.num_ranks = num_ranks
        self.ended: set[int] = set()
        self._stored = stored
        self._shards: dict[int, Shard] = {}
        self._bodies: dict[int, Body] = {}
        self._num_received: dict[int, int] = {}

    def join(self, shard: Shard) -> int:
        """A rank streams (again); returns its first missing chunk. Raises LinkError for shards that are no whole."""
        manifest = self._stored.manifest
        if shard.num_ranks != self.num_ranks or self._shards.get(shard.rank, shard) != shard:
            raise LinkError(f"rank {shard.rank} of {shard.num_ranks} does not belong to these {self.num_ranks} shards")
        if shard.rank not in self._shards:
            body = Body(shard)
            here = body.num_bytes_below(min(len(self._stored.checksums) * manifest.chunk_bytes, manifest.num_bytes))
            if here < body.num_bytes:
                here -= here % manifest.chunk_bytes
            self._shards[shard.rank], self._bodies[shard.rank] = shard, body
            self._num_received[shard.rank] = here
        if len(self._shards) == self.num_ranks:
            self._check_cover()
        return count_chunks(self._num_received[shard.rank], manifest.chunk_bytes)

    def spans(self, rank: int, index: int) -> list[slice]:
        span = self._span(rank, index)
        return self._bodies[rank].spans(span.start, span.stop)

    def num_chunks(self, rank: int) -> int:
        return count_chunks(self._bodies[rank].num_bytes, self._stored.manifest.chunk_bytes)

    def count_in(self, rank: int, index: int) -> None:
        self._num_received[rank] = self._span(rank, index).stop

    def sum_up(self) -> list[int]:
        """The checksums of the version's chunks that are whole and were not summed before. `lock` is held."""
        manifest = self._stored.manifest
        if len(self._shards) < self.num_ranks:
            return []
        whole_bytes = min(
            body.frontier(self._num_received[rank], manifest.num_bytes) for rank, body in self._bodies.items()
        )
        num_whole = whole_bytes // manifest.chunk_bytes
        if whole_bytes == manifest.num_bytes:
            num_whole = count_chunks(manifest.num_bytes, manifest.chunk_bytes)
        return [
            chunk_checksum(self._stored.segment.view[chunk_span(i, manifest.num_bytes, manifest.chunk_bytes)])
            for i in range(len(self._stored.checksums), num_whole)
        ]

    def _span(self, rank: int, index: int) -> slice:
        return chunk_span(index, self._bodies[rank].num_bytes, self._stored.manifest.chunk_bytes)

    def _check_cover(self) -> None:
        try:
            check_cover(list(self._shards.values()), self._stored.manifest.num_bytes)
        except ValueError as error:
            raise LinkError(f"the ranks' shards of version {self._stored.version} are not a whole: {error}") from None


class Stream:
    """One stream in: the part of a version that it brings, and how far it is."""

    def __init__(self, stored: StoredVersion, hello: Hello, link: Link) -> None:
        self.stored = stored
        self.link = link
        self.shard = hello.shard
        self.beside = hello.beside
        self.checksums: list[int] = []
        """Of the chunks that came by this stream."""
        manifest = stored.manifest
        if self.shard is None:
            self.first = len(stored.checksums)
            self.num_chunks = count_chunks(manifest.num_bytes, manifest.chunk_bytes)
        else:
            assert stored.assembly is not None
            self.first = stored.assembly.join(self.shard)
            self.num_chunks = stored.assembly.num_chunks(self.shard.rank)

    def targets(self, index: int) -> Sequence[memoryview]:
        """Where the chunk's bytes go."""
        manifest, view = self.stored.manifest, self.stored.segment.view
        if self.shard is None:
            return [view[chunk_span(index, manifest.num_bytes, manifest.chunk_bytes)]]
        assert self.stored.assembly is not None
        return [view[span] for span in self.stored.assembly.spans(self.shard.rank, index)]

    def check_shard(self, checksum: int) -> None:
        """Whether the shard's bytes are those that the rank sent; only one that came by one stream can tell."""
        if self.first == 0 and combine_checksums(self.checksums) != checksum:
            assert self.shard is not None
            raise LinkError(f"the shard of rank {self.shard.rank} does not match its checksum")
