"""Lends a replica a weight version from its own machine's relay: mapped read-only, for as long as the lease is held."""

import gc
import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from laminar.relay.handshake import Credentials, Purpose, introduce
from laminar.relay.links import Kind, Link, LinkRefused, decode
from laminar.relay.manifest import LeasedVersion, Manifest
from laminar.relay.segments import map_read_only

if TYPE_CHECKING:
    from laminar.relay.pinning import Pinned

RETRY_S = 0.02
SOCKET_NAME_BYTES_MAX = 107


class RelayUnreachable(ConnectionError):
    """No relay of this run answers on this machine within the deadline."""


class VersionGone(LookupError):
    """The relay has not got the version asked for (any more, or yet); `available` tells what it has."""

    def __init__(self, machine: int, version: int | None, available: tuple[int, ...]) -> None:
        wanted = "a complete version" if version is None else f"version {version}"
        there = f"complete there: {', '.join(map(str, available))}" if available else "none is complete there"
        super().__init__(f"the relay of machine {machine} does not have {wanted}; {there}")
        self.machine = machine
        self.version = version
        self.available = available


class LeaseWish(msgspec.Struct, frozen=True):
    """version None: the newest complete."""

    version: int | None


class LeaseDenial(msgspec.Struct, frozen=True):
    available: tuple[int, ...]


class Lent(msgspec.Struct, frozen=True):
    """Comes with the segment's descriptor. segments: the ids (inodes) of all that the relay may ever lend again."""

    manifest: Manifest
    segments: tuple[int, ...]


def socket_name(run_id: str, machine: int) -> str:
    """The abstract Unix socket where a machine's readers find its relay; the kernel removes it with the relay."""
    name = f"\0laminar-{run_id}-{machine}"
    if len(name.encode()) > SOCKET_NAME_BYTES_MAX:
        raise ValueError(f"run id {run_id!r} is too long for a socket name; use at most 80 bytes")
    return name


@contextmanager
def lease(run_id: str, machine: int, token: bytes, version: int | None, deadline_s: float) -> Iterator[LeasedVersion]:
    """Hold a version once, by a reader that ends with the block (Reader.lease says what to expect)."""
    reader = Reader(run_id, machine, token)
    try:
        with reader.lease(version, deadline_s) as leased:
            yield leased
    finally:
        reader.close()


class Reader:
    """One process's access to its machine's relay. Not thread-safe.

    It keeps the relay's segments mapped between leases, because mapping one costs half as much as copying it. The bytes
    of a mapped segment are looked at only while a version in it is leased; segments that the relay gave up are unmapped
    at the next lease, so that their memory does not outlive their use.
    """

    def __init__(self, run_id: str, machine: int, token: bytes, *, pin: bool = False) -> None:
        """pin: for an accelerator; each segment is pinned when it is mapped."""
        self._run_id = run_id
        self._machine = machine
        self._token = token
        self._pin = pin
        self._mappings: dict[int, mmap.mmap] = {}
        """By the segment's id."""
        self._descriptors: dict[int, int] = {}
        """Of the mapped segments: other processes of this machine can open a segment only while one is."""
        self._pinned: dict[int, Pinned] = {}

    @contextmanager
    def lease(self, version: int | None, deadline_s: float) -> Iterator[LeasedVersion]:
        """Hold a version (None: the newest complete) while the block runs; its bytes do not change meanwhile.

        Copy what you need inside the block: a view of the bytes that outlives it is an error, because the relay may
        then write the next version there. Raises VersionGone, RelayUnreachable after deadline_s, or LinkRefused for a
        token that is not the run's.
        """
        until = time.monotonic() + deadline_s
        link: Link | None = None
        try:
            try:
                link = _connect(self._run_id, self._machine, self._token, until)
                lent, checksum, segment = self._ask(link, version)
            except LinkRefused:
                raise
            except OSError as error:
                raise RelayUnreachable(
                    f"the relay of run {self._run_id!r} on machine {self._machine}: {error}"
                ) from error
            with self._lend(segment, lent.manifest) as data:
                path = f"/proc/{os.getpid()}/fd/{self._descriptors[segment]}"
                yield LeasedVersion(lent.manifest, checksum, data, path=path)
        finally:
            if link is not None:
                link.close()

    def close(self) -> None:
        """Unmap everything. A mapping that someone in this process still looks at goes with their last reference."""
        for segment in list(self._descriptors):
            self._unmap(segment)

    def _ask(self, link: Link, version: int | None) -> tuple[Lent, int, int]:
        link.send(Kind.LEASE, msgspec.msgpack.encode(LeaseWish(version)))
        header, payload, fd = link.receive_with_descriptor(Kind.LEASED, Kind.GONE)
        if header.kind is Kind.GONE or fd is None:
            raise VersionGone(self._machine, version, decode(payload, LeaseDenial, link.peer).available)
        try:
            lent = decode(payload, Lent, link.peer)
            known = os.fstat(fd)
            for gone in [segment for segment in self._descriptors if segment not in lent.segments]:
                self._unmap(gone)
            if known.st_ino not in self._mappings:
                self._unmap(known.st_ino)
                self._map(known.st_ino, fd, known.st_size)
                self._descriptors[known.st_ino], fd = fd, -1
            return lent, header.checksum, known.st_ino
        finally:
            if fd >= 0:
                os.close(fd)

    @contextmanager
    def _lend(self, segment: int, manifest: Manifest) -> Iterator[memoryview]:
        mapping = self._mappings[segment]
        view = memoryview(mapping)[: manifest.num_bytes]
        try:
            yield view
        except BaseException:
            # The traceback may hold views; nobody reads those, and the mapping goes with them.
            if not _release(view, mapping):
                del self._mappings[segment]
            raise
        if not _release(view, mapping):
            gc.collect()
            if not _release(view, mapping):
                del self._mappings[segment]
                raise RuntimeError(
                    f"version {manifest.version} is still viewed after its lease ended, while the relay may overwrite "
                    "it; copy what you need inside the block"
                )

    def _map(self, segment: int, fd: int, num_bytes: int) -> None:
        mapping = self._mappings[segment] = map_read_only(fd, num_bytes)
        if self._pin:
            from laminar.relay.pinning import Pinned  # Needs torch, and an accelerator.

            self._pinned[segment] = Pinned(memoryview(mapping))

    def _unmap(self, segment: int) -> None:
        if (pinned := self._pinned.pop(segment, None)) is not None:
            pinned.release()
        if (descriptor := self._descriptors.pop(segment, None)) is not None:
            os.close(descriptor)
        if (mapping := self._mappings.pop(segment, None)) is not None:
            with suppress(BufferError):
                mapping.close()


def _release(view: memoryview, mapping: mmap.mmap) -> bool:
    """Give a view up; returns whether nobody looks at the mapping any more."""
    try:
        view.release()
        mapping.resize(len(mapping))
    except BufferError:
        return False
    except TypeError:
        # A read-only mapping cannot be resized; it is asked because, before that, it looks whether it is viewed.
        return True
    raise AssertionError("a segment was mapped for writing")


def _connect(run_id: str, machine: int, token: bytes, until: float) -> Link:
    name = socket_name(run_id, machine)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(until - time.monotonic(), RETRY_S))
            connection.connect(name)
            link = Link(connection, f"the relay of machine {machine}")
            link.limit_waits(max(until - time.monotonic(), RETRY_S))
            introduce(link, Credentials(run_id, token), Purpose.LEASE)
        except (ConnectionRefusedError, BlockingIOError) as error:
            # Nobody listens there (yet), or its queue is full: one that is starting or restarting may come in time.
            connection.close()
            if time.monotonic() + RETRY_S > until:
                raise TimeoutError("nobody listens there") from error
            time.sleep(RETRY_S)
        except BaseException:
            connection.close()
            raise
        else:
            return link
