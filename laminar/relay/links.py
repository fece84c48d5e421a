"""Moves frames between two processes over a connected socket.

A frame is a fixed binary header and a payload whose length is limited by the frame's kind. Payloads are weight bytes,
read straight into the segment, or messages in msgpack, decoded into a declared type; nothing is ever unpickled.
Sockets are blocking, with the kernel's own time-outs (SO_RCVTIMEO, SO_SNDTIMEO), so one system call takes a chunk.
"""

import enum
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from laminar.relay.chunks import CHUNK_BYTES_MAX

NONCE_BYTES = 32
MAC_BYTES = 32
MAGIC = 0x4C57
HEADER = struct.Struct("!HHIQQ")
MESSAGE_BYTES_MAX = 16 << 20
"""A manifest of 100,000 tensors is about 10 MB."""
CAUSE_BYTES_MAX = 4096
OFFER_BYTES_MAX = 1 << 16
IOV_MAX = 1024
"""Places that one system call fills at most."""
LAST_WORD_S = 0.2
"""A refusal was sent before the link broke, so it is here already or never comes."""

Message = TypeVar("Message")


class Kind(enum.IntEnum):
    """What a frame is. `index` and `checksum` of its header mean something for those that say so."""

    CHALLENGE = 1
    PROOF = 2
    WELCOME = 3
    HELLO = 4
    """Announces a version: its manifest and the sender's chain epoch."""
    ANSWER = 5
    """index: the first chunk that the receiver lacks; the payload is what its transport needs to tell."""
    CHUNK = 6
    """index: the chunk's; checksum: of its bytes, which are the payload."""
    END = 7
    """checksum: the whole version's."""
    DONE = 8
    REFUSED = 9
    LEASE = 10
    """Asks for a version."""
    LEASED = 11
    """checksum: the version's; its manifest is the payload, its segment comes along as a descriptor."""
    GONE = 12
    ORDER = 13
    """Between a trainer and its own sender process."""
    PLACED = 14
    """index: a chunk that the sender wrote into the receiver's memory itself; checksum: of its bytes."""


LENGTH_MAX = {
    Kind.CHALLENGE: NONCE_BYTES,
    Kind.PROOF: NONCE_BYTES + MAC_BYTES,
    Kind.WELCOME: MAC_BYTES,
    Kind.HELLO: MESSAGE_BYTES_MAX,
    Kind.ANSWER: OFFER_BYTES_MAX,
    Kind.CHUNK: CHUNK_BYTES_MAX,
    Kind.END: 0,
    Kind.DONE: 0,
    Kind.REFUSED: CAUSE_BYTES_MAX,
    Kind.LEASE: 64,
    Kind.LEASED: MESSAGE_BYTES_MAX,
    Kind.GONE: MESSAGE_BYTES_MAX,
    Kind.ORDER: MESSAGE_BYTES_MAX,
    Kind.PLACED: 0,
}
EXACT = (Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME)
"""Kinds whose payload has exactly the length above: what a proof covers must not depend on where a nonce ends."""


class Header(msgspec.Struct, frozen=True):
    kind: Kind
    length: int
    index: int
    checksum: int


class Refusal(msgspec.Struct, frozen=True):
    """Why a peer was sent away; newest_complete: what the refusing relay has, where that is the reason."""

    cause: str
    newest_complete: int | None = None


class LinkError(ConnectionError):
    """What came over a link is not what the protocol allows, or it ended too early; the message says which."""


class LinkRefused(LinkError):
    """The peer sent a refusal."""

    def __init__(self, peer: str, refusal: Refusal) -> None:
        super().__init__(f"{peer} refused: {refusal.cause}")
        self.refusal = refusal


class Link:
    """One connection, with one thread that sends and one that receives; `shutdown` wakes both, from any thread."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self.was_shut_down = False
        """Whether this process ended it on purpose, so that its errors are no news."""
        self._socket = connection
        self._deadline_s = 0.0
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connect(self, address: tuple[str, int], deadline_s: float) -> None:
        self._socket.settimeout(deadline_s)
        self._socket.connect(address)
        self._socket.settimeout(None)

    def limit_waits(self, deadline_s: float) -> None:
        """Raise TimeoutError from now on when a read or write makes no progress for so long; 0: wait for ever."""
        self.limit_sends(deadline_s)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(deadline_s))

    def limit_sends(self, deadline_s: float) -> None:
        """The same for writes only."""
        self._deadline_s = deadline_s
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(deadline_s))

    def send(self, kind: Kind, payload: bytes | memoryview = b"", *, index: int = 0, checksum: int = 0) -> None:
        assert len(payload) <= LENGTH_MAX[kind], f"{kind.name} of {len(payload)} bytes"
        header = HEADER.pack(MAGIC, kind, len(payload), index, checksum)
        try:
            num_sent = self._socket.sendmsg([header, payload])
            if num_sent < len(header):
                self._socket.sendall(header[num_sent:])
                num_sent = len(header)
            if num_sent < len(header) + len(payload):
                self._socket.sendall(memoryview(payload)[num_sent - len(header) :])
        except BlockingIOError:
            raise TimeoutError(f"{self.peer} took no byte of {kind.name} for {self._deadline_s:g} s") from None
        except ConnectionError as error:
            raise LinkError(f"{self.peer} broke the link before {kind.name} was sent: {error.strerror}") from error

    def send_with_descriptor(self, kind: Kind, payload: bytes, fd: int, *, checksum: int = 0) -> None:
        """The same over a Unix socket, with an open file attached to the header."""
        header = HEADER.pack(MAGIC, kind, len(payload), 0, checksum)
        try:
            num_sent = socket.send_fds(self._socket, [header], [fd])
            self._socket.sendall(header[num_sent:] + payload)
        except BlockingIOError:
            raise TimeoutError(f"{self.peer} took no byte of {kind.name} for {self._deadline_s:g} s") from None

    def receive(self, *kinds: Kind) -> tuple[Header, bytes]:
        header = self.receive_header(*kinds)
        return header, self._receive_payload(header)

    def receive_with_descriptor(self, *kinds: Kind) -> tuple[Header, bytes, int | None]:
        """A frame and the open file that came with it, if one did; the caller closes it."""
        wanted = " or ".join(kind.name for kind in kinds)
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            raise TimeoutError(f"no {wanted} from {self.peer} for {self._deadline_s:g} s") from None
        fd = fds[0] if fds else None
        try:
            if not head:
                raise LinkError(f"{self.peer} closed the link instead of sending {wanted}")
            rest = bytearray(HEADER.size - len(head))
            self.receive_into(memoryview(rest), wanted)
            header = self._check_header(head + bytes(rest), kinds)
            return header, self._receive_payload(header), fd
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise

    def receive_header(self, *kinds: Kind) -> Header:
        """The next frame's header, which must be of one of these kinds; a refusal is raised as LinkRefused."""
        wanted = " or ".join(kind.name for kind in kinds)
        head = bytearray(HEADER.size)
        self.receive_into(memoryview(head), wanted)
        return self._check_header(bytes(head), kinds)

    def receive_into(self, target: memoryview, what: str) -> None:
        """Fill target from the link; `what` names it if it does not come."""
        num_received = 0
        while num_received < len(target):
            try:
                num_new = self._socket.recv_into(target[num_received:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError(f"no byte of {what} from {self.peer} for {self._deadline_s:g} s") from None
            except ConnectionError as error:
                progress = f"{num_received} of {len(target)} bytes of {what}"
                raise LinkError(f"{self.peer} broke the link after {progress}: {error.strerror}") from error
            if num_new == 0:
                raise LinkError(f"{self.peer} closed the link after {num_received} of {len(target)} bytes of {what}")
            num_received += num_new

    def receive_scattered(self, targets: Sequence[memoryview], what: str) -> None:
        """Fill several places in order, in few system calls however many there are."""
        if len(targets) == 1:
            self.receive_into(targets[0], what)
            return
        left = [target for target in targets if len(target)]
        while left:
            try:
                num_new = self._socket.recvmsg_into(left[:IOV_MAX], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                raise TimeoutError(f"no byte of {what} from {self.peer} for {self._deadline_s:g} s") from None
            except ConnectionError as error:
                raise LinkError(f"{self.peer} broke the link in the middle of {what}: {error.strerror}") from error
            if num_new == 0:
                raise LinkError(f"{self.peer} closed the link in the middle of {what}")
            while left and num_new >= len(left[0]):
                num_new -= len(left.pop(0))
            if num_new:
                left[0] = left[0][num_new:]

    def last_word(self) -> LinkRefused | None:
        """Why the peer broke the link, if it managed to say so: a better error than that it is broken."""
        self.limit_waits(LAST_WORD_S)
        try:
            self.receive_header(Kind.REFUSED)
        except LinkRefused as refused:
            return refused
        except OSError:
            pass
        return None

    def wait_closed(self, deadline_s: float) -> bool:
        """Whether the peer closed the link (or broke its silence, which it must not) within so long."""
        self.limit_waits(deadline_s)
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def shutdown(self) -> None:
        """End the link from another thread: whoever waits on it gets an error at once."""
        self.was_shut_down = True
        with suppress(OSError):  # It may have ended by itself meanwhile.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _receive_payload(self, header: Header) -> bytes:
        payload = bytearray(header.length)
        self.receive_into(memoryview(payload), header.kind.name)
        return bytes(payload)

    def _check_header(self, head: bytes, kinds: tuple[Kind, ...]) -> Header:
        magic, kind, length, index, checksum = HEADER.unpack(head)
        if magic != MAGIC or kind not in LENGTH_MAX:
            raise LinkError(f"garbage from {self.peer}: {head[:8].hex()} is no frame")
        kind = Kind(kind)
        if length > LENGTH_MAX[kind]:
            raise LinkError(
                f"oversized frame from {self.peer}: {kind.name} of {length} bytes, at most {LENGTH_MAX[kind]}"
            )
        if kind in EXACT and length != LENGTH_MAX[kind]:
            raise LinkError(f"bad frame from {self.peer}: {kind.name} of {length} bytes, not {LENGTH_MAX[kind]}")
        header = Header(kind, length, index, checksum)
        if kind is Kind.REFUSED:
            raise LinkRefused(self.peer, decode(self._receive_payload(header), Refusal, self.peer))
        if kind not in kinds:
            raise LinkError(f"{self.peer} sent {kind.name}, not {' or '.join(wanted.name for wanted in kinds)}")
        return header


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def decode(payload: bytes, kind: type[Message], peer: str) -> Message:
    """A payload as the declared type; LinkError if it is anything else."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise LinkError(f"{peer} sent no {kind.__name__}: {error}") from None
