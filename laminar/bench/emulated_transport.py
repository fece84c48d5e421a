"""Emulates a slower link than there is: a start-up time and an acknowledgement for every chunk, and a rate.

The link of the paper's formula: a chunk of b bytes takes startup_s + b / bytes_per_s, and the next one starts when it
is there. Real streams do not wait for acknowledgements; this is for comparing with the formula, and for pacing where
the kernel's own rate limit cannot be had.
"""

import time
from collections.abc import Sequence

import msgspec

from laminar.relay.links import Kind, Link
from laminar.relay.segments import Segment
from laminar.relay.transport import SocketInlet, SocketOutlet


class Emulation(msgspec.Struct, frozen=True):
    startup_s: float = 0.0
    bytes_per_s: float | None = None
    """None: as fast as the link underneath."""
    acknowledged: bool = False


class EmulatedTransport:
    name = "sockets"
    writes_remotely = False

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation

    def inlet(self, link: Link, segment: Segment) -> "EmulatedInlet":
        return EmulatedInlet(link, self._emulation)

    def outlet(self, link: Link, offer: bytes, body: memoryview) -> "EmulatedOutlet":
        return EmulatedOutlet(link, self._emulation)


class EmulatedOutlet:
    def __init__(self, link: Link, emulation: Emulation) -> None:
        self._link = link
        self._sockets = SocketOutlet(link)
        self._emulation = emulation
        self._free_at = time.monotonic()

    def send(self, index: int, chunk: memoryview, spans: Sequence[slice], checksum: int) -> None:
        emulation = self._emulation
        time.sleep(emulation.startup_s)
        if emulation.bytes_per_s is not None:
            # Before it is sent: a chunk is there when its last byte is.
            self._free_at = max(self._free_at, time.monotonic() - 0.01) + len(chunk) / emulation.bytes_per_s
            time.sleep(max(self._free_at - time.monotonic(), 0))
        self._sockets.send(index, chunk, spans, checksum)
        if emulation.acknowledged:
            self._link.receive(Kind.ANSWER)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class EmulatedInlet:
    offer = b""

    def __init__(self, link: Link, emulation: Emulation) -> None:
        self._link = link
        self._sockets = SocketInlet(link)
        self._emulation = emulation

    def receive(self, index: int, targets: Sequence[memoryview], what: str) -> int:
        checksum = self._sockets.receive(index, targets, what)
        if self._emulation.acknowledged:
            self._link.send(Kind.ANSWER, index=index)
        return checksum
