"""Holds one zygote, gives it one call at a time, and replaces it when it does not answer as it should."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laminar.envs.sandbox import inside
from laminar.envs.sandbox.confinement import Confinement
from laminar.envs.sandbox.inside.limits import Limits
from laminar.envs.sandbox.sandbox import Outcome
from laminar.envs.sandbox.users import SlotUser, slot_user

START_DEADLINE_S = 60.0
"""For an interpreter to start, and to import what is preloaded."""
ANSWER_GRACE_S = 10.0
"""Beyond a call's own limit: its zygote stops it in time, unless it hangs itself."""
END_DEADLINE_S = 10.0
"""For the kernel to end what was sent SIGKILL."""

_MODULES = ("limits", "seccomp", "landlock", "child", "watch", "zygote")
_BOOT = """
import json, socket, struct, sys, types
channel = socket.socket(fileno=0)
def exactly(n):
    data = b""
    while len(data) < n:
        part = channel.recv(n - len(data))
        if not part:
            sys.exit("nothing to run was sent")
        data += part
    return data
package = types.ModuleType("laminar.envs.sandbox.inside")
sys.modules[package.__name__] = package
for name, source in json.loads(exactly(*struct.unpack("<I", exactly(4)))).items():
    module = types.ModuleType(f"{package.__name__}.{name}")
    sys.modules[module.__name__] = module
    setattr(package, name, module)
    exec(compile(source, name, "exec"), module.__dict__)
package.zygote.main(channel)
"""
"""The zygote's user may not be able to read our source, so it comes over the channel."""


class SlotDied(RuntimeError):
    """The zygote ended, or did not answer; what it was doing is lost."""


class Slot:
    """One place in a pool: start(), then run() and ready() in turn; kill() at any time, after which it can start."""

    def __init__(self, confinement: Confinement) -> None:
        self._confinement = confinement
        self._process: subprocess.Popen[bytes] | None = None
        self._user: SlotUser | None = None
        self._child: int | None = None
        """The pid of the waiting or running child, as the zygote sees it."""
        self._folder: str | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Raises SlotDied, with what the zygote said, if it does not become ready."""
        await self.kill()
        ours, theirs = socket.socketpair()
        self._user = slot_user()
        with theirs:
            self._process = self._spawn(theirs)
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**26)
        folder = Path(inside.__file__).parent
        self._send({name: (folder / f"{name}.py").read_text() for name in _MODULES})
        self._send(asdict(self._confinement.settings()))
        await self.ready(START_DEADLINE_S)

    async def ready(self, deadline_s: float = ANSWER_GRACE_S) -> None:
        """Wait until the next child waits for its code."""
        answer = await self._answer(deadline_s, "was not ready")
        self._child, self._folder = answer["ready"], answer["folder"]

    async def run(self, code: str, limits: Limits) -> Outcome:
        """One call; ready() must follow. Raises SlotDied; cancelled, the slot is dead."""
        self._send({"code": code, "limits": asdict(limits)})
        try:
            answer = await self._answer(limits.wall_s + ANSWER_GRACE_S, "did not answer")
        except asyncio.CancelledError:
            self._end()
            raise
        self._child = None
        return Outcome(answer["status"], answer["output"], answer["wall_s"])

    async def kill(self) -> None:
        """End the zygote and everything that it started; it may be dead already, or never have lived."""
        process, self._process = self._process, None
        if process is None:
            return
        self._end(process)
        self._writer.transport.abort()
        await asyncio.to_thread(process.wait, END_DEADLINE_S)
        if process.stderr is not None:
            process.stderr.close()
        if self._folder is not None and self._confinement.backend == "landlock":
            # The zygote removes it, unless it was killed, or what is in it was made to resist.
            await asyncio.to_thread(subprocess.run, ["rm", "-rf", "--", self._folder], check=False)
        if self._user is not None:
            self._user.close()
        self._user = self._child = self._folder = None

    def _end(self, process: subprocess.Popen[bytes] | None = None) -> None:
        process = process or self._process
        assert process is not None, "start() comes first"
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if self._confinement.backend == "landlock" and self._child is not None:
            # Its group is its own, and the zygote that would have ended it is gone.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child, signal.SIGKILL)

    def _spawn(self, channel: socket.socket) -> subprocess.Popen[bytes]:
        number = self._user.number if self._user is not None else None
        return subprocess.Popen(
            self._confinement.command(_BOOT),
            stdin=channel.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            user=number,
            group=number,
            extra_groups=None if number is None else [],
            start_new_session=True,
        )

    def _send(self, message: dict[str, Any]) -> None:
        payload = json.dumps(message).encode()
        self._writer.write(struct.pack("<I", len(payload)) + payload)

    async def _answer(self, deadline_s: float, otherwise: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(deadline_s):
                (num_bytes,) = struct.unpack("<I", await self._reader.readexactly(4))
                return json.loads(await self._reader.readexactly(num_bytes))
        except TimeoutError as error:
            self._end()
            raise SlotDied(f"the sandbox's process {otherwise} within {deadline_s:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise SlotDied(f"the sandbox's process ended{self._last_words()}") from error

    def _last_words(self) -> str:
        assert self._process is not None, "start() comes first"
        self._end()
        self._process.wait(END_DEADLINE_S)
        said = b""
        if self._process.stderr is not None:
            os.set_blocking(self._process.stderr.fileno(), False)
            said = self._process.stderr.read() or b""
        last = said.decode(errors="replace").strip().splitlines()[-3:]
        return f": {' / '.join(last)}" if last else f" with status {self._process.returncode}"
