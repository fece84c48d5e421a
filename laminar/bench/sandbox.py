"""Measures the sandbox on this machine: how long a call takes, how many a second, and whether anything is left behind.

Each backend that the machine has is measured by itself: calls one after the other, then `num_slots` at once. After
each, the processes, open files and work folders of this process are counted against those before it.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import psutil

from laminar.bench.output import show
from laminar.config import LocalSandboxConfig
from laminar.envs.sandbox.build import start_sandbox
from laminar.envs.sandbox.inside.zygote import FOLDER_PREFIX
from laminar.envs.sandbox.sandbox import Sandbox

BACKENDS: tuple[Literal["bubblewrap", "landlock"], ...] = ("bubblewrap", "landlock")
NUM_CALLS = 2000
NUM_IN_TURN = 200
"""Of the calls: those made one after the other, whose latency is measured."""
NUM_SLOTS = 2
END_DEADLINE_S = 10.0
"""For processes that were killed to be gone."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laminar bench sandbox", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a measurement")
    arguments = parser.parse_args(argv)
    for backend in BACKENDS:
        result = asyncio.run(measure(backend))
        show(result, as_json=arguments.json)
    return 0


async def measure(backend: Literal["bubblewrap", "landlock"]) -> dict[str, float | int | str]:
    """Latencies in ms. A backend that this machine lacks is reported with what it lacks."""
    config = LocalSandboxConfig(backend=backend, num_slots=NUM_SLOTS, num_queued_max=NUM_CALLS)
    before = _held()
    began_s = time.perf_counter()
    try:
        sandbox = await start_sandbox(config)
    except ValueError as error:
        return {"backend": backend, "lacks": str(error)}
    start_s = time.perf_counter() - began_s
    try:
        latencies_ms = sorted([await _latency_ms(sandbox, number) for number in range(NUM_IN_TURN)])
        began_s = time.perf_counter()
        await asyncio.gather(*(_latency_ms(sandbox, number) for number in range(NUM_IN_TURN, NUM_CALLS)))
        at_once_s = time.perf_counter() - began_s
    finally:
        await sandbox.close()
    left = await _left(before)
    return {
        "backend": backend,
        "start_and_self_test_s": round(start_s, 2),
        "latency_ms_p50": round(statistics.median(latencies_ms), 2),
        "latency_ms_p99": round(latencies_ms[int(0.99 * (len(latencies_ms) - 1))], 2),
        "num_slots": NUM_SLOTS,
        "calls_per_s": round((NUM_CALLS - NUM_IN_TURN) / at_once_s, 1),
        "num_calls": NUM_CALLS,
        **left,
    }


async def _latency_ms(sandbox: Sandbox, number: int) -> float:
    """Of a call that also writes a file, so that there is something to be left behind."""
    began_s = time.perf_counter()
    outcome = await sandbox.run(f"open('file', 'w').write('x')\n{number} + 1")
    assert outcome.output == f"{number + 1}\n", f"the sandbox answered {outcome}"
    return 1e3 * (time.perf_counter() - began_s)


def _held() -> dict[str, int]:
    return {
        "num_processes": len(psutil.Process().children(recursive=True)),
        "num_open_files": psutil.Process().num_fds(),
        "num_folders": len(list(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))),
    }


async def _left(before: dict[str, int]) -> dict[str, int]:
    """What there is more of than before, once the kernel has had time to clear up."""
    until_s = time.monotonic() + END_DEADLINE_S
    while True:
        left = {f"{name}_left": number - before[name] for name, number in _held().items()}
        if max(left.values()) <= 0 or time.monotonic() > until_s:
            return left
        await asyncio.sleep(0.05)
