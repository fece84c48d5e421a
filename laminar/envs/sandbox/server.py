"""Lends a machine's sandbox to all of its replicas, over a socket that only members of the run get anything from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import asdict

from laminar.envs.sandbox.channel import Address, Channel, Stranger
from laminar.envs.sandbox.sandbox import Sandbox, SandboxUnavailable

log = logging.getLogger(__name__)

HANDSHAKE_DEADLINE_S = 10.0


class SandboxServer:
    """Owns the sandbox: close() ends both. A client that hangs up has its call stopped."""

    def __init__(self, sandbox: Sandbox, address: Address) -> None:
        self._sandbox = sandbox
        self._address = address
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._address.socket_name)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._sandbox.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio makes a task of every connection"
        self._connections.add(task)
        channel = Channel(reader, writer)
        try:
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                await channel.admit(self._address)
            while True:
                await self._serve(channel, await channel.receive())
        except Stranger as error:
            log.warning("%s", error)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, asyncio.CancelledError):
            pass  # it hung up, or never introduced itself, or we close
        finally:
            channel.close()
            self._connections.discard(task)

    async def _serve(self, channel: Channel, call: dict[str, object]) -> None:
        code, wall_s = call["code"], call["wall_s"]
        assert isinstance(code, str), "clients are our own"
        assert wall_s is None or isinstance(wall_s, float), "clients are our own"
        running = asyncio.ensure_future(self._sandbox.run(code, wall_s=wall_s))
        # A client says nothing while its call runs, so whatever comes is the end of the stream.
        hung_up = asyncio.ensure_future(channel.receive())
        try:
            await asyncio.wait({running, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ConnectionAbortedError("the client hung up")
            await channel.send({"outcome": asdict(running.result())})
        except SandboxUnavailable as error:
            await channel.send({"unavailable": str(error)})
        finally:
            for task in (running, hung_up):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(running, hung_up, return_exceptions=True)
