"""Carries chunks by NIXL (UCX): the sender writes each into the receiver's segment itself, then says so on the link.

    sender                                   receiver
      ◄── ANSWER(agent metadata, address) ──   segment registered
      ══ WRITE chunk i ═══════════════════►    (nobody there does anything)
      ── PLACED(i, xxh3) ─────────────────►    verified in place, counted

Several writes are under way at once. A lost peer shows as a failed write or as a broken link, whichever comes first;
either ends the stream, and the next one resumes at the first missing chunk, as with sockets.

With one-sided writes a peer that was given up may still write later. The memory of a stream that did not end well is
therefore never used for another version (Segment.is_tainted).

UCX chooses InfiniBand, RoCE or TCP; UCX_TLS and UCX_NET_DEVICES narrow its choice. Needs the extra `rdma`.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np

from laminar.relay.links import Kind, Link, LinkError, decode
from laminar.relay.segments import Segment
from laminar.relay.transport import check_chunk

NUM_WRITES_MAX = 8
"""Chunks under way at once; enough to keep a link busy while the first of them is awaited."""
WRITE_STALL_S = 5.0
"""A chunk that has not arrived for so long never will."""
POLL_S = 1e-4
METADATA_BYTES_MAX = 60_000


class Offer(msgspec.Struct, frozen=True):
    """Where the receiver's segment is, and how to reach its agent."""

    metadata: bytes
    address: int


class NixlTransport:
    """One agent a process, shared by all of its streams."""

    name = "nixl"
    writes_remotely = True

    def __init__(self) -> None:
        try:
            from nixl_cu12._api import (  # pyright: ignore[reportMissingImports]
                nixl_agent,
                nixl_agent_config,
                nixl_thread_sync_t,
            )
        except ImportError as error:
            raise ValueError(
                f"relay.transport=nixl needs the extra `rdma` (pip install 'laminar-rl[rdma]'): {error}"
            ) from error
        config = nixl_agent_config(backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self.agent = nixl_agent(f"laminar-{os.getpid()}-{uuid4().hex[:8]}", config)
        self._lock = threading.Lock()
        self._registered: dict[int, int] = {}
        """Bytes, by address."""

    def inlet(self, link: Link, segment: Segment) -> "NixlInlet":
        address = self._register(segment.view, segment)
        metadata = self.agent.get_agent_metadata()
        assert len(metadata) <= METADATA_BYTES_MAX, f"{len(metadata)} bytes of metadata"
        return NixlInlet(link, Offer(metadata, address))

    def outlet(self, link: Link, offer: bytes, body: memoryview) -> "NixlOutlet":
        there = decode(offer, Offer, link.peer)
        address = self._register(body, None)
        try:
            name = self.agent.add_remote_agent(there.metadata)
        except Exception as error:
            raise LinkError(f"{link.peer} offers memory that cannot be reached: {error}") from error
        peer = name.decode() if isinstance(name, bytes) else name
        return NixlOutlet(self.agent, link, peer, address, there.address)

    def _register(self, view: memoryview, owner: Segment | None) -> int:
        """Make memory known to the network, once; that of a segment until it is closed. Returns its address."""
        address = np.frombuffer(view, np.uint8).ctypes.data
        with self._lock:
            if self._registered.get(address, 0) < len(view):
                memory = self.agent.register_memory([(address, len(view), 0, "")], "DRAM")
                self._registered[address] = len(view)
                if owner is not None:
                    owner.before_close.append(lambda: self._forget(address, memory))
        return address

    def _forget(self, address: int, memory: object) -> None:
        with self._lock:
            self.agent.deregister_memory(memory)
            del self._registered[address]


class NixlInlet:
    def __init__(self, link: Link, offer: Offer) -> None:
        self.offer = msgspec.msgpack.encode(offer)
        self._link = link

    def receive(self, index: int, targets: Sequence[memoryview], what: str) -> int:
        header = self._link.receive_header(Kind.PLACED)
        if header.index != index:
            raise LinkError(f"{self._link.peer} placed chunk {header.index} instead of {what}")
        check_chunk(targets, header.checksum, what, self._link.peer)
        return header.checksum


class Write:
    """One chunk under way."""

    def __init__(self, index: int, checksum: int, handle: Any) -> None:
        self.index = index
        self.checksum = checksum
        self.handle = handle
        self.began_s = time.monotonic()


class NixlOutlet:
    """Starts writes in the caller's thread; another tells the receiver of each as soon as it has arrived.

    That must not wait for the next chunk: this machine may be waiting for it itself.
    """

    def __init__(self, agent: Any, link: Link, peer: str, address: int, peer_address: int) -> None:
        self._agent = agent
        self._link = link
        self._peer = peer
        self._address = address
        self._peer_address = peer_address
        self._changed = threading.Condition()
        self._under_way: deque[Write] = deque()
        self._failure: OSError | None = None
        self._closed = False
        self._teller = threading.Thread(target=self._tell, name="laminar-relay-nixl", daemon=True)
        self._teller.start()

    def send(self, index: int, chunk: memoryview, spans: Sequence[slice], checksum: int) -> None:
        self._wait_until(lambda: len(self._under_way) < NUM_WRITES_MAX)
        here = np.frombuffer(chunk, np.uint8).ctypes.data
        sources: list[tuple[int, int, int]] = []
        targets: list[tuple[int, int, int]] = []
        for span in spans:
            length = span.stop - span.start
            sources.append((here, length, 0))
            targets.append((self._peer_address + span.start, length, 0))
            here += length
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(sources, "DRAM"),
                self._agent.get_xfer_descs(targets, "DRAM"),
                self._peer,
            )
            self._agent.transfer(handle)
        except Exception as error:
            raise LinkError(f"{self._link.peer} broke the link before chunk {index} was written: {error}") from error
        with self._changed:
            self._under_way.append(Write(index, checksum, handle))
            self._changed.notify_all()

    def flush(self) -> None:
        self._wait_until(lambda: not self._under_way)

    def close(self) -> None:
        """Give up what is still under way; the memory it is read from may be used again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._teller.join()
        for write in self._under_way:
            with suppress(Exception):  # A write to a dead peer cannot be taken back, and need not be.
                write.handle.release()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """The teller ends every wait: a write that does not arrive is its failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or condition())
            if self._failure is not None:
                raise self._failure

    def _tell(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._under_way)
                if self._closed:
                    return
                write = self._under_way[0]
            failure: OSError | None = None
            try:
                self._wait_arrived(write)
                if not self._closed:
                    self._link.send(Kind.PLACED, index=write.index, checksum=write.checksum)
            except OSError as error:
                failure = error
            with self._changed:
                if failure is None and not self._closed:
                    self._under_way.popleft()
                self._failure = failure
                self._changed.notify_all()
                if failure is not None:
                    return

    def _wait_arrived(self, write: Write) -> None:
        while not self._closed:
            try:
                state = self._agent.check_xfer_state(write.handle)
            except Exception as error:
                raise LinkError(f"{self._link.peer} broke the link in chunk {write.index}: {error}") from error
            if state == "DONE":
                write.handle.release()
                return
            if state == "ERR" or self._link.was_shut_down:
                raise LinkError(f"{self._link.peer} did not take chunk {write.index}")
            if time.monotonic() - write.began_s > WRITE_STALL_S:
                raise TimeoutError(f"{self._link.peer} took no byte of chunk {write.index} for {WRITE_STALL_S:g} s")
            time.sleep(POLL_S)
