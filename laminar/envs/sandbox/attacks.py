"""Lists what code in a sandbox is made to try at every start, each a program that says ESCAPED if it got through.

The tests have some forty more (tests/envs/sandbox/battery.py), and run all with each backend, as root and without
rights, and outside, where most do succeed. A program finds its target in the names that Target gives it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Kind = Literal[
    "network",
    "host files",
    "environment and processes",
    "shared memory",
    "fork and thread bombs",
    "memory and disk",
    "endless loops and output",
    "orphans and signals",
]
ESCAPED = "ESCAPED"
ESCAPEE = "escapee"
"""What a process that tries to outlive its call names itself, so that whoever looks for it finds it."""


@dataclass(frozen=True)
class Target:
    """What there is to be reached on the host, all of it by the user who runs the pool."""

    pid: int
    """A process."""
    secret: str
    """A text that is in that process's environment, and in `file`."""
    file: str
    """A file that only its owner may read, in a folder of its own."""
    port: int
    """Where somebody listens on 127.0.0.1 (TCP)."""
    socket_name: str
    """Where somebody listens, an abstract Unix socket without its leading null."""
    shared_memory: str
    """A file below /dev/shm that anybody may write."""

    def prelude(self) -> str:
        return "".join(f"{name} = {value!r}\n" for name, value in asdict(self).items())


@dataclass(frozen=True)
class Attack:
    kind: Kind
    name: str
    code: str
    ends_as: tuple[str, ...] = ("ok", "error")
    """Statuses that the outcome must have one of."""
    works_outside: bool = True
    """Whether it may be run, and succeeds, without a sandbox."""

    def program(self, target: Target) -> str:
        return target.prelude() + _COMMON + self.code


_COMMON = """
import ctypes, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped():
    print("ESCAPED", flush=True)
def done(result):
    if result >= 0:
        escaped()
"""

START_ATTACKS = (
    Attack("network", "a TCP connection", "socket.create_connection(('127.0.0.1', port), 2); escaped()"),
    Attack(
        "network",
        "an abstract Unix socket",
        "s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + socket_name); escaped()",
    ),
    Attack("host files", "reading a file", "assert secret in open(file).read(); escaped()"),
    Attack("host files", "writing a file", "open(file, 'a').close(); escaped()"),
    Attack(
        "environment and processes",
        "its own environment",
        "assert any(secret in value for value in os.environ.values()); escaped()",
    ),
    Attack(
        "environment and processes",
        "another's environment",
        "assert secret.encode() in open(f'/proc/{pid}/environ', 'rb').read(); escaped()",
    ),
    Attack(
        "fork and thread bombs",
        "a hundred processes",
        """
for n in range(100):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
escaped()
""",
        works_outside=False,
    ),
    Attack("memory and disk", "two gigabytes", "x = bytearray(2**31); escaped()"),
    Attack(
        "endless loops and output",
        "a loop",
        "while True: pass",
        ends_as=("timeout", "cpu"),
        works_outside=False,
    ),
    Attack(
        "endless loops and output",
        "a megabyte at once",
        "print('x' * 2**20)",
        ends_as=("output",),
        works_outside=False,
    ),
    Attack("orphans and signals", "killing another process", "os.kill(pid, 0); escaped()"),
)
