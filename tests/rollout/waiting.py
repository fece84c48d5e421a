"""Waits in the tests: each has a deadline and says what it waited for."""

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 60.0


def wait_until(what: str, reached: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < until, f"{what}: not within {DEADLINE_S:g} s"
        time.sleep(0.002)


async def reach(what: str, reached: Callable[[], object]) -> None:
    """The same in an event loop, which goes on meanwhile."""
    until = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < until, f"{what}: not within {DEADLINE_S:g} s"
        await asyncio.sleep(0.001)
