"""Scores responses in processes of their own, each call with a hard time limit.

    score(calls) ──► idle worker ──RewardCall──► reward_worker.py ──► Reward | RewardFailure
                        ▲    │ hung or crashed: killed
                        └────┴─ replaced when it is needed next

A call that fails, in whatever way, fails its own response only, by name.
"""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

import msgspec

import laminar
from laminar.envs.reward_worker import (
    SETTING,
    FailureKind,
    Ready,
    Reward,
    RewardCall,
    RewardFailure,
    frame,
)

START_DEADLINE_S = 60.0
"""For a worker to start and to import the user's file."""
KILL_DEADLINE_S = 10.0
"""For the kernel to end a process that was sent SIGKILL."""
LATE_REPLY_GRACE_S = 0.05
"""If this process was itself held up, an answer that came in time may be unread when the time limit fires: asyncio's
own loop reads sockets first, uvloop looks at timers first."""


class RewardPool:
    """`num_workers` processes that run a reward function, named as in `reward.function`.

    `timeout_s` limits the execution of one call, not its wait for a free worker, which is bounded by the calls before
    it. Use it from one event loop, whose thread outlives it: the workers die with that thread.
    """

    def __init__(self, function: str, *, timeout_s: float, num_workers: int) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._workers = [_Worker(function) for _ in range(num_workers)]
        self._scoring: set[asyncio.Task[Reward | RewardFailure]] = set()
        self._closed = False
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self.num_failures: dict[FailureKind, int] = dict.fromkeys(get_args(FailureKind), 0)

    async def start(self) -> None:
        """Start the workers. Raises ValueError, in the worker's words, if the function cannot be loaded."""
        try:
            await asyncio.gather(*(worker.start() for worker in self._workers))
        except BaseException:
            await self.close()
            raise
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, calls: Sequence[RewardCall]) -> list[Reward | RewardFailure]:
        """One outcome a call, in their order. Raises only if a worker cannot be replaced, or when the pool closes."""
        tasks = [asyncio.ensure_future(self._score_one(call)) for call in calls]
        self._scoring.update(tasks)
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)
            self._scoring.difference_update(tasks)
        for outcome in outcomes:
            if isinstance(outcome, RewardFailure):
                self.num_failures[outcome.kind] += 1
        return outcomes

    async def close(self) -> None:
        """End the workers and whatever they started; a score() under way is cancelled. Closing again does nothing."""
        self._closed = True
        await _cancel(self._scoring)
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _score_one(self, call: RewardCall) -> Reward | RewardFailure:
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        worker = await self._idle.get()
        try:
            if not worker.alive:
                await worker.start()
            return await worker.score(call, self._timeout_s)
        finally:
            self._idle.put_nowait(worker)


async def _cancel(tasks: Iterable[asyncio.Task[Reward | RewardFailure]]) -> None:
    """Cancel those still running, and wait until they have put their workers in order."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


class _Worker:
    """One process at a time, replaced by start() after its death."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ended = True
        """Whether kill() has ended the process, with its group; it alone reaps, so the number is not another's yet."""

    @property
    def alive(self) -> bool:
        if self._process is None or self._ended:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None

    async def start(self) -> None:
        await self.kill()
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                ready = await self._spawn()
        except TimeoutError as error:
            await self.kill()
            raise ValueError(f"{SETTING}={self._function}: not imported after {START_DEADLINE_S} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await self.kill()
            raise ValueError(f"{SETTING}={self._function}: importing it, the worker {self._autopsy()}") from error
        except BaseException:
            await self.kill()
            raise
        if ready.error:
            await self.kill()
            raise ValueError(ready.error)

    async def score(self, call: RewardCall, timeout_s: float) -> Reward | RewardFailure:
        """Run one call; a worker that does not answer it properly is dead afterwards."""
        try:
            payload = msgspec.msgpack.encode(call)
        except (TypeError, OverflowError, ValueError, msgspec.MsgspecError) as error:
            return RewardFailure("unsendable", f"the call's arguments cannot be sent to a worker: {error}")
        answer = asyncio.ensure_future(self._exchange(payload))
        try:
            await asyncio.wait({answer}, timeout=timeout_s)
            await asyncio.wait({answer}, timeout=LATE_REPLY_GRACE_S)
            if answer.done():
                return answer.result()
            failure = RewardFailure("timeout", f"the call took more than {timeout_s} s and its process was killed")
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.kill()
            return RewardFailure("crash", f"the call's process {self._autopsy()}")
        except msgspec.MsgspecError as error:
            failure = RewardFailure("crash", f"the call's process wrote over its channel: {error}")
        except asyncio.CancelledError:
            answer.cancel()
            await self.kill()
            raise
        answer.cancel()
        await self.kill()
        return failure

    async def kill(self) -> None:
        """End the process and those it started; it may be dead already."""
        if self._process is None:
            return
        if not self._ended:
            # At once and before anything is awaited: a cancellation must not leave it half done.
            self._ended = True
            os.killpg(self._process.pid, signal.SIGKILL)
            if self._writer is not None:
                self._writer.transport.abort()
        await asyncio.to_thread(self._process.wait, KILL_DEADLINE_S)

    async def _spawn(self) -> Ready:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs, self._function)
            self._ended = False
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        return msgspec.msgpack.decode(await self._receive(), type=Ready)

    async def _exchange(self, payload: bytes) -> Reward | RewardFailure:
        assert self._writer is not None, "start() comes first"
        self._writer.write(frame(payload))
        await self._writer.drain()
        return msgspec.msgpack.decode(await self._receive(), type=Reward | RewardFailure)

    async def _receive(self) -> bytes:
        assert self._reader is not None, "start() comes first"
        (num_bytes,) = struct.unpack("<I", await self._reader.readexactly(4))
        return await self._reader.readexactly(num_bytes)

    def _autopsy(self) -> str:
        """How the process died, once it is reaped. SIGKILL is ours if it lived on with its channel closed."""
        assert self._process is not None, "start() comes first"
        status = self._process.returncode
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _spawn(channel: socket.socket, function: str) -> subprocess.Popen[bytes]:
    """A fresh interpreter, not a fork: this process may have threads and hold torch."""
    arguments = [str(channel.fileno()), str(os.getpid()), function]
    package_parent = str(Path(laminar.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "laminar.envs.reward_worker", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what user code prints goes to stderr, away from any display
        pass_fds=(channel.fileno(),),
        env={**os.environ, "PYTHONPATH": search_path},
        start_new_session=True,
    )
