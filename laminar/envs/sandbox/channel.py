"""Carries calls between the processes of one machine and its sandbox: proof of membership, then frames of JSON.

server                                          client
    nonce a                            ──────►
                                       ◄──────  nonce b, HMAC(token, "client", run, machine, a, b)
    HMAC(token, "server", …)           ──────►  neither goes on with a peer that has not got the run's token
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import struct
from dataclasses import dataclass
from typing import Any

NONCE_BYTES = 32
PROOF_BYTES = 32
FRAME_BYTES_MAX = 2**26


class Stranger(ConnectionError):
    """The peer has not got the run's token, or does not speak as we do."""


@dataclass(frozen=True)
class Address:
    """Where the sandbox of a machine is found, and what proves that it is the run's."""

    run_id: str
    machine: int
    token: bytes

    @property
    def socket_name(self) -> str:
        """An abstract Unix socket, which the kernel removes with its owner."""
        return f"\0laminar-{self.run_id}-sandbox-{self.machine}"

    def __repr__(self) -> str:
        return f"Address(run_id={self.run_id!r}, machine={self.machine})"

    def prove(self, role: str, challenge: bytes, nonce: bytes) -> bytes:
        said = f"laminar sandbox\0{role}\0{self.run_id}\0{self.machine}\0".encode()
        return hmac.digest(self.token, said + challenge + nonce, "sha256")


class Channel:
    """One connection: frames both ways. Every wait for the peer is the caller's to limit."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def admit(self, address: Address) -> None:
        """The server's side; raises Stranger."""
        challenge = os.urandom(NONCE_BYTES)
        self._writer.write(challenge)
        answer = await self._reader.readexactly(NONCE_BYTES + PROOF_BYTES)
        nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, address.prove("client", challenge, nonce)):
            raise Stranger(f"wrong token from a client of {address}")
        self._writer.write(address.prove("server", challenge, nonce))

    async def introduce(self, address: Address) -> None:
        """The client's side; raises Stranger."""
        challenge = await self._reader.readexactly(NONCE_BYTES)
        nonce = os.urandom(NONCE_BYTES)
        self._writer.write(nonce + address.prove("client", challenge, nonce))
        proof = await self._reader.readexactly(PROOF_BYTES)
        if not hmac.compare_digest(proof, address.prove("server", challenge, nonce)):
            raise Stranger(f"whoever listens at {address} has not got the run's token")

    async def send(self, message: dict[str, Any]) -> None:
        payload = json.dumps(message).encode()
        self._writer.write(struct.pack("<I", len(payload)) + payload)
        await self._writer.drain()

    async def receive(self) -> dict[str, Any]:
        """The next frame. Raises asyncio.IncompleteReadError at the end of the stream."""
        (num_bytes,) = struct.unpack("<I", await self._reader.readexactly(4))
        if num_bytes > FRAME_BYTES_MAX:
            raise Stranger(f"a frame of {num_bytes} bytes")
        return json.loads(await self._reader.readexactly(num_bytes))

    def close(self) -> None:
        self._writer.transport.abort()
