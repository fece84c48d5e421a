"""Saves checkpoints and is killed, kill -9, at a moment given in advance; the test starts it as a process.

    python dies_while_saving.py ROOT STEP TEXT MOMENT

Moments are counted in audit events (every open, rename, mkdir, remove; and one after each piece that is written), so
that trying moment 0, 1, 2, … until the process survives tries them all.
"""

import os
import signal
import sys
from pathlib import Path

from laminar.train.checkpoint import save_complete

NUM_PIECES = 3


def main(root: Path, step: int, text: str, moment: int) -> None:
    num_seen = 0

    def die_at_moment(event: str, _arguments: object) -> None:
        nonlocal num_seen
        if event.startswith(("open", "os.", "shutil.", "test.")):
            num_seen += 1  # before the kill, which is an event too
            if num_seen == moment + 1:
                os.kill(os.getpid(), signal.SIGKILL)

    def write(folder: Path) -> None:
        (folder / "nested").mkdir()
        for file in (folder / "some.bin", folder / "nested" / "more.bin"):
            with file.open("w", buffering=1) as opened:
                for _ in range(NUM_PIECES):
                    opened.write(text + "\n")
                    sys.audit("test.written")

    sys.addaudithook(die_at_moment)
    save_complete(root, step, write)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
