"""Leaves the KV caches of released trajectories where another replica of the machine can take them over.

    source: engine.export_kv ─► a segment of its own ─► parcels, in the report beside Released
    target: a task's parcel ─► the segment, mapped read-only ─► request.kv; whatever goes wrong, it prefills instead

The memory is freed by the kernel with its last holder. The source holds it for a while, the target until it has copied
it; nobody has to tell anybody.
"""

import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import xxhash

from laminar.control.messages import MachineId, TrajectoryId
from laminar.data.records import KvParcel
from laminar.relay.segments import Segment
from laminar.rollout.engines.engine import Engine

HELD_S = 20.0
"""A trajectory that was released is resumed within a report interval or two; later it is prefilled."""


class Held(msgspec.Struct):
    segment: Segment
    until_s: float


class KvShelf:
    """Of one replica: what it has left, and the way to what others have."""

    def __init__(self, machine: MachineId) -> None:
        self._machine = machine
        self._held: list[Held] = []

    def leave(self, engine: Engine, trajectories: Sequence[TrajectoryId], version: int) -> tuple[KvParcel, ...]:
        """Export the caches of these live requests; those without one are left out. Also frees what is overdue."""
        self.tidy()
        segment = Segment()

        def allocate(num_bytes: int) -> memoryview:
            segment.reserve(num_bytes)
            return segment.view

        exported = engine.export_kv(trajectories, allocate)
        if not exported:
            return ()
        self._held.append(Held(segment, time.monotonic() + HELD_S))
        path = f"/proc/{os.getpid()}/fd/{segment.reader_fd}"
        return tuple(
            KvParcel(
                trajectory=TrajectoryId(id_),
                machine=self._machine,
                version=version,
                num_tokens=part.num_tokens,
                path=path,
                offset=part.offset,
                num_bytes=part.num_bytes,
                checksum=_checksum(segment.view[part.offset : part.offset + part.num_bytes]),
            )
            for id_, part in exported.items()
        )

    def take(self, parcel: KvParcel, version: int) -> memoryview | None:
        """The cache's bytes, read-only; None if they are on another machine, of another version, gone, or not those."""
        if parcel.machine != self._machine or parcel.version != version:
            return None
        with suppress(OSError, ValueError):
            fd = os.open(parcel.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                mapping = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
            taken = memoryview(mapping)[parcel.offset : parcel.offset + parcel.num_bytes]
            # The path may lead to another process's file by now: numbers of processes and descriptors come again.
            if len(taken) == parcel.num_bytes and _checksum(taken) == parcel.checksum:
                return taken
        return None

    def tidy(self) -> None:
        """Free what nobody has come for; to be called now and then."""
        now = time.monotonic()
        overdue = [held for held in self._held if held.until_s <= now]
        self._held = [held for held in self._held if held.until_s > now]
        for held in overdue:
            held.segment.close()

    def close(self) -> None:
        for held in self._held:
            held.segment.close()
        self._held.clear()


def _checksum(data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)
