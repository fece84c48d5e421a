"""Makes a process end with the one that started it, even after a `kill -9` and even while its own code hangs."""

import os
import signal
import sys


def die_with(parent_pid: int, farewell: str) -> None:
    """Have the kernel kill this process when its parent dies; exit with `farewell` if the parent is gone already.

    Linux only; elsewhere a process notices its parent's end when it next reads from it.
    """
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(farewell)
