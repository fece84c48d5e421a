"""Copies bytes over plain sockets, as fast as Python can: what a relay chain is measured against."""

import json
import socket
import sys
import threading
import time
from typing import Any

import msgspec

from laminar.bench.speech import Speech
from laminar.relay.segments import Segment

BLOCK_BYTES = 4 << 20
"""The fastest of 64 KiB to 64 MiB, for this copy."""
STALL_S = 60.0


class Start(msgspec.Struct):
    """The first line."""

    host: str
    payload_bytes: int


class CopyProcess:
    """Takes a payload from whoever connects, into memory that was written before, and acknowledges it."""

    def __init__(self, start: Start) -> None:
        self._segment = Segment()
        self._segment.reserve(start.payload_bytes)
        self._num_bytes = start.payload_bytes
        self._listener = socket.create_server((start.host, 0))
        threading.Thread(target=self._receive, daemon=True).start()

    def serve(self) -> None:
        speech = Speech()
        speech.reply(self._listener.getsockname())
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            started = time.monotonic()
            for address in order["send_to"]:
                self._send(tuple(address))
            speech.reply(time.monotonic() - started)

    def _send(self, address: tuple[str, int]) -> None:
        with socket.create_connection(address, timeout=STALL_S) as connection:
            connection.settimeout(None)
            for start in range(0, self._num_bytes, BLOCK_BYTES):
                connection.sendall(self._segment.view[start : min(start + BLOCK_BYTES, self._num_bytes)])
            connection.recv(1)

    def _receive(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                start = 0
                while start < self._num_bytes:
                    block = self._segment.view[start : min(start + BLOCK_BYTES, self._num_bytes)]
                    start += connection.recv_into(block)
                connection.sendall(b"k")


if __name__ == "__main__":
    CopyProcess(msgspec.json.decode(sys.stdin.readline(), type=Start)).serve()
