"""Leaves nothing behind: knows which processes belong to which run, and ends those whose run has died.

Every run keeps a file of its processes in a folder of the user's own. A run that ends well removes its file; after a
`kill -9` the next run finds the file, sees that its driver is gone, and ends what is left.
"""

import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil


class Process(msgspec.Struct, frozen=True):
    """A pid alone may have been given to another process since; with its start time it is unmistakable.

    started_ticks: since the machine's start, as the kernel counts. In seconds of the day it would change with the
    clock, and a running process would seem to be another one.
    """

    pid: int
    started_ticks: int


class Registered(msgspec.Struct):
    driver: Process
    ray_folder: str | None = None
    processes: list[Process] = []


class ProcessRegistry:
    """The file of one run. Written anew, whole, at every change."""

    def __init__(self, run_id: str) -> None:
        self._path = registry_folder() / f"{run_id}.json"
        self._registered = Registered(_process(os.getpid()))
        self._write()

    def add(self, pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            self._registered.processes.append(_process(pid))
            self._write()

    def add_descendants(self) -> None:
        """Everything that this process has started so far, Ray's own services among it."""
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self.pids():
                self.add(child.pid)

    def set_ray_folder(self, folder: Path) -> None:
        self._registered.ray_folder = str(folder)
        self._write()

    def pids(self) -> set[int]:
        return {process.pid for process in self._registered.processes}

    def close(self) -> None:
        """The run has ended and its processes with it."""
        end_leftovers(self._registered)
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(self._registered))
        partial.rename(self._path)


def registry_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"laminar-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to another user; remove it, or set TMPDIR to a folder of your own")
    return folder


def end_dead_runs() -> int:
    """End what runs whose driver is gone left behind; returns how many processes that were."""
    num_ended = 0
    for path in registry_folder().glob("*.json"):
        with suppress(FileNotFoundError, msgspec.DecodeError):
            registered = msgspec.json.decode(path.read_bytes(), type=Registered)
            if not _is_alive(registered.driver):
                num_ended += end_leftovers(registered)
                path.unlink(missing_ok=True)
    return num_ended


def end_leftovers(registered: Registered) -> int:
    num_ended = 0
    for process in registered.processes:
        if _is_alive(process):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                num_ended += 1
    if registered.ray_folder is not None:
        shutil.rmtree(registered.ray_folder, ignore_errors=True)
    return num_ended


def _process(pid: int) -> Process:
    """Raises psutil.NoSuchProcess; one that has ended and was not reaped yet counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    # After the program's name, which is in parentheses and may hold anything: state, parent, …, start time (22nd).
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        raise psutil.NoSuchProcess(pid)
    return Process(pid, int(fields[19]))


def _is_alive(process: Process) -> bool:
    try:
        return _process(process.pid) == process
    except psutil.NoSuchProcess:
        return False
