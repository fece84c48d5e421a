"""Lets two processes prove to each other that they belong to the same run; the token itself never crosses a link.

accepting side                              dialling side
    CHALLENGE(nonce a)             ──────►
                                   ◄──────  PROOF(nonce b, HMAC(token, "dialler", run, purpose, a, b))
    WELCOME(HMAC(token, "acceptor", …))──►  neither goes on with a peer that has not got the token
"""

import enum
import hmac
import os
import socket

import msgspec

from laminar.relay.links import NONCE_BYTES, Kind, Link, LinkError, Refusal


class Purpose(enum.Enum):
    """What a connection is for; part of the proof, so that one made for a reader opens no door to a sender."""

    STREAM = b"stream"
    LEASE = b"lease"


class Credentials(msgspec.Struct, frozen=True):
    """What makes a process a member of a run."""

    run_id: str
    token: bytes

    def __repr__(self) -> str:
        return f"Credentials(run_id={self.run_id!r}, token=<{len(self.token)} bytes>)"

    def prove(self, role: bytes, purpose: Purpose, challenge: bytes, nonce: bytes) -> bytes:
        run_id = self.run_id.encode()
        said = b"\0".join((b"laminar", role, purpose.value, len(run_id).to_bytes(4, "big") + run_id))
        return hmac.digest(self.token, said + challenge + nonce, "sha256")


def dial(address: tuple[str, int], credentials: Credentials, deadline_s: float) -> Link:
    """Connect to a relay's port and prove membership both ways, each step within deadline_s."""
    link = new_link(address)
    try:
        connect(link, address, credentials, deadline_s)
    except BaseException:
        link.close()
        raise
    return link


def new_link(address: tuple[str, int]) -> Link:
    """A link to a relay's port that is not connected yet; `shutdown` also ends the attempt to connect it."""
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    return Link(socket.socket(family, socket.SOCK_STREAM), f"relay {address[0]}:{address[1]}")


def connect(link: Link, address: tuple[str, int], credentials: Credentials, deadline_s: float) -> None:
    link.connect(address, deadline_s)
    link.limit_waits(deadline_s)
    introduce(link, credentials, Purpose.STREAM)


def introduce(link: Link, credentials: Credentials, purpose: Purpose) -> None:
    """The dialling side of the handshake; raises LinkError for a peer that has not got the run's token."""
    _, challenge = link.receive(Kind.CHALLENGE)
    nonce = os.urandom(NONCE_BYTES)
    link.send(Kind.PROOF, nonce + credentials.prove(b"dialler", purpose, challenge, nonce))
    _, proof = link.receive(Kind.WELCOME)
    if not hmac.compare_digest(proof, credentials.prove(b"acceptor", purpose, challenge, nonce)):
        raise LinkError(f"{link.peer} has not got the token of run {credentials.run_id}")


def admit(link: Link, credentials: Credentials, purpose: Purpose) -> None:
    """The accepting side; raises LinkError for a peer that has not got the run's token, and tells it."""
    challenge = os.urandom(NONCE_BYTES)
    link.send(Kind.CHALLENGE, challenge)
    _, answer = link.receive(Kind.PROOF)
    nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, credentials.prove(b"dialler", purpose, challenge, nonce)):
        link.send(Kind.REFUSED, msgspec.msgpack.encode(Refusal("wrong token")))
        raise LinkError(f"wrong token from {link.peer}")
    link.send(Kind.WELCOME, credentials.prove(b"acceptor", purpose, challenge, nonce))
