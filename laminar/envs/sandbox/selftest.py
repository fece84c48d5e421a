"""Tries a sandbox before it is trusted: attacks that must fail, and a call that must succeed."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laminar.envs.sandbox.attacks import ESCAPED, START_ATTACKS, Attack, Target
from laminar.envs.sandbox.sandbox import Outcome, Sandbox

LOOP_WALL_S = 0.5
"""Endless attacks are stopped after so long."""
SECRET_VARIABLE = "LAMINAR_SANDBOX_SECRET"


class SandboxBroken(RuntimeError):
    """An attack got through, or the sandbox does not run code at all."""


async def prove(sandbox: Sandbox) -> None:
    """Raises SandboxBroken naming the attack; SandboxUnavailable rises."""
    answer = await sandbox.run("print('stands'); 2**10")
    if answer.output != "stands\n1024\n":
        raise SandboxBroken(f"the sandbox does not run code: {answer.text()!r} ({answer.status})")
    with target() as aim:
        for attack in START_ATTACKS:
            outcome = await sandbox.run(attack.program(aim), wall_s=LOOP_WALL_S if endless(attack) else None)
            if (flaw := judge(attack, outcome)) is not None:
                raise SandboxBroken(f"the sandbox does not stop {attack.kind}: {attack.name}: {flaw}")


def judge(attack: Attack, outcome: Outcome) -> str | None:
    """What is wrong, or nothing."""
    if ESCAPED in outcome.output:
        return "it got through"
    if outcome.status not in attack.ends_as:
        return f"it ended as {outcome.status!r}, not as {' or '.join(attack.ends_as)}: {outcome.text()[-300:]}"
    return None


def endless(attack: Attack) -> bool:
    return "timeout" in attack.ends_as


@contextmanager
def target() -> Iterator[Target]:
    """Something of everything that an attack may aim at, for as long as the block runs."""
    secret = secrets.token_hex(16)
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        tempfile.TemporaryDirectory(prefix="laminar-target-") as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="laminar-target-") as shared,
        subprocess.Popen(sleeper, stdin=subprocess.PIPE, env={**os.environ, SECRET_VARIABLE: secret}) as process,
    ):
        name = f"laminar-target-{secrets.token_hex(8)}"
        unix.bind(f"\0{name}")
        unix.listen()
        datagrams.bind(f"\0{name}-datagrams")
        os.chmod(shared.name, 0o666)
        file = Path(folder) / "secret"
        file.touch(0o600)
        file.write_text(secret)
        port = listener.getsockname()[1]
        yield Target(process.pid, secret, str(file), port, name, Path(shared.name).name)
