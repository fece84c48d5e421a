"""Gives vLLM a folder for its sockets and rendezvous files, which it leaves behind when it is killed."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "laminar-vllm-"
LOCK_FILE = "lock"


class VllmFolder:
    """A folder of this process's own until close(). Those of processes that are gone are removed on the way.

    A lock tells them apart: the kernel gives it back with the process that held it, however that ended.
    """

    def __init__(self) -> None:
        remove_abandoned()
        # In one step with its lock it would be nicer; an empty folder without a lock is nobody's, and is left alone.
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> int:
    """Remove what processes that are gone left; returns how many folders that were."""
    num_removed = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
            num_removed += 1
        finally:
            os.close(lock)
    return num_removed
