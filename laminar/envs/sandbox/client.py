"""Reaches the sandbox of this machine from another process, and gets over its being replaced."""

from __future__ import annotations

import asyncio

from laminar.envs.sandbox.channel import Address, Channel, Stranger
from laminar.envs.sandbox.sandbox import Outcome, SandboxUnavailable

CONNECT_DEADLINE_S = 60.0
"""For a sandbox that is starting, or being replaced, to listen."""
RETRY_S = 0.05
ANSWER_GRACE_S = 30.0
"""Beyond its queue's and its call's own deadlines."""
NUM_TRIES = 3
"""A call whose sandbox died is made again on the next one: it cannot have changed anything."""


class SharedSandbox:
    """Sandbox of the machine, as one of its replicas sees it; any number of calls at once.

    deadline_s: what its queue and one call may take together.
    """

    def __init__(self, address: Address, *, deadline_s: float, connect_deadline_s: float = CONNECT_DEADLINE_S) -> None:
        self._address = address
        self._deadline_s = deadline_s + ANSWER_GRACE_S
        self._connect_deadline_s = connect_deadline_s
        self._idle: list[Channel] = []

    async def run(self, code: str, *, wall_s: float | None = None) -> Outcome:
        cause = ""
        for _ in range(NUM_TRIES):
            channel = self._idle.pop() if self._idle else await self._connect()
            try:
                async with asyncio.timeout(self._deadline_s):
                    # Hung up on while it was idle, it says so only now.
                    await channel.send({"code": code, "wall_s": wall_s})
                    answer = await channel.receive()
            except TimeoutError as error:
                channel.close()
                raise SandboxUnavailable(f"the sandbox did not answer within {self._deadline_s:g} s") from error
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                channel.close()
                self._drop_idle()
                cause = f"{type(error).__name__}: {error}"
            except BaseException:
                channel.close()
                raise
            else:
                self._idle.append(channel)
                return _outcome(answer)
        raise SandboxUnavailable(f"the sandbox of machine {self._address.machine} died {NUM_TRIES} times: {cause}")

    async def close(self) -> None:
        self._drop_idle()

    async def _connect(self) -> Channel:
        """A new connection. Raises SandboxUnavailable if nobody listens within the deadline."""
        try:
            async with asyncio.timeout(self._connect_deadline_s):
                while True:
                    try:
                        return await self._connect_once()
                    except Stranger:
                        raise
                    except (BlockingIOError, ConnectionError, asyncio.IncompleteReadError):
                        await asyncio.sleep(RETRY_S)
        except TimeoutError as error:
            raise SandboxUnavailable(
                f"no sandbox answers on machine {self._address.machine} within {self._connect_deadline_s:g} s"
            ) from error
        except Stranger as error:
            raise SandboxUnavailable(str(error)) from error

    async def _connect_once(self) -> Channel:
        channel = Channel(*await asyncio.open_unix_connection(self._address.socket_name, limit=2**20))
        try:
            await channel.introduce(self._address)
        except BaseException:
            channel.close()
            raise
        return channel

    def _drop_idle(self) -> None:
        for channel in self._idle:
            channel.close()
        self._idle.clear()


def _outcome(answer: dict[str, object]) -> Outcome:
    if "unavailable" in answer:
        raise SandboxUnavailable(str(answer["unavailable"]))
    outcome = answer["outcome"]
    assert isinstance(outcome, dict), "the server is our own"
    return Outcome(**outcome)
