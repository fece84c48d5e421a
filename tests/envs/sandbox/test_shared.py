"""One sandbox for all replicas of a machine: members only, calls that end with their caller, servers that die."""

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from pathlib import Path

import pytest

from laminar.envs.sandbox.channel import NONCE_BYTES, Address
from laminar.envs.sandbox.client import SharedSandbox
from laminar.envs.sandbox.sandbox import Outcome, SandboxUnavailable
from laminar.envs.sandbox.server import SandboxServer
from tests.rollout.waiting import reach

ROOT = Path(__file__).parents[3]
TOKEN = b"the token of this test's run"


class Echo:
    """A sandbox that says what it is given, after as long as it is told."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.cancelled: list[str] = []
        self.closed = False

    async def run(self, code: str, *, wall_s: float | None = None) -> Outcome:
        if code == "refuse":
            raise SandboxUnavailable("no slot became free")
        self.running.append(code)
        try:
            await asyncio.sleep(wall_s or 0)
        except asyncio.CancelledError:
            self.cancelled.append(code)
            raise
        finally:
            self.running.remove(code)
        return Outcome("ok", code, wall_s or 0.0)

    async def close(self) -> None:
        self.closed = True


def new_address(token: bytes = TOKEN) -> Address:
    return Address(f"test-{uuid.uuid4().hex[:12]}", 0, token)


@contextlib.asynccontextmanager
async def serving(address, sandbox):
    server = SandboxServer(sandbox, address)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def client_of(address, *, deadline_s=20.0, connect_deadline_s=20.0) -> SharedSandbox:
    return SharedSandbox(address, deadline_s=deadline_s, connect_deadline_s=connect_deadline_s)


async def test_many_calls_of_many_clients_get_their_own_outcomes():
    address, sandbox = new_address(), Echo()
    async with serving(address, sandbox):
        clients = [client_of(address) for _ in range(3)]
        calls = [clients[n % 3].run(f"{n} ✓", wall_s=0.001 * (n % 7)) for n in range(100)]
        outcomes = await asyncio.gather(*calls)
        for client in clients:
            await client.close()
    assert [outcome.output for outcome in outcomes] == [f"{n} ✓" for n in range(100)]
    assert sandbox.closed


async def test_a_refusal_is_the_caller_s_to_hear_and_the_connection_serves_on():
    address = new_address()
    async with serving(address, Echo()):
        client = client_of(address)
        with pytest.raises(SandboxUnavailable, match="no slot became free"):
            await client.run("refuse")
        assert (await client.run("again")).output == "again"
        await client.close()


async def test_a_call_ends_with_its_caller():
    address, sandbox = new_address(), Echo()
    async with serving(address, sandbox):
        client = client_of(address)
        call = asyncio.create_task(client.run("slow", wall_s=60.0))
        await reach("it runs", lambda: sandbox.running)
        call.cancel()
        await reach("it was cancelled", lambda: sandbox.cancelled == ["slow"])


async def test_a_peer_without_the_token_gets_nothing():
    address, sandbox = new_address(), Echo()
    async with serving(address, sandbox):
        stranger = client_of(Address(address.run_id, 0, b"another token"), connect_deadline_s=0.5)
        with pytest.raises(SandboxUnavailable):
            await stranger.run("let me in")
        reader, writer = await asyncio.open_unix_connection(address.socket_name)
        await reader.readexactly(32)
        writer.write(b"\0" * 64 + b"\x02\0\0\0{}")
        assert await reader.read() == b"", "it was hung up on, and told nothing"
        writer.close()
    assert not sandbox.running


async def test_a_server_without_the_token_is_told_no_code():
    address = new_address()
    heard: list[bytes] = []

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"n" * 32)
        await reader.readexactly(64)
        writer.write(b"p" * 32)
        heard.append(await reader.read())
        writer.close()

    async with await asyncio.start_unix_server(pretend, address.socket_name):
        with pytest.raises(SandboxUnavailable, match="has not got the run's token"):
            await client_of(address).run("secret")
        await reach("it was hung up on", lambda: heard)
    assert heard == [b""]


async def test_without_a_server_the_wait_ends_by_name():
    with pytest.raises(SandboxUnavailable, match=r"no sandbox answers on machine 0 within 0\.2 s"):
        await client_of(new_address(), connect_deadline_s=0.2).run("1")


async def test_one_that_never_answers_is_given_up_by_name(monkeypatch):
    monkeypatch.setattr("laminar.envs.sandbox.client.ANSWER_GRACE_S", 0.1)
    address = new_address()
    async with serving(address, Echo()):
        with pytest.raises(SandboxUnavailable, match=r"did not answer within 0\.2 s"):
            await client_of(address, deadline_s=0.1).run("slow", wall_s=60.0)


@pytest.mark.parametrize("num_bytes_said", [0, 1, NONCE_BYTES])
async def test_a_server_that_dies_while_it_is_greeted_costs_only_time(num_bytes_said):
    """Whether the client was reading or writing then."""
    address, num_met = new_address(), 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_met
        num_met += 1
        writer.write(bytes(num_bytes_said))
        writer.transport.close()

    dying = await asyncio.start_unix_server(hang_up, address.socket_name)
    call = asyncio.create_task(client_of(address).run("in the end"))
    await reach("it was met twice", lambda: num_met >= 2)
    dying.close()
    async with serving(address, Echo()):
        assert (await call).output == "in the end"


async def test_a_server_that_is_killed_under_a_call_costs_only_time():
    """It is killed as the kernel would; the next one, in its place, makes the call."""
    address = new_address()
    code = (
        "import asyncio\n"
        "from laminar.envs.sandbox.channel import Address\n"
        "from laminar.envs.sandbox.server import SandboxServer\n"
        "from tests.envs.sandbox.test_shared import Echo\n"
        "async def main():\n"
        f"    await SandboxServer(Echo(), Address({address.run_id!r}, 0, {TOKEN!r})).start()\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT)
    client = client_of(address)
    assert (await client.run("before")).output == "before"
    call = asyncio.create_task(client.run("slow", wall_s=2.0))
    other = asyncio.create_task(client.run("slow too", wall_s=2.0))
    await asyncio.sleep(0)
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    async with serving(address, Echo()):
        assert (await call).output == "slow"
        assert (await other).output == "slow too"
        assert (await client.run("after")).output == "after"
        await client.close()
