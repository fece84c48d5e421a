"""Carries weight versions to one machine: takes them in, lends them to replicas, sends them down the chain.

              ┌─ machine 0 ──────────┐   ┌─ machine 1 ──────────┐   ┌─ machine 2 ──────────┐
    trainer   │ relay (master)       │   │ relay                │   │ relay                │
      │ copy  │  stream in           │   │  stream in           │   │  stream in           │
      ▼       │   │                  │   │   │                  │   │   │                  │
    sender ──►│   ▼ chunk i          │   │   ▼ chunk i-1        │   │   ▼ chunk i-2        │
              │  shelf ── forwarder ─┼──►│  shelf ── forwarder ─┼──►│  shelf   (last)      │
              │   │ lease (fd)       │   │   │                  │   │   │                  │
              │   ▼                  │   │   ▼                  │   │   ▼                  │
              │  replicas            │   │  replicas            │   │  replicas            │
              └──────────────────────┘   └──────────────────────┘   └──────────────────────┘

Every arrow between machines is the same protocol (stream.py): any relay can take any place, and a relay that lost its
upstream is resumed by another at the first chunk that it lacks. A version is visible to readers only when all of it
is there and its checksum agrees.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from laminar.config import RelayConfig
from laminar.relay.forward import DIAL_DEADLINE_S, Address, Forwarder
from laminar.relay.handshake import Credentials, Purpose, admit, dial
from laminar.relay.happenings import NextLost, PeerRefused, RelayHappening, UpstreamLost
from laminar.relay.intake import receive_hello, take
from laminar.relay.lease import LeaseDenial, LeaseWish, Lent, VersionGone
from laminar.relay.links import CAUSE_BYTES_MAX, Kind, Link, Refusal, decode
from laminar.relay.listeners import listen_locally, listen_on_port
from laminar.relay.ring import StoredVersion
from laminar.relay.shelf import Refused, Shelf
from laminar.relay.shelf_source import ShelfSource
from laminar.relay.stream import Superseded, push
from laminar.relay.transport import Transport
from laminar.relay.transports import build_transport

HANDSHAKE_DEADLINE_S = 5.0
"""A peer must show the token, and say what it wants, within this much silence."""
NUM_PEERS_MAX = 256
"""Connections at once; beyond, new ones are closed. A machine has some replicas and one upstream."""
ACCEPT_PAUSE_S = 0.1
CLOSE_DEADLINE_S = 5.0


class RelayStatus(msgspec.Struct, frozen=True):
    """Where a relay is; what its heartbeat is made from."""

    versions: tuple[int, ...]
    """Complete, ascending."""
    incoming_version: int | None
    incoming_bytes: int
    sending_version: int | None
    sending_bytes: int
    next_is_lost: bool
    """Whether the next relay cannot be reached, hangs or refuses."""
    num_leases: int
    """Versions held by readers, expired leases included, and by the forwarder while it sends."""
    num_leases_expired: int
    num_segments: int
    num_overflows: int
    """Times that all segments were held and one more than `relay.num_versions_kept` was taken."""


class Relay:
    """The relay of one machine: plain threads, no process of its own. Working from construction until `close`.

    host: the address at which other machines reach this one. transport: what carries chunks, `relay.transport` unless
    given. on_event is called from one thread, in order, and may
    call back into the relay.
    """

    def __init__(
        self,
        machine: int,
        run_id: str,
        token: bytes,
        config: RelayConfig,
        on_event: Callable[[RelayHappening], None],
        *,
        host: str = "127.0.0.1",
        transport: Transport | None = None,
    ) -> None:
        if not token:
            raise ValueError("a relay needs the run's token; an empty one would let anybody in")
        self.machine = machine
        self._credentials = Credentials(run_id, token)
        self._config = config
        self._on_event = on_event
        self._happenings: queue.SimpleQueue[RelayHappening | None] = queue.SimpleQueue()
        self._peers: dict[threading.Thread, Link] = {}
        self._peers_lock = threading.Lock()
        self._closed = False
        self._port = listen_on_port(host, config.port)
        self.address: Address = self._port.getsockname()[:2]
        """Host and port where an upstream reaches this relay."""
        try:
            self._local = listen_locally(run_id, machine)
        except BaseException:
            self._port.close()
            raise
        self._transport = transport or build_transport(config.transport)
        self._shelf = Shelf(machine, config, self._happenings.put)
        self._forwarder: Forwarder[ShelfSource] = Forwarder(
            self._shelf,
            self._credentials,
            self._transport,
            answer_deadline_s=config.publish_deadline_s,
            on_progress=lambda _version, _num_bytes: None,
            on_lost=lambda address, cause: self._happenings.put(NextLost(machine, address, cause)),
            on_delivered=lambda _source, _newest, _seconds: None,
        )
        self._threads = [
            threading.Thread(target=self._accept, args=(self._port, Purpose.STREAM), name="laminar-relay-port"),
            threading.Thread(target=self._accept, args=(self._local, Purpose.LEASE), name="laminar-relay-local"),
        ]
        self._teller = threading.Thread(target=self._tell, name="laminar-relay-tell", daemon=True)
        for thread in (*self._threads, self._teller):
            thread.daemon = True
            thread.start()

    def set_next(self, address: Address | None, epoch: int) -> None:
        """The chain changed: forward to this relay (None: this one is the last). Epochs only grow."""
        self._forwarder.set_next(address, epoch)

    def send_version(self, version: int, address: Address) -> None:
        """Send a complete version to another machine's relay, beside the chain; returns when it is complete there.

        Raises VersionGone, or OSError for a link that fails and a relay that refuses.
        """
        source = self._shelf.take(version)
        try:
            link = dial(address, self._credentials, DIAL_DEADLINE_S)
            try:
                push(
                    link,
                    source,
                    -1,  # It is no part of the chain.
                    self._transport,
                    answer_deadline_s=self._config.publish_deadline_s,
                    still_wanted=lambda: not self._closed,
                    on_progress=lambda _num_bytes: None,
                    beside=True,
                )
            finally:
                link.close()
        finally:
            self._shelf.put_back(source)

    def retain(self, versions: Sequence[int]) -> None:
        """Versions to keep as long as memory allows, besides the newest, the arriving and the leased ones."""
        self._shelf.retain(versions)

    def status(self) -> RelayStatus:
        shelf, forwarder = self._shelf, self._forwarder
        with shelf.changed:
            incoming, ring = shelf.incoming, shelf.ring
            return RelayStatus(
                versions=tuple(ring.complete_versions),
                incoming_version=incoming.version if incoming else None,
                incoming_bytes=incoming.num_bytes_received if incoming else 0,
                sending_version=forwarder.version_sending,
                sending_bytes=forwarder.num_bytes_sent,
                next_is_lost=forwarder.next_is_lost,
                num_leases=ring.num_holds,
                num_leases_expired=ring.num_expired,
                num_segments=ring.num_segments,
                num_overflows=ring.num_overflows,
            )

    def close(self) -> None:
        """End every connection and thread and give the memory back; readers keep what they have mapped.

        Raises TimeoutError, naming the threads, if some do not end in time.
        """
        if self._closed:
            return
        self._closed = True
        for listener in (self._port, self._local):
            listener.shutdown(socket.SHUT_RDWR)
        with self._peers_lock:
            peers = dict(self._peers)
        for link in peers.values():
            link.shutdown()
        with self._shelf.changed:
            self._shelf.changed.notify_all()
        self._forwarder.close()
        until = time.monotonic() + CLOSE_DEADLINE_S
        for thread in (*self._threads, *peers):
            thread.join(max(until - time.monotonic(), 0))
        self._happenings.put(None)
        self._teller.join(max(until - time.monotonic(), 0))
        for listener in (self._port, self._local):
            listener.close()
        alive = [thread.name for thread in (*self._threads, *peers, self._teller) if thread.is_alive()]
        if alive:
            raise TimeoutError(f"threads {', '.join(alive)} did not end within {CLOSE_DEADLINE_S:g} s")
        with self._shelf.changed:
            self._shelf.ring.close()

    def _tell(self) -> None:
        while (happening := self._happenings.get()) is not None:
            self._on_event(happening)

    def _accept(self, listener: socket.socket, purpose: Purpose) -> None:
        """Serve each connection in a thread of its own, until the listener is shut down."""
        while not self._closed:
            try:
                connection, peer_address = listener.accept()
            except OSError as error:
                if not self._closed:
                    # No descriptors left, say: it may pass, and must not end the relay.
                    self._happenings.put(PeerRefused(self.machine, "a peer", f"cannot accept it: {error}"))
                    time.sleep(ACCEPT_PAUSE_S)
                continue
            name = f"peer {peer_address[0]}:{peer_address[1]}" if purpose is Purpose.STREAM else "a local peer"
            link = Link(connection, name)
            thread = threading.Thread(target=self._serve, args=(link, purpose), name=f"laminar-relay {name}")
            thread.daemon = True
            with self._peers_lock:
                too_many = len(self._peers) >= NUM_PEERS_MAX
                if not (too_many or self._closed):
                    self._peers[thread] = link
                    thread.start()
                    continue
            link.close()
            if too_many:
                self._happenings.put(PeerRefused(self.machine, name, f"{NUM_PEERS_MAX} connections are open already"))

    def _serve(self, link: Link, purpose: Purpose) -> None:
        """The life of one connection; whatever a peer does wrong ends here, as a happening."""
        try:
            link.limit_waits(HANDSHAKE_DEADLINE_S)
            admit(link, self._credentials, purpose)
            if purpose is Purpose.STREAM:
                self._serve_stream(link)
            else:
                self._serve_lease(link)
        except OSError as error:
            if not link.was_shut_down:
                self._happenings.put(PeerRefused(self.machine, link.peer, str(error)))
        finally:
            link.close()
            with self._peers_lock:
                del self._peers[threading.current_thread()]

    def _serve_stream(self, link: Link) -> None:
        hello = receive_hello(link, self._transport)
        # From here on a silence can be the upstream's own upstream's.
        link.limit_waits(self._config.publish_deadline_s)
        try:
            take(link, hello, self._shelf, self._transport)
        except Refused as refused:
            self._refuse(link, refused.refusal)
        except Superseded as superseded:
            self._refuse(link, Refusal(str(superseded)))
        except OSError as error:
            if not link.was_shut_down:
                self._happenings.put(self._upstream_lost(hello.manifest.version, str(error)))
                self._refuse(link, Refusal(str(error)))

    def _refuse(self, link: Link, refusal: Refusal) -> None:
        cause = refusal.cause[: CAUSE_BYTES_MAX // 8]
        with suppress(OSError):  # It may be gone, which is what it was about to be told.
            link.send(Kind.REFUSED, msgspec.msgpack.encode(Refusal(cause, refusal.newest_complete)))

    def _upstream_lost(self, version: int, cause: str) -> UpstreamLost:
        with self._shelf.changed:
            incoming = self._shelf.incoming
            same = incoming is not None and incoming.version == version
            return UpstreamLost(self.machine, version, incoming.num_bytes_received if same and incoming else 0, cause)

    def _serve_lease(self, link: Link) -> None:
        _, payload = link.receive(Kind.LEASE)
        wish = decode(payload, LeaseWish, link.peer)
        try:
            stored = self._shelf.lease(wish.version)
        except VersionGone as gone:
            link.send(Kind.GONE, msgspec.msgpack.encode(LeaseDenial(gone.available)))
            return
        expired = False
        started = time.monotonic()
        try:
            self._lend(link, stored)
            while not link.wait_closed(self._config.lease_deadline_s):
                if not expired:
                    expired = True
                    self._shelf.expire_lease(stored, time.monotonic() - started)
        finally:
            self._shelf.end_lease(stored, expired=expired)

    def _lend(self, link: Link, stored: StoredVersion) -> None:
        assert stored.checksum is not None
        with self._shelf.changed:
            segments = tuple(segment.id for segment in self._shelf.ring.segments)
        lent = msgspec.msgpack.encode(Lent(stored.manifest, segments))
        link.send_with_descriptor(Kind.LEASED, lent, stored.segment.reader_fd, checksum=stored.checksum)
