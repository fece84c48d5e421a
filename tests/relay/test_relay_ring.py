"""The ring's promises under any order of operations, and the chunk arithmetic."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.relay.chunks import (
    CHUNK_BYTES_DEFAULT_MAX,
    CHUNK_BYTES_MIN,
    best_chunk_bytes,
    chunk_checksum,
    chunk_span,
    combine_checksums,
    count_chunks,
    version_checksum,
)
from laminar.relay.ring import Ring, StoredVersion
from tests.relay.relay_machines import manifest_of

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.booleans()),
        st.tuples(st.just("hold"), st.integers(0, 30)),
        st.tuples(st.just("let_go"), st.integers(0, 30)),
        st.tuples(st.just("retain"), st.sets(st.integers(0, 30), max_size=3)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=300)
@given(num_versions_kept=st.integers(3, 5), operations=OPERATIONS)
def test_ring_never_reuses_a_held_segment_nor_drops_the_newest(num_versions_kept: int, operations):
    ring = Ring(num_versions_kept)
    held: list[StoredVersion] = []
    version = 0
    incoming: StoredVersion | None = None
    for name, argument in operations:
        newest = ring.newest
        if name == "arrive":
            if incoming is not None:
                ring.discard(incoming)  # A newer one overtakes it.
            evictable = set(ring.complete_versions) - {newest} - {one.version for one in held}
            version += 1
            incoming, evicted = ring.begin(manifest_of(version, 1))
            assert set(evicted) <= evictable
            assert all(one.segment is not incoming.segment for one in held)
            if argument:
                incoming.checksum = 1
                incoming = None
        elif name == "hold" and (found := ring.find(argument)) is not None:
            ring.hold(found)
            held.append(found)
        elif name == "let_go" and held:
            ring.let_go(held.pop(argument % len(held)))
        elif name == "retain":
            ring.retain(sorted(argument))
        assert newest is None or newest in ring.complete_versions or (ring.newest or 0) > newest
        segments = [stored.segment for stored in ring._stored.values()] + ring._free
        assert len(set(map(id, segments))) == len(segments) <= ring.num_segments
        # Never more than the ring, but for segments that someone holds.
        assert ring.num_segments <= num_versions_kept + len({one.version for one in held}) + 1
        assert {one.version for one in held} <= set(ring.complete_versions)


def complete(ring: Ring, version: int) -> tuple[StoredVersion, list[int]]:
    stored, evicted = ring.begin(manifest_of(version, 1))
    stored.checksum = version
    return stored, evicted


def test_oldest_unneeded_goes_first_then_the_oldest_retained():
    ring = Ring(3)
    for version in (1, 2, 3):
        complete(ring, version)
    ring.retain([1])
    assert complete(ring, 4)[1] == [2]
    ring.retain([1, 3])
    assert complete(ring, 5)[1] == [1]
    assert ring.complete_versions == [3, 4, 5]


def test_held_versions_stay_and_one_segment_more_is_counted():
    ring = Ring(3)
    held = [complete(ring, version)[0] for version in (1, 2, 3)]
    for stored in held:
        ring.hold(stored)
    assert complete(ring, 4)[1] == []
    assert (ring.num_segments, ring.num_overflows) == (4, 1)
    for stored in held:
        ring.let_go(stored)
    assert complete(ring, 5)[1] == [1, 2]  # The ring shrinks back to its size.
    assert ring.num_segments == 3


def test_version_that_was_overtaken_keeps_its_segment_while_it_is_still_being_sent():
    ring = Ring(3)
    overtaken, _ = ring.begin(manifest_of(1, 1))
    ring.hold(overtaken)
    ring.discard(overtaken)
    newer, _ = ring.begin(manifest_of(2, 1))
    assert newer.segment is not overtaken.segment
    ring.let_go(overtaken)
    newer.checksum = 1
    assert ring.begin(manifest_of(3, 1))[0].segment is overtaken.segment


@settings(deadline=None)
@given(st.integers(1, 1 << 12), st.integers(1, 1 << 12))
def test_chunks_cover_every_byte_once(num_bytes: int, chunk_bytes: int):
    spans = [chunk_span(index, num_bytes, chunk_bytes) for index in range(count_chunks(num_bytes, chunk_bytes))]
    assert spans[0].start == 0
    assert spans[-1].stop == num_bytes
    assert all(before.stop == after.start for before, after in pairwise(spans))


def test_version_checksum_is_that_of_its_chunks_checksums():
    data = memoryview(bytes(range(256)) * 10)
    chunks = [data[:1000], data[1000:2000], data[2000:]]
    assert version_checksum(data, 1000) == combine_checksums([chunk_checksum(chunk) for chunk in chunks])


@pytest.mark.parametrize(("num_relays", "startup_s"), [(7, 0.02), (3, 0.02)])
def test_chunk_size_is_the_formulas_best(num_relays: int, startup_s: float):
    """Against the formula itself, T = (p + k - 2) (M T_byte / k + T_start), by trying every k; 128 MB at 1 Gbit."""
    num_bytes, bytes_per_s = 128 << 20, 119.5e6
    nodes = num_relays + 1

    def broadcast_s(num_chunks: float) -> float:
        return (nodes + num_chunks - 2) * (num_bytes / bytes_per_s / num_chunks + startup_s)

    best_s = min(broadcast_s(k) for k in range(1, 200))
    chunk = best_chunk_bytes(num_bytes, num_relays, link_startup_s=startup_s, link_bytes_per_s=bytes_per_s)
    bounded_s = broadcast_s(num_bytes / CHUNK_BYTES_DEFAULT_MAX)
    assert broadcast_s(num_bytes / chunk) <= max(best_s, bounded_s) * 1.01


def test_chunk_size_follows_the_square_root_within_its_bounds():
    link = {"link_startup_s": 5e-6, "link_bytes_per_s": 3e9}
    sizes = [best_chunk_bytes(64 << 20, num_relays, **link) for num_relays in (2, 5, 17)]
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.01)
    assert sizes[0] == pytest.approx(4 * sizes[2], rel=0.01)
    assert best_chunk_bytes(1 << 40, 1, **link) == CHUNK_BYTES_DEFAULT_MAX
    assert best_chunk_bytes(100, 1, **link) == CHUNK_BYTES_MIN
    assert best_chunk_bytes(64 << 20, 4, link_startup_s=0, link_bytes_per_s=3e9) == CHUNK_BYTES_MIN
