"""Talks to a process of a benchmark: orders go down its stdin as JSON lines, replies and news come up its stdout."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import laminar
from laminar.bench.machines import Machine

REPLY_DEADLINE_S = 60.0
"""Also for the first reply, which comes after the process has imported what it needs and taken its memory."""
EXIT_DEADLINE_S = 60.0


class Child:
    """A process that answers every order, in order, with {"reply": ...}; all else that it says is news.

    on_news is called from the thread that reads, with None when the process has ended.
    """

    def __init__(
        self,
        module: str,
        machine: Machine,
        start: dict[str, Any],
        on_news: Callable[[dict[str, Any] | None], None],
    ) -> None:
        root = str(Path(laminar.__file__).parents[1])
        self._name = f"{module} on machine {machine.index}"
        self._on_news = on_news
        self._ordering = threading.Lock()
        self._awaited: deque[Future[Any]] = deque()
        self._process = subprocess.Popen(
            [*machine.prefix, sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.started: Future[Any] = self.order(start)
        """Its first reply."""

    def order(self, order: dict[str, Any]) -> Future[Any]:
        """Send an order, without waiting; a process that is stopped or dead never answers it."""
        reply: Future[Any] = Future()
        assert self._process.stdin is not None
        with self._ordering:
            self._awaited.append(reply)
            try:
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()
            except OSError as error:
                reply.set_exception(ConnectionError(f"{self._name} takes no orders: {error}"))
        return reply

    def ask(self, order: dict[str, Any]) -> Any:
        """Raises TimeoutError, or ConnectionError if the process ended."""
        return self.order(order).result(REPLY_DEADLINE_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(EXIT_DEADLINE_S)

    def stop(self) -> None:
        """Freeze it, as a hang would."""
        os.kill(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Have it close and end, unless it was killed; raises if it does not do so by itself, with status 0."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                status = self._process.wait(EXIT_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise
            if status != 0:
                raise RuntimeError(f"{self._name} ended with {status}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "reply" in said:
                self._awaited.popleft().set_result(said["reply"])
            else:
                self._on_news(said)
        with self._ordering:
            for reply in self._awaited:
                if not reply.done():
                    reply.set_exception(ConnectionError(f"{self._name} has ended"))
        self._on_news(None)
