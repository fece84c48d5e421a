"""Lends a replica a weight version from its own machine's relay: mapped read-only, for as long as the lease is held."""

import gc
import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from laminar.relay.handshake import Credentials, Purpose, introduce
from laminar.relay.links import Kind, Link, LinkRefused, decode
from laminar.relay.manifest import LeasedVersion, Manifest
from laminar.relay.segments import map_read_only

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


def socket_name(run_id: str, machine: int) -> str:
    """The abstract Unix socket where a machine's readers find its relay; the kernel removes it with the relay."""
    name = f"\0laminar-{run_id}-{machine}"
    if len(name.encode()) > SOCKET_NAME_BYTES_MAX:
        raise ValueError(f"run id {run_id!r} is too long for a socket name; use at most 80 bytes")
    return name


@contextmanager
def lease(run_id: str, machine: int, token: bytes, version: int | None, deadline_s: float) -> Iterator[LeasedVersion]:
    """Hold a version (None: the newest complete) while the block runs; its bytes do not change meanwhile.

    Copy what you need inside the block: a view of the bytes that outlives it is an error, because the relay may then
    write the next version there. Raises VersionGone, RelayUnreachable after deadline_s, or LinkRefused for a token
    that is not the run's.
    """
    until = time.monotonic() + deadline_s
    link: Link | None = None
    fd = -1
    try:
        try:
            link = _connect(run_id, machine, token, until)
            manifest, checksum, fd = _ask(link, machine, version)
            mapping = map_read_only(fd, manifest.num_bytes)
        except LinkRefused:
            raise
        except OSError as error:
            raise RelayUnreachable(f"the relay of run {run_id!r} on machine {machine}: {error}") from error
        with _lent(mapping, manifest) as data:
            yield LeasedVersion(manifest, checksum, data, path=f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        if fd >= 0:
            os.close(fd)
        if link is not None:
            link.close()


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


def _ask(link: Link, machine: int, version: int | None) -> tuple[Manifest, int, int]:
    """The manifest, the checksum, and a descriptor of the segment, which is the caller's to close."""
    link.send(Kind.LEASE, msgspec.msgpack.encode(LeaseWish(version)))
    header, payload, fd = link.receive_with_descriptor(Kind.LEASED, Kind.GONE)
    if header.kind is Kind.GONE or fd is None:
        raise VersionGone(machine, version, decode(payload, LeaseDenial, link.peer).available)
    try:
        return decode(payload, Manifest, link.peer), header.checksum, fd
    except BaseException:
        os.close(fd)
        raise


@contextmanager
def _lent(mapping: mmap.mmap, manifest: Manifest) -> Iterator[memoryview]:
    view = memoryview(mapping)[: manifest.num_bytes]
    try:
        yield view
    except BaseException:
        # The traceback may hold views; nobody reads those, and the mapping goes with them.
        with suppress(BufferError):
            _release(view, mapping)
        raise
    try:
        _release(view, mapping)
    except BufferError:
        gc.collect()
        try:
            _release(view, mapping)
        except BufferError:
            raise RuntimeError(
                f"version {manifest.version} is still viewed after its lease ended, while the relay may overwrite it; "
                "copy what you need inside the block"
            ) from None


def _release(view: memoryview, mapping: mmap.mmap) -> None:
    view.release()
    mapping.close()
