"""Watches what the kernel's limits do not: memory of all processes of a call together, and all its files together."""

from __future__ import annotations

import os
from collections.abc import Iterator

from laminar.envs.sandbox.inside.limits import Limits

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def excess(limits: Limits, work_folder: str) -> str | None:
    """Which of the two is exceeded by this process's descendants, as a status; none if neither is."""
    memory_bytes = sum(_memory_bytes(pid) for pid in _descendants(os.getpid()))
    if memory_bytes > limits.memory_bytes:
        return "memory"
    num_files = file_bytes = 0
    for size in _sizes(work_folder):
        num_files, file_bytes = num_files + 1, file_bytes + size
        if num_files > limits.num_files or file_bytes > limits.file_bytes:
            return "files"
    return None


def num_tasks_of_user() -> int:
    """Processes and threads of this process's user, as far as they are visible here."""
    user, num_tasks = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user or os.stat(f"/proc/{name}/task").st_uid == user:
                    num_tasks += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue  # it has ended
    return num_tasks


def _descendants(pid: int) -> Iterator[int]:
    """Those whose parents died are found too, since the zygote adopts them."""
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children = [int(word) for word in file.read().split()]
            for child in children:
                yield child
                yield from _descendants(child)
    except OSError:
        return  # it has ended


def _memory_bytes(pid: int) -> int:
    """Resident and its own."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * _PAGE_BYTES


def _sizes(folder: str) -> Iterator[int]:
    """Of all files and folders below."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry.stat(follow_symlinks=False).st_size
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(entry.path)
    except (OSError, RecursionError):
        return
