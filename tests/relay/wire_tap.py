"""Stands in the path between two relays: records every byte, and flips one bit of one of them on request."""

import socket
import threading
from contextlib import suppress


class WireTap:
    """Listens, and passes each connection on to `target`, both ways, until closed."""

    def __init__(self, target: tuple[str, int], flip_at: int | None = None) -> None:
        self.seen = bytearray()
        self.flipped = False
        self._target = target
        self._flip_at = flip_at
        self._num_up = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()
        return host, port

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            threading.Thread(target=self._pass_on, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(far, near, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, upstream: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(self._tamper(bytearray(data)) if upstream else data)
                with self._lock:
                    self.seen += data
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _tamper(self, data: bytearray) -> bytearray:
        with self._lock:
            start = self._num_up
            self._num_up += len(data)
            if self._flip_at is not None and not self.flipped and start <= self._flip_at < self._num_up:
                data[self._flip_at - start] ^= 1
                self.flipped = True
        return data
