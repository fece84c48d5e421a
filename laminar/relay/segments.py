"""Holds one weight version's bytes in host memory that the kernel frees with its last holder.

An anonymous file (memfd) has no name in any file system, so nothing is left after `kill -9`, and a container's small
/dev/shm does not matter. Its pages are allocated and mapped once: a copy into fresh pages runs at about 1 GB/s, into
warm ones at more than 10.
"""

import fcntl
import mmap
import os
from collections.abc import Callable

PAGE_BYTES = mmap.PAGESIZE
TOUCH_BYTES = 256 << 20
"""Pages are touched in steps of this much, so that other threads get their turn in between."""


class Segment:
    """Memory for one version; empty until `reserve`, then reused for one version after another.

    view: writable, `num_bytes` long, zero at first. reader_fd: the same memory, opened read-only, for other processes.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.reader_fd = -1
        self.is_tainted = False
        """Whether somebody else may still write here, so that it must hold no other version any more."""
        self.before_close: list[Callable[[], None]] = []
        """Called once, before the memory goes: whoever made it known elsewhere takes that back."""
        self.id = 0
        """The file's inode: what a reader that has it mapped already knows it by."""
        self._mapping: mmap.mmap | None = None
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        assert self._view is not None, "a segment has no memory before reserve() nor after close()"
        return self._view

    def reserve(self, num_bytes: int) -> None:
        """Make room for num_bytes, warm. Fresh memory is taken only if what is there is too small.

        Raises OSError, with the size in it, when the machine has not got that much.
        """
        if num_bytes <= self.num_bytes:
            return
        self.close()
        num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        fd = os.memfd_create("laminar-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                os.posix_fallocate(fd, 0, num_bytes)
            except OSError as error:
                raise OSError(error.errno, f"no host memory for a weight segment of {num_bytes} bytes") from error
            # A mapped file that shrinks kills its readers with SIGBUS; sealed, nobody can shrink it.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._mapping = mmap.mmap(fd, num_bytes)
            self.reader_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._view = memoryview(self._mapping)
        self.num_bytes, self.id = num_bytes, os.fstat(self.reader_fd).st_ino
        _touch(self._view)

    def close(self) -> None:
        """Give the memory back, or leave it to those who still hold it: other processes, views not yet dropped."""
        if self._mapping is None or self._view is None:
            return
        for take_back in self.before_close:
            take_back()
        self.before_close.clear()
        os.close(self.reader_fd)
        try:
            self._view.release()
            self._mapping.close()
        except BufferError:
            # Someone in this process still looks at the bytes; the mapping goes with their last reference.
            pass
        self.num_bytes, self.reader_fd, self._mapping, self._view = 0, -1, None, None


def map_read_only(fd: int, num_bytes: int) -> mmap.mmap:
    """Map a segment received from another process and populate the page table, so that reading it runs warm."""
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)


def _touch(view: memoryview) -> None:
    for start in range(0, len(view), TOUCH_BYTES):
        pages = view[start : start + TOUCH_BYTES : PAGE_BYTES]
        pages[:] = bytes(len(pages))
