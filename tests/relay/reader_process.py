"""Is a replica, for the tests: leases the newest version at random moments and tells what it saw when told to stop."""

import json
import random
import sys
import threading
import time

import numpy as np

from laminar.relay.chunks import version_checksum
from laminar.relay.lease import VersionGone, lease


def main(run_id: str, machine: int, token: bytes, seed: int) -> None:
    draw = random.Random(seed)
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    seen: list[int] = []
    torn = 0
    while not stopped.is_set():
        try:
            with lease(run_id, machine, token, None, 10.0) as leased:
                words = np.frombuffer(leased.data, np.uint32)
                whole = bool((words[: len(words) // 2] == leased.manifest.version).all())
                time.sleep(draw.random() * 0.02)
                # The second half is read later, so a writer in between would show.
                whole &= bool((words[len(words) // 2 :] == leased.manifest.version).all())
                whole &= version_checksum(leased.data, leased.manifest.chunk_bytes) == leased.checksum
                del words
            seen.append(leased.manifest.version)
            torn += not whole
        except VersionGone:
            pass
        time.sleep(draw.random() * 0.01)
    sys.stdout.write(json.dumps({"seen": seen, "torn": torn}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), int(sys.argv[4]))
