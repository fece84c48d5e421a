"""Lends each slot a user of its own where that is possible: as root."""

from __future__ import annotations

import errno
import os
import random
import socket

FIRST_USER, NUM_USERS = 200_001, 60_000
"""Nobody's, on a system that was not set up for so many."""
NUM_TRIES = 1000


class SlotUser:
    """A user id that no other slot on this machine has, for as long as this object is not closed.

    The kernel counts processes by user and ignores the limit for root, so slots that shared one would starve each
    other. A bound socket name is the lock: it is released even by a `kill -9`.
    """

    def __init__(self) -> None:
        for number in random.sample(range(FIRST_USER, FIRST_USER + NUM_USERS), NUM_TRIES):
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                lock.bind(f"\0laminar-sandbox-user-{number}")
            except OSError as error:
                lock.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                self.number = number
                self._lock = lock
                return
        raise RuntimeError(f"{NUM_TRIES} user ids from {FIRST_USER} on are all taken by other sandboxes")

    def close(self) -> None:
        self._lock.close()


def slot_user() -> SlotUser | None:
    """None if we are not root: the code then runs as our own user."""
    return SlotUser() if os.getuid() == 0 else None
