"""Owns a run's folder: one run at a time writes there, and nothing that is there is overwritten."""

import fcntl
import os
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Self

LOCK_FILE = "lock"


class FolderLock:
    """Holds `run_dir` for this process; the kernel lets go of it however the process ends.

    resume: go on with the run that is there. fresh: move it aside first. Neither: the folder must hold no run.
    Raises ValueError, naming the way out, if the folder is in use or does not fit what is wanted.
    """

    def __init__(self, run_dir: Path, *, resume: bool, fresh: bool) -> None:
        if resume and not _holds_a_run(run_dir):
            raise ValueError(f"{run_dir} holds no run to resume; leave out --resume, or name its folder with run_dir=…")
        self._file = _lock(run_dir)
        if not _holds_a_run(run_dir) or resume:
            return
        self._file.close()
        if not fresh:
            raise ValueError(
                f"{run_dir} holds a run already: --resume goes on with it, --fresh moves it aside and starts anew, "
                "run_dir=… writes elsewhere"
            )
        moved = _move_aside(run_dir)
        print(f"The run that was in {run_dir} is now in {moved}.")
        self._file = _lock(run_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _holds_a_run(run_dir: Path) -> bool:
    return any((run_dir / "events").glob("*.jsonl"))


def _lock(run_dir: Path) -> TextIOWrapper:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / LOCK_FILE).open("a+")
    except OSError as error:
        raise ValueError(
            f"run_dir={run_dir} cannot be written to ({error.strerror}); name another folder with run_dir=…"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ValueError(
            f"{run_dir} is in use by process {owner}: wait for that run, stop it, or give this one another run_dir=…"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _move_aside(run_dir: Path) -> Path:
    number = 1
    while (moved := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    return run_dir.rename(moved)
