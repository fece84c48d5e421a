"""Forks a child for each call, ahead of it, and sees to its end: the process that a slot of the pool talks to.

    pool ◄── ready ── zygote ── fork ──► child, confined, waits for its code
         ─── call ──►        ─── code ─►   runs it; its processes are one group
         ◄── result ─        ◄─ output ─   killed as a group, reaped, its files removed; then the next is forked

The zygote itself is trusted, holds no secret and has no privilege. When its pool is gone, so is everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any

from laminar.envs.sandbox.inside import child, watch
from laminar.envs.sandbox.inside.limits import Limits, Settings

CHECK_INTERVAL_S = 0.02
FOLDER_PREFIX = "laminar-sandbox-"
NUM_OWN_TASKS = 2
"""The zygote and its child."""
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 1, 4, 36, 38


def main(channel: socket.socket) -> None:
    """Serve one call after the other until the pool closes the channel."""
    told = receive(channel)
    if told is None:
        return
    settings = Settings(**{**told, "limits": Limits(**told["limits"])})
    sys.path += settings.search_path
    for name in settings.preloaded:
        importlib.import_module(name)
    _prepare()
    folder = settings.work_folder or tempfile.mkdtemp(
        prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=settings.temporary_folder
    )
    os.environ.update(HOME=folder, TMPDIR=folder)
    try:
        while _serve_one(channel, settings, folder):
            _clear(folder)
    finally:
        if settings.work_folder is None:
            _clear(folder)
            os.rmdir(folder)


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """One frame: its length in four bytes, then JSON; none at the end of the stream."""
    header = _receive_exactly(channel, 4)
    payload = _receive_exactly(channel, struct.unpack("<I", header)[0]) if header is not None else None
    return json.loads(payload) if payload is not None else None


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    payload = json.dumps(message).encode()
    channel.sendall(struct.pack("<I", len(payload)) + payload)


class Child:
    """A forked child, as its zygote sees it: waiting for code, then running it."""

    def __init__(self, settings: Settings, folder: str) -> None:
        self._settings = settings
        self._folder = folder
        code_out, self._code_in = os.pipe()
        self._output, output_in = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            child.live(settings, folder, code_out, output_in)
        os.close(code_out)
        os.close(output_in)
        os.set_blocking(self._output, False)
        self._written = bytearray()

    def run(self, code: str, limits: Limits, channel: socket.socket) -> dict[str, Any]:
        """Until it ends, is stopped, or nobody listens any more."""
        began_s = time.monotonic()
        num_others = watch.num_tasks_of_user() if self._settings.counts_tasks else NUM_OWN_TASKS
        num_tasks_max = num_others + limits.num_processes
        resource.prlimit(self.pid, resource.RLIMIT_NPROC, (num_tasks_max, num_tasks_max))
        verdict = self._hand_over(code) or self._watch(began_s, limits, channel)
        status = self.end()
        self._drain(limits.output_bytes)
        verdict = verdict or ("output" if len(self._written) > limits.output_bytes else _verdict(status))
        return {
            "status": verdict,
            "exit_status": status,
            "output": self._written[: limits.output_bytes].decode(errors="replace"),
            "wall_s": time.monotonic() - began_s,
        }

    def end(self) -> int:
        """Kill what is left of it, and of what it started; returns how it ended, as from os.waitstatus_to_exitcode.

        Only once: afterwards its number may be another's.
        """
        self._close_code()
        # Before it is reaped its number is still its group's and nobody else's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        status = 0
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, waited = os.waitpid(-1, 0)
                status = os.waitstatus_to_exitcode(waited) if pid == self.pid else status
        return status

    def _hand_over(self, code: str) -> str | None:
        """A verdict if it died while it waited."""
        rest = memoryview(code.encode(errors="replace"))
        try:
            while rest:
                rest = rest[os.write(self._code_in, rest) :]
        except BrokenPipeError:
            return "killed"
        self._close_code()
        return None

    def _close_code(self) -> None:
        if self._code_in >= 0:
            os.close(self._code_in)
            self._code_in = -1

    def _watch(self, began_s: float, limits: Limits, channel: socket.socket) -> str | None:
        """Why it has to be stopped; none once it has ended by itself."""
        ended = os.pidfd_open(self.pid)
        try:
            with selectors.DefaultSelector() as selector:
                for source in (ended, channel):
                    selector.register(source, selectors.EVENT_READ)
                output = selector.register(self._output, selectors.EVENT_READ)
                checked_s = began_s
                while True:
                    ready = {key.fileobj for key, _ in selector.select(CHECK_INTERVAL_S)}
                    if output.fileobj in ready and not self._take_in(limits.output_bytes):
                        selector.unregister(output.fileobj)
                        output = output._replace(fileobj=-1)
                    now_s = time.monotonic()
                    if len(self._written) > limits.output_bytes:
                        return "output"
                    if channel in ready:
                        self.end()
                        raise SystemExit("the pool has gone")
                    if ended in ready:
                        return None
                    if now_s - began_s > limits.wall_s:
                        return "timeout"
                    if now_s - checked_s >= CHECK_INTERVAL_S:
                        checked_s = now_s
                        if over := watch.excess(limits, self._folder):
                            return over
        finally:
            os.close(ended)

    def _take_in(self, output_bytes_max: int) -> bool:
        """Whether more can come."""
        try:
            part = os.read(self._output, output_bytes_max + 1)
        except BlockingIOError:
            return True
        self._written += part
        return bool(part)

    def _drain(self, output_bytes_max: int) -> None:
        """What was written before the end; nobody is left who could write more."""
        while len(self._written) <= output_bytes_max:
            num_before = len(self._written)
            self._take_in(output_bytes_max)
            if len(self._written) == num_before:
                break
        os.close(self._output)


def _serve_one(channel: socket.socket, settings: Settings, folder: str) -> bool:
    """Whether there was a call."""
    waiting = Child(settings, folder)
    send(channel, {"ready": waiting.pid, "folder": folder})
    call = receive(channel)
    if call is None:
        waiting.end()
        return False
    send(channel, waiting.run(call["code"], Limits(**call["limits"]), channel))
    return True


def _prepare() -> None:
    """Adopt orphans, be no target for ptrace or /proc/<pid>/mem, gain nothing by an exec, die with the parent."""
    for option, value in (
        (_SET_SUBREAPER, 1),
        (_SET_DUMPABLE, 0),
        (_SET_NO_NEW_PRIVILEGES, 1),
        (_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL),
    ):
        _control(option, value)


def _control(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _clear(folder: str) -> None:
    """Remove what a call left. What cannot be removed ends the zygote; its slot gets another, and a fresh folder."""
    found = [folder]
    for path in found:
        os.chmod(path, 0o700)  # a folder may have been made so that nobody can enter it
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    found.append(entry.path)
                else:
                    os.unlink(entry.path)
    for path in reversed(found[1:]):
        os.rmdir(path)


def _verdict(status: int) -> str:
    if status == -signal.SIGXCPU:
        return "cpu"
    if status < 0:
        return "killed"
    return "ok" if status == 0 else "error"


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        part = channel.recv(num_bytes - len(received))
        if not part:
            return None
        received += part
    return bytes(received)
