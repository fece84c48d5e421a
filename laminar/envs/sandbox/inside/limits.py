"""Names what one call may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of one call; whatever would take more is killed, or told by an exception of its own."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """Of each process, counted by the kernel in whole seconds."""
    memory_bytes: int = 512 * 2**20
    """Address space of each process, and resident memory of all together."""
    num_processes: int = 16
    """Processes and threads besides the first."""
    file_bytes: int = 64 * 2**20
    """All files that it leaves, and each of them."""
    num_files: int = 256
    output_bytes: int = 65536
    """Standard output and standard error, in the order in which they were written."""


@dataclass(frozen=True)
class Settings:
    """What a zygote is told once, before its first call."""

    limits: Limits
    work_folder: str | None
    """Where a child may write; none: a folder that the zygote makes below `temporary_folder`, and removes."""
    temporary_folder: str
    readable: tuple[str, ...]
    """With `landlock`: what a child may read and execute."""
    landlock: bool
    search_path: tuple[str, ...]
    """Folders to import from besides the standard library."""
    preloaded: tuple[str, ...]
    """Modules imported before the first call, so that none of them costs a call anything."""
    counts_tasks: bool
    """Whether others may run as the zygote's user: what runs already must then be added to the limit on processes."""


STATUSES = ("ok", "error", "timeout", "cpu", "memory", "files", "output", "killed")
"""error: it raised, or exited with another status than 0. killed: by a signal that was not ours."""
