"""Cuts a version into chunks and sums them: how big a chunk is, where it lies, what proves that it arrived whole."""

import math
import struct
from collections.abc import Sequence

import xxhash

CHUNK_BYTES_MIN = 1 << 16
"""Below this, headers and system calls cost more than the link."""
CHUNK_BYTES_DEFAULT_MAX = 4 << 20
"""Above this nothing is gained on any link measured, and a chunk that has to be sent again costs more."""
CHUNK_BYTES_MAX = 64 << 20
"""The most that a frame may carry, and so the most that `relay.chunk_bytes` may ask for."""


def best_chunk_bytes(num_bytes: int, num_relays: int, *, link_startup_s: float, link_bytes_per_s: float) -> int:
    """Chunk size that makes a chain broadcast fastest (the paper's appendix D), a multiple of 64 bytes.

    k chunks over p nodes take (p + k - 2) (M T_byte / k + T_start), least at k = sqrt((p - 2) M T_byte / T_start).
    The sender is the first node, so p is num_relays + 1. A link without start-up time wants the smallest chunks, a
    chain of one relay a single chunk; both are bounded, because a chunk is also what is checked and sent again.
    """
    transfer_s = num_bytes / link_bytes_per_s
    hops_after_first = max(num_relays - 1, 0)
    if link_startup_s == 0:
        best = CHUNK_BYTES_MIN
    else:
        num_chunks = max(math.sqrt(hops_after_first * transfer_s / link_startup_s), 1.0)
        best = math.ceil(num_bytes / num_chunks)
    return -(-min(max(best, CHUNK_BYTES_MIN), CHUNK_BYTES_DEFAULT_MAX) // 64) * 64


def count_chunks(num_bytes: int, chunk_bytes: int) -> int:
    return -(-num_bytes // chunk_bytes)


def chunk_span(index: int, num_bytes: int, chunk_bytes: int) -> slice:
    """Where chunk `index` lies; the last one may be shorter."""
    return slice(index * chunk_bytes, min((index + 1) * chunk_bytes, num_bytes))


def chunk_checksum(chunk: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(chunk)


def checksum_of(pieces: Sequence[memoryview]) -> int:
    """The checksum of a chunk that lies in several places, in this order."""
    if len(pieces) == 1:
        return chunk_checksum(pieces[0])
    summed = xxhash.xxh3_64()
    for piece in pieces:
        summed.update(piece)
    return summed.intdigest()


def combine_checksums(checksums: Sequence[int]) -> int:
    """The whole version's checksum: xxh3_64 over its chunks' checksums, 8 bytes each, little endian."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(checksums)}Q", *checksums))


def version_checksum(data: memoryview, chunk_bytes: int) -> int:
    """The same, from the bytes: what a reader computes to prove that it serves what was published."""
    num_chunks = count_chunks(len(data), chunk_bytes)
    spans = (chunk_span(index, len(data), chunk_bytes) for index in range(num_chunks))
    return combine_checksums([chunk_checksum(data[span]) for span in spans])
