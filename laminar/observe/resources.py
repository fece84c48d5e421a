"""Samples how much memory a run's processes hold together: the summed PSS of their trees."""

import threading
from collections.abc import Iterable
from pathlib import Path

import psutil

SAMPLE_INTERVAL_S = 1.0
STOP_DEADLINE_S = 5.0


class MemorySampler:
    """A thread that samples once a second until stop().

    PSS counts a page that n processes share as 1/n in each, so the sum over a tree is what the tree really holds. A
    process that ends, or belongs to someone else, counts as nothing.
    """

    def __init__(self, root_pids: Iterable[int], *, interval_s: float = SAMPLE_INTERVAL_S) -> None:
        self.peak_pss_bytes = 0
        self._root_pids = tuple(root_pids)
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laminar-memory-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the thread, take a last sample, return the peak.

        Where the machine is so busy that the thread is still at its sample after STOP_DEADLINE_S, the last one is left
        out: no run fails over it, and the thread ends with the process.
        """
        self._stopping.set()
        self._thread.join(STOP_DEADLINE_S)
        if not self._thread.is_alive():
            self._sample()
        return self.peak_pss_bytes

    def _run(self) -> None:
        self._sample()
        while not self._stopping.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        self.peak_pss_bytes = max(self.peak_pss_bytes, tree_pss_bytes(self._root_pids))


def tree_pss_bytes(root_pids: Iterable[int]) -> int:
    """Summed PSS of these processes and all that descend from them, each once."""
    pids: dict[int, None] = {}
    children = _children()
    queue = list(root_pids)
    while queue:
        pid = queue.pop()
        if pid not in pids:
            pids[pid] = None
            queue += children.get(pid, [])
    return sum(map(_pss_bytes, pids))


def _children() -> dict[int, list[int]]:
    """One pass over all processes: psutil's own walk down a tree makes one pass a root."""
    children: dict[int, list[int]] = {}
    for pid in psutil.pids():
        try:
            # The command, in brackets, may hold spaces and brackets; the parent's pid is the second field after it.
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(pid)
    return children


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
