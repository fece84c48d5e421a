"""Streams the trainer's hand-overs to the master relay, in a process of its own, so that training goes on meanwhile.

Started by SenderKeeper as `python -m laminar.relay.sender DESCRIPTOR PARENT_PID`. It lives exactly as long as its
parent: the kernel kills it with the thread that started it, and the end of their socket ends it as well.
"""

import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from laminar.parent_death import die_with
from laminar.relay.chunks import chunk_checksum, chunk_span, combine_checksums, count_chunks
from laminar.relay.forward import Forwarder
from laminar.relay.happenings import MasterLost, SendRefused, SendSuperseded, VersionSent
from laminar.relay.links import Kind, Link, LinkError, decode
from laminar.relay.manifest import Manifest
from laminar.relay.orders import AddSlot, Answer, Join, Order, Released, Send, Sending, SetMaster
from laminar.relay.segments import map_read_only
from laminar.relay.shards import Body, Shard
from laminar.relay.stream import Superseded
from laminar.relay.transports import build_transport

PROGRESS_INTERVAL_S = 0.1
"""Between two tellings of how much of a version has left."""


SUM_STALL_S = 30.0
"""A chunk takes a millisecond to sum; on a machine that gets no processor it may wait."""


class SlotSource:
    """A version, or this rank's shard, in one of the publisher's slots.

    A thread of its own sums the chunks, ahead of those that are being sent: a checksum costs a quarter of what sending
    costs, and neither holds the interpreter's lock.
    """

    def __init__(self, slot: int, send: Send, view: memoryview) -> None:
        self.slot = slot
        self.manifest: Manifest = send.manifest
        self.shard: Shard | None = send.shard
        self.num_bytes = send.manifest.num_bytes if send.shard is None else Body(send.shard).num_bytes
        self.view = view[: self.num_bytes]
        self.settled = False
        """Whether the publisher was told what became of it."""
        self._num_chunks = count_chunks(self.num_bytes, self.manifest.chunk_bytes)
        self._checksums: list[int] = []
        self._summed = threading.Condition()
        self._let_go = False
        threading.Thread(target=self._sum, name="laminar-relay-sum", daemon=True).start()

    def wait_chunk(self, index: int, still_wanted: Callable[[], bool]) -> int:
        if not still_wanted():
            raise Superseded(f"version {self.manifest.version} is not sent there any more")
        self._wait_summed(index + 1)
        return self._checksums[index]

    def wait_complete(self, still_wanted: Callable[[], bool]) -> int:
        self._wait_summed(self._num_chunks)
        return combine_checksums(self._checksums)

    def let_go(self) -> None:
        """The slot may be written again."""
        self._let_go = True

    def _wait_summed(self, num_chunks: int) -> None:
        with self._summed:
            if not self._summed.wait_for(lambda: len(self._checksums) >= num_chunks, SUM_STALL_S):
                raise TimeoutError(f"no checksum of chunk {num_chunks - 1} for {SUM_STALL_S:g} s")

    def _sum(self) -> None:
        for index in range(self._num_chunks):
            if self._let_go:
                return
            checksum = chunk_checksum(self.view[chunk_span(index, self.num_bytes, self.manifest.chunk_bytes)])
            with self._summed:
                self._checksums.append(checksum)
                self._summed.notify_all()


class Desk:
    """The hand-overs to send from. The newest stays here, for a new master, until a newer one comes."""

    def __init__(self, answer: Callable[[Answer], None]) -> None:
        self.changed = threading.Condition()
        self._answer = answer
        self._slots: dict[int, mmap.mmap] = {}
        self._newest: SlotSource | None = None
        self._sending: SlotSource | None = None

    def add_slot(self, slot: int, mapping: mmap.mmap) -> None:
        self._slots[slot] = mapping

    def put(self, send: Send) -> None:
        with self.changed:
            before, self._newest = self._newest, SlotSource(send.slot, send, memoryview(self._slots[send.slot]))
            if before is not None and before is not self._sending:
                self._let_go(before)
            self.changed.notify_all()

    def take_newest_after(self, version: int) -> SlotSource | None:
        if self._newest is None or self._newest.manifest.version <= version:
            return None
        self._sending = self._newest
        return self._sending

    def put_back(self, source: SlotSource) -> None:
        with self.changed:
            self._sending = None
            if source is not self._newest:
                self._let_go(source)

    def delivered(self, source: SlotSource, newest: int, seconds: float) -> None:
        version = source.manifest.version
        if source.settled:
            return  # A new master was brought up to date.
        source.settled = True
        if newest == version:
            self._answer(VersionSent(version, source.num_bytes, seconds))
        else:
            self._answer(SendRefused(version, f"version {version} is not newer than the master relay's {newest}"))

    def _let_go(self, source: SlotSource) -> None:
        assert self._newest is not None
        source.let_go()
        if not source.settled:
            self._answer(SendSuperseded(source.manifest.version, self._newest.manifest.version))
        self._answer(Released(source.slot))


class Progress:
    """Tells how much has left, not more often than anybody wants to know."""

    def __init__(self, answer: Callable[[Answer], None]) -> None:
        self._answer = answer
        self._told_at = 0.0

    def note(self, version: int, num_bytes: int) -> None:
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_INTERVAL_S:
            self._told_at = now
            self._answer(Sending(version, num_bytes))


def main(descriptor: int, parent_pid: int) -> None:
    die_with(parent_pid, "the publisher was gone before its sender started")
    # Ctrl-C reaches the whole terminal group; this process ends with its parent, which may still need it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Link(socket.socket(fileno=descriptor), "the publisher")
    answering = threading.Lock()

    def answer(message: Answer) -> None:
        with answering:
            link.send(Kind.ORDER, msgspec.msgpack.encode(message))

    desk, progress = Desk(answer), Progress(answer)
    forwarder: Forwarder[SlotSource] | None = None
    while (received := _next_order(link)) is not None:
        match received:
            case Join() as join, _:
                forwarder = Forwarder(
                    desk,
                    join.credentials,
                    build_transport(join.transport),
                    answer_deadline_s=join.answer_deadline_s,
                    on_progress=progress.note,
                    on_lost=lambda address, cause: answer(MasterLost(address, cause)),
                    on_delivered=desk.delivered,
                )
            case AddSlot() as add, int(fd):
                desk.add_slot(add.slot, map_read_only(fd, add.num_bytes))
                os.close(fd)
            case Send() as send, _:
                desk.put(send)
            case SetMaster() as master, _:
                assert forwarder is not None
                forwarder.set_next(master.address, master.epoch)
            case unexpected:
                raise AssertionError(f"order out of place: {unexpected}")
    if forwarder is not None:
        forwarder.close()


def _next_order(link: Link) -> tuple[Order, int | None] | None:
    try:
        _, payload, fd = link.receive_with_descriptor(Kind.ORDER)
    except (LinkError, ConnectionResetError):
        return None  # The publisher closed its end: that is how it says goodbye.
    return decode(payload, Order, link.peer), fd  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
