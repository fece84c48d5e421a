"""Maps what one trainer rank holds of a version to where it lies in the whole, so that nothing is gathered anywhere.

    version   |  tensor a, 4 rows   |pad|    tensor b, 3 rows    |pad|        chunks are cut from this ...
    rank 0    |a0 a1|               |   |b0 b1|                  |   |   ->   |a0 a1|b0 b1|
    rank 1    |     |a2 a3          |pad|     |b2                |pad|   ->   |a2 a3 pad|b2 pad|
                                                                              ... and from each rank's body

A rank's body is its ranges end to end, in the order of the version's bytes; it is streamed like a version of its own.
The padding behind a tensor belongs to the rank that has its last row, so every byte has exactly one sender and any two
relays that assemble a version get the same bytes.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from laminar.relay.manifest import TensorEntry


class Shard(msgspec.Struct, frozen=True):
    """A rank's part of a version: (offset, num_bytes) ranges of it, ascending, none empty."""

    rank: int
    num_ranks: int
    ranges: tuple[tuple[int, int], ...]


class Rows(msgspec.Struct, frozen=True):
    """Which rows (of dimension 0) of a tensor of `shape` a rank holds: `num_rows` from `first` on."""

    shape: tuple[int, ...]
    first: int
    num_rows: int


class Body:
    """A shard's bytes end to end: where each of them lies in the version."""

    def __init__(self, shard: Shard) -> None:
        self._ranges = shard.ranges
        self._starts = [0, *accumulate(num_bytes for _, num_bytes in shard.ranges)]

    @property
    def num_bytes(self) -> int:
        return self._starts[-1]

    def spans(self, start: int, stop: int) -> list[slice]:
        """Where the body's bytes [start, stop) lie, in order."""
        found: list[slice] = []
        position = bisect_right(self._starts, start) - 1
        while start < stop:
            offset, num_bytes = self._ranges[position]
            first = offset + start - self._starts[position]
            num_here = min(stop, self._starts[position] + num_bytes) - start
            found.append(slice(first, first + num_here))
            start += num_here
            position += 1
        return found

    def frontier(self, num_received: int, whole_bytes: int) -> int:
        """The version's first byte that is missing of this body when its first `num_received` bytes are there."""
        if num_received >= self.num_bytes:
            return whole_bytes
        position = bisect_right(self._starts, num_received) - 1
        return self._ranges[position][0] + num_received - self._starts[position]

    def num_bytes_below(self, offset: int) -> int:
        """How many of the body's bytes lie below `offset` of the version."""
        position = bisect_right(self._ranges, (offset, 0))
        if position == 0:
            return 0
        start, num_bytes = self._ranges[position - 1]
        return self._starts[position - 1] + min(num_bytes, offset - start)


def plan_shard(
    entries: Sequence[TensorEntry], rows: Mapping[str, Rows], *, rank: int, num_ranks: int, whole_bytes: int
) -> Shard:
    """What this rank sends. rows: what it holds of each tensor that is sharded; rank 0 sends all of the others."""
    ends = [*(entry.offset for entry in entries[1:]), whole_bytes]
    ranges: list[tuple[int, int]] = []
    for entry, end in zip(entries, ends, strict=True):
        held = rows.get(entry.name)
        if held is None:
            start, stop = (entry.offset, end) if rank == 0 else (0, 0)
        else:
            row_bytes = entry.num_bytes // entry.shape[0] if entry.shape[0] else 0
            start = entry.offset + held.first * row_bytes
            has_last = held.num_rows > 0 and held.first + held.num_rows == entry.shape[0]
            stop = end if has_last else start + held.num_rows * row_bytes
        if stop > start:
            ranges.append((start, stop - start))
    return Shard(rank, num_ranks, tuple(ranges))


def check_shard(shard: Shard, whole_bytes: int) -> None:
    """Raise ValueError for a shard that no rank can have."""
    if not 0 <= shard.rank < shard.num_ranks:
        raise ValueError(f"there is no rank {shard.rank} among {shard.num_ranks}")
    end = 0
    for offset, num_bytes in shard.ranges:
        if num_bytes < 1 or offset < end or offset + num_bytes > whole_bytes:
            raise ValueError(f"rank {shard.rank} states {num_bytes} bytes at {offset} of {whole_bytes}")
        end = offset + num_bytes


def check_cover(shards: Sequence[Shard], whole_bytes: int) -> None:
    """Raise ValueError, naming the place, unless the shards state every byte exactly once."""
    stated = sorted((offset, num_bytes, shard.rank) for shard in shards for offset, num_bytes in shard.ranges)
    end = 0
    for offset, num_bytes, rank in stated:
        if offset != end:
            kind = "no rank sends" if offset > end else f"rank {rank} and another both send"
            raise ValueError(f"{kind} the bytes from {min(offset, end)} to {max(offset, end)}")
        end = offset + num_bytes
    if end != whole_bytes:
        raise ValueError(f"no rank sends the bytes from {end} to {whole_bytes}")
