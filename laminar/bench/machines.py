"""Emulates machines on this one: network namespaces joined by a bridge, each with a link of limited rate.

     namespace "switch"                    each namespace is held by a process that ends when its stdin closes, which
   ┌──────────────────────────┐            the death of this process does: nothing stays, whatever ends first
   │  br0 ── p0  p1  p2  ...  │
   └─────────┼───┼───┼────────┘
             │   │   │   veth pairs, a token bucket (tc tbf) at both ends
            e0  e0  e0     10.77.0.1, .2, .3 ...

As root, or unprivileged in a user namespace of its own where the kernel permits that.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

NEEDED = ("unshare", "nsenter", "ip", "tc")
HOLD_DEADLINE_S = 20.0
COMMAND_DEADLINE_S = 60.0
BURST = "256kb"
LATENCY = "30ms"


class Machine(msgspec.Struct, frozen=True):
    """Where a process may run. prefix: what to put before its command line to run it there."""

    index: int
    host: str
    prefix: tuple[str, ...] = ()
    interface: str = "lo"


class NotPermitted(OSError):
    """Namespaces or rate limits cannot be had here; the message says what was tried."""


def loopback(num_machines: int) -> list[Machine]:
    """No emulation: processes of this machine that talk over its loopback."""
    return [Machine(index, "127.0.0.1") for index in range(num_machines)]


class Switch:
    """The emulated machines, and the links that can be cut."""

    def __init__(self, machines: list[Machine], prefix: tuple[str, ...]) -> None:
        self.machines = machines
        self._prefix = prefix

    def cut(self, index: int) -> None:
        """Pull the plug of one machine's link: nothing comes in or goes out, and nobody is told."""
        _run(*self._prefix, "ip", "link", "set", f"p{index}", "down")

    def mend(self, index: int) -> None:
        _run(*self._prefix, "ip", "link", "set", f"p{index}", "up")


@contextmanager
def emulated(num_machines: int, mbit_per_s: int) -> Iterator[Switch]:
    """Machines with links of this rate, gone when the block ends. Raises NotPermitted, with the cause."""
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if missing:
        raise NotPermitted(f"{', '.join(missing)} not installed")
    holders: list[subprocess.Popen[bytes]] = []
    try:
        enter = _hold_switch(holders)
        machines = [_hold_machine(holders, enter, index) for index in range(num_machines)]
        _wire(enter, machines, [holder.pid for holder in holders[1:]], mbit_per_s)
        yield Switch(machines, enter)
    finally:
        for holder in holders:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(HOLD_DEADLINE_S)


def _hold_switch(holders: list[subprocess.Popen[bytes]]) -> tuple[str, ...]:
    """Open the switch's namespace; returns what to put before a command to run it in there."""
    causes: list[str] = []
    for flags, enter in (("-n", ("-n",)), ("-Urn", ("-U", "--preserve-credentials", "-n"))):
        try:
            pid = _hold(holders, ["unshare", flags, "cat"])
        except NotPermitted as error:
            causes.append(str(error))
        else:
            return ("nsenter", "-t", str(pid), *enter)
    raise NotPermitted("; ".join(causes))


def _hold_machine(holders: list[subprocess.Popen[bytes]], enter: tuple[str, ...], index: int) -> Machine:
    pid = _hold(holders, [*enter, "unshare", "-n", "cat"])
    prefix = (*enter[:2], str(pid), *enter[3:])
    return Machine(index, f"10.77.0.{index + 1}", prefix, "e0")


def _hold(holders: list[subprocess.Popen[bytes]], command: list[str]) -> int:
    """Start a process that holds a new namespace, and wait until it is in there."""
    known = {_namespace("self"), *(_namespace(holder.pid) for holder in holders)}
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until = time.monotonic() + HOLD_DEADLINE_S
    while holder.poll() is None and time.monotonic() < until:
        if _namespace(holder.pid) not in known:
            holders.append(holder)
            return holder.pid
        time.sleep(0.002)
    holder.kill()
    _, said = holder.communicate()
    raise NotPermitted(f"{' '.join(command)}: {said.decode().strip() or f'nothing within {HOLD_DEADLINE_S:g} s'}")


def _namespace(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _wire(enter: tuple[str, ...], machines: list[Machine], pids: list[int], mbit_per_s: int) -> None:
    limit = f"root tbf rate {mbit_per_s}mbit burst {BURST} latency {LATENCY}"
    links = ["link set lo up", "link add br0 type bridge", "addr add 10.77.0.254/24 dev br0", "link set br0 up"]
    for machine, pid in zip(machines, pids, strict=True):
        port = f"p{machine.index}"
        links.append(f"link add e0 netns {pid} type veth peer name {port}")
        links += [f"link set {port} master br0", f"link set {port} up"]
    _run(*enter, "ip", "-batch", "-", stdin="\n".join(links))
    _run(*enter, "tc", "-batch", "-", stdin="\n".join(f"qdisc add dev p{m.index} {limit}" for m in machines))
    for machine in machines:
        inside = f"link set lo up\naddr add {machine.host}/24 dev e0\nlink set e0 up"
        _run(*machine.prefix, "ip", "-batch", "-", stdin=inside)
        _run(*machine.prefix, "tc", *f"qdisc add dev e0 {limit}".split())
        # Every kernel has it, and it fills a link at once; where it cannot be chosen the default stays.
        choose = "echo cubic > /proc/sys/net/ipv4/tcp_congestion_control"
        subprocess.run([*machine.prefix, "sh", "-c", choose], check=False, stderr=subprocess.DEVNULL)


def _run(*command: str, stdin: str | None = None) -> None:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=COMMAND_DEADLINE_S)
    if done.returncode != 0:
        raise NotPermitted(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
