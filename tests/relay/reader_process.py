"""Is a replica, for the tests: leases the newest version at random moments and tells what it saw when told to stop.

With `stall` it holds every lease until three newer versions have come, as a replica that loads slowly would.
"""

import json
import random
import sys
import threading
import time

import numpy as np

from laminar.relay.chunks import version_checksum
from laminar.relay.lease import Reader, VersionGone, lease
from laminar.relay.manifest import LeasedVersion

DEADLINE_S = 10.0
NUM_VERSIONS_STALLED = 3


class ReaderProcess:
    def __init__(self, run_id: str, machine: int, token: bytes, seed: int, stall: bool) -> None:
        self._place = run_id, machine, token
        self._reader = Reader(run_id, machine, token)
        self._draw = random.Random(seed)
        self._stall = stall
        self._stopped = threading.Event()
        self.seen: list[int] = []
        self.torn = 0
        threading.Thread(target=lambda: (sys.stdin.read(), self._stopped.set()), daemon=True).start()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                with self._reader.lease(None, DEADLINE_S) as leased:
                    self._look_at(leased)
            except VersionGone:
                pass
            self._stopped.wait(self._draw.random() * 0.01)
        self._reader.close()

    def _look_at(self, leased: LeasedVersion) -> None:
        version = leased.manifest.version
        words = np.frombuffer(leased.data, np.uint32)
        whole = bool((words[: len(words) // 2] == version).all())
        if self._stall:
            self._wait_for(version + NUM_VERSIONS_STALLED)
        else:
            self._stopped.wait(self._draw.random() * 0.02)
        # The second half is read later, so a writer in between would show.
        whole &= bool((words[len(words) // 2 :] == version).all())
        whole &= version_checksum(leased.data, leased.manifest.chunk_bytes) == leased.checksum
        self.seen.append(version)
        self.torn += not whole

    def _wait_for(self, version: int) -> None:
        while not self._stopped.is_set():
            with lease(*self._place, None, DEADLINE_S) as newest:
                if newest.manifest.version >= version:
                    return
            time.sleep(0.01)


if __name__ == "__main__":
    run_id, machine, token, seed, stall = sys.argv[1:]
    reader = ReaderProcess(run_id, int(machine), bytes.fromhex(token), int(seed), stall == "stall")
    reader.run()
    sys.stdout.write(json.dumps({"seen": reader.seen, "torn": reader.torn}))
