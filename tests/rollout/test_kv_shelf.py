"""What a replica leaves for another of its machine, and what that one accepts."""

import os

import msgspec
import pytest

from laminar.control.messages import MachineId, TrajectoryId
from laminar.data.records import KvParcel
from laminar.rollout import kv_shelf
from laminar.rollout.engines.engine import ExportedKv
from laminar.rollout.kv_shelf import KvShelf


class Exports:
    """An engine, as far as the shelf knows one: trajectory n has n bytes of n."""

    def export_kv(self, ids, allocate):
        parts, end = {}, 0
        for id_ in ids:
            parts[id_] = ExportedKv(num_tokens=id_, offset=end, num_bytes=id_)
            end += id_
        if parts:
            memory = allocate(end)
            for id_, part in parts.items():
                memory[part.offset : part.offset + part.num_bytes] = bytes([id_]) * id_
        return parts


@pytest.fixture
def source():
    shelf = KvShelf(MachineId(0))
    yield shelf
    shelf.close()


@pytest.fixture
def parcels(source) -> tuple[KvParcel, ...]:
    return source.leave(Exports(), [TrajectoryId(3), TrajectoryId(5)], version=7)


def test_what_is_left_is_what_is_taken(parcels):
    target = KvShelf(MachineId(0))
    assert [(p.trajectory, p.num_tokens) for p in parcels] == [(3, 3), (5, 5)]
    assert [bytes(target.take(p, version=7) or b"") for p in parcels] == [bytes([3]) * 3, bytes([5]) * 5]


def test_it_outlives_the_replica_that_left_it_once_it_is_taken(source, parcels):
    taken = KvShelf(MachineId(0)).take(parcels[1], version=7)
    source.close()
    assert bytes(taken) == bytes([5]) * 5


def test_nothing_is_taken_from_another_machine_of_another_version_or_that_is_gone(source, parcels):
    parcel = parcels[0]
    assert KvShelf(MachineId(1)).take(parcel, version=7) is None
    assert KvShelf(MachineId(0)).take(parcel, version=8) is None
    source.close()
    assert KvShelf(MachineId(0)).take(parcel, version=7) is None


def test_another_file_under_the_same_name_is_not_taken(source, parcels, tmp_path):
    """Numbers of processes and descriptors come again; what is behind one must be what was left."""
    other = tmp_path / "other"
    other.write_bytes(b"x" * 100)
    fd = os.open(other, os.O_RDONLY)
    try:
        wrong = msgspec.structs.replace(parcels[0], path=f"/proc/{os.getpid()}/fd/{fd}")
        assert KvShelf(MachineId(0)).take(wrong, version=7) is None
        longer = msgspec.structs.replace(wrong, num_bytes=4096)
        assert KvShelf(MachineId(0)).take(longer, version=7) is None
    finally:
        os.close(fd)


def test_what_nobody_comes_for_is_freed_after_a_while(source, monkeypatch):
    monkeypatch.setattr(kv_shelf, "HELD_S", 0.0)
    (parcel,) = source.leave(Exports(), [TrajectoryId(3)], version=7)
    assert KvShelf(MachineId(0)).take(parcel, version=7) is not None
    source.tidy()
    assert KvShelf(MachineId(0)).take(parcel, version=7) is None


def test_without_a_cache_nothing_is_left(source):
    assert source.leave(Exports(), [], version=7) == ()
