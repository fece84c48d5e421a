"""Keeps a publisher's sender process: starts it, hands it slots, hears what became of them, replaces it if it dies."""

import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

import laminar
from laminar.config import RelayConfig
from laminar.relay.forward import Address
from laminar.relay.handshake import Credentials
from laminar.relay.happenings import (
    MasterLost,
    SenderHappening,
    SenderLost,
    SendRefused,
    SendSuperseded,
    VersionSent,
)
from laminar.relay.links import Kind, Link, decode
from laminar.relay.orders import AddSlot, Answer, Join, Order, Released, Send, Sending, SetMaster
from laminar.relay.segments import Segment

ORDER_STALL_S = 5.0
"""A sender that takes no order for so long hangs, and is replaced."""
EXIT_DEADLINE_S = 5.0
NUM_RESTARTS_MAX = 3
NUM_HAPPENINGS_KEPT = 1000


class PublishTimeout(TimeoutError):
    """No segment came free in time: the versions handed over before are still being sent."""


class SenderStatus(msgspec.Struct, frozen=True):
    """The newest version that has not reached the master relay yet (or none), and how much of it has left."""

    version: int | None
    num_bytes: int
    master_is_lost: bool


class SenderKeeper:
    """Owns which slot is free: a slot is taken, filled, handed over, and free again once the sender released it."""

    def __init__(self, credentials: Credentials, config: RelayConfig) -> None:
        self._join = Join(credentials, config.publish_deadline_s, config.transport)
        self._changed = threading.Condition()
        self._segments: Sequence[Segment] = ()
        self._free: set[int] = set()
        self._sent: dict[int, Send] = {}
        """By slot: handed over and not released yet."""
        self._last_settled = -1
        self._sending = Sending(-1, 0)
        self._master_is_lost = False
        self._master = SetMaster(None, -1)
        self._happenings: deque[SenderHappening] = deque(maxlen=NUM_HAPPENINGS_KEPT)
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: str | None = None
        self._closed = False
        # The kernel kills the sender when the thread that started it ends, so that thread lives as long as this.
        self._thread = threading.Thread(target=self._keep, name="laminar-relay-sender-keeper", daemon=True)
        self._thread.start()

    @property
    def sender_pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def add_slots(self, segments: Sequence[Segment]) -> None:
        with self._changed:
            self._segments = segments
            self._free = set(range(len(segments)))
            for slot in self._free:
                self._order_slot(slot)

    def take_slot(self, deadline_s: float) -> tuple[int, bool]:
        """A free slot, and whether it had to be waited for. Raises PublishTimeout, naming what is being sent."""
        with self._changed:
            waited = not self._free and self._failure is None
            if not self._changed.wait_for(lambda: self._free or self._failure or self._closed, deadline_s):
                versions = " and ".join(
                    str(version) for version in sorted(send.manifest.version for send in self._sent.values())
                )
                raise PublishTimeout(
                    f"versions {versions} are still being sent to the master relay {self._master.address} after "
                    f"relay.publish_deadline_s={deadline_s:g} s"
                )
            if self._failure is not None or self._closed:
                raise RuntimeError(self._failure or "the publisher is closed")
            slot = min(self._free)
            self._free.remove(slot)
            return slot, waited

    def give_back(self, slot: int) -> None:
        with self._changed:
            self._free.add(slot)
            self._changed.notify_all()

    def hand_over(self, send: Send) -> None:
        with self._changed:
            self._sent[send.slot] = send
            self._order(send)

    def set_master(self, address: Address | None, epoch: int) -> None:
        with self._changed:
            if epoch < self._master.epoch:
                return
            self._master, self._master_is_lost = SetMaster(address, epoch), False
            self._order(self._master)

    def status(self) -> SenderStatus:
        with self._changed:
            newest = max((send.manifest.version for send in self._sent.values()), default=-1)
            if newest <= self._last_settled:
                return SenderStatus(None, 0, False)
            num_bytes = self._sending.num_bytes if self._sending.version == newest else 0
            return SenderStatus(newest, num_bytes, self._master_is_lost)

    def happenings(self) -> list[SenderHappening]:
        """What happened since the last call, oldest first (the last 1000 at most)."""
        with self._changed:
            told = list(self._happenings)
            self._happenings.clear()
            return told

    def close(self) -> None:
        with self._changed:
            self._closed = True
            if self._link is not None:
                self._link.shutdown()
            self._changed.notify_all()
        self._thread.join(2 * EXIT_DEADLINE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the sender process did not end within {2 * EXIT_DEADLINE_S:g} s")

    def _keep(self) -> None:
        cause = ""
        for num_restarts in range(NUM_RESTARTS_MAX + 1):
            try:
                process, link = self._start()
            except OSError as error:
                self._give_up(f"the sender process cannot be started: {error}")
                return
            self._listen(link)
            cause = _end(process)
            with self._changed:
                self._link = None
                link.close()
                if self._closed:
                    return
                if num_restarts < NUM_RESTARTS_MAX:
                    self._happenings.append(SenderLost(cause, restarted=True))
        self._give_up(f"the sender process died {NUM_RESTARTS_MAX + 1} times, the last time with {cause}")

    def _give_up(self, cause: str) -> None:
        with self._changed:
            self._failure = cause
            self._happenings.append(SenderLost(cause, restarted=False))
            self._changed.notify_all()

    def _start(self) -> tuple[subprocess.Popen[bytes], Link]:
        ours, theirs = socket.socketpair()
        root = str(Path(laminar.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "laminar.relay.sender", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path},
            )
        link = Link(ours, "the sender process")
        link.limit_sends(ORDER_STALL_S)
        with self._changed:
            self._process, self._link = process, link
            if self._closed:
                link.shutdown()
            self._brief()
        return process, link

    def _brief(self) -> None:
        """Tell a new sender everything that its predecessor knew; it lets go of what is not the newest."""
        self._order(self._join)
        for slot in range(len(self._segments)):
            self._order_slot(slot)
        self._order(self._master)
        for send in sorted(self._sent.values(), key=lambda send: send.manifest.version):
            self._order(send)

    def _listen(self, link: Link) -> None:
        """Until the sender's end of the socket closes, which its death does."""
        while True:
            try:
                _, payload = link.receive(Kind.ORDER)
            except OSError:
                return
            answer = decode(payload, Answer, link.peer)  # pyright: ignore[reportArgumentType]
            with self._changed:
                self._heard(answer)

    def _heard(self, answer: Answer) -> None:
        match answer:
            case Released(slot):
                del self._sent[slot]
                self._free.add(slot)
                self._changed.notify_all()
            case Sending():
                self._sending, self._master_is_lost = answer, False
            case VersionSent(version) | SendSuperseded(version) | SendRefused(version):
                # Versions settle in order; a sender that took over may tell of one again.
                if version > self._last_settled:
                    self._last_settled = version
                    self._happenings.append(answer)
            case MasterLost():
                self._master_is_lost = True
                self._happenings.append(answer)
            case SenderLost():
                self._happenings.append(answer)

    def _order(self, order: Order) -> None:
        if self._link is not None:
            with self._replacing_a_broken_sender():
                self._link.send(Kind.ORDER, msgspec.msgpack.encode(order))

    def _order_slot(self, slot: int) -> None:
        if self._link is not None:
            segment = self._segments[slot]
            order = msgspec.msgpack.encode(AddSlot(slot, segment.num_bytes))
            with self._replacing_a_broken_sender():
                self._link.send_with_descriptor(Kind.ORDER, order, segment.reader_fd)

    @contextmanager
    def _replacing_a_broken_sender(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # It died or hangs. Killed, it is noticed by `_keep`, whose next sender is told everything again.
            assert self._process is not None
            self._process.kill()


def _end(process: subprocess.Popen[bytes]) -> str:
    """Wait until the process is gone, by force if need be; how it ended."""
    try:
        status = process.wait(EXIT_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"no exit within {EXIT_DEADLINE_S:g} s"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
