"""Many quick publishes with readers at random moments: no torn or mixed read, flat memory, no descriptor left."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from laminar.config import RelayConfig
from laminar.relay.manifest import Probe
from laminar.relay.publish import Publisher
from tests.relay.relay_machines import DEADLINE_S, ROOT, TOKEN, RelayProcess, wait_until

NUM_PUBLISHES = 100
NUM_WORDS = 1 << 20


def start_reader(run_id: str, machine: int, seed: int) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("reader_process.py"))
    return subprocess.Popen(
        [sys.executable, script, run_id, str(machine), TOKEN.hex(), str(seed)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def footprint(pid: int) -> tuple[int, int]:
    """A process's own resident bytes and its open descriptors; segments are shared, and counted by number."""
    process = psutil.Process(pid)
    memory = process.memory_info()
    return memory.rss - memory.shared, process.num_fds()


def test_hundred_quick_publishes_are_never_torn_and_leave_nothing(
    start_machine: Callable[..., RelayProcess], run_id: str
):
    machines = [start_machine(0), start_machine(1)]
    machines[0].set_next(machines[1].address, 1)
    readers = [start_reader(run_id, seed % 2, seed) for seed in range(3)]
    publisher = Publisher(run_id, TOKEN, RelayConfig())
    publisher.set_master(machines[0].address, epoch=1)
    weights = torch.zeros(NUM_WORDS, dtype=torch.int32)
    footprints: dict[int, tuple[int, int]] = {}
    for version in range(1, NUM_PUBLISHES + 1):
        weights.fill_(version)
        publisher.hand_over(
            [("w", weights)], version=version, step=version, probe=Probe((), (), 1e-4), dtype=torch.float32
        )
        if version % 5 == 0:  # Bursts of five, so that some overtake others and some do not.
            machines[1].wait_complete(version)
        if version == NUM_PUBLISHES // 4:
            footprints = {machine.pid: footprint(machine.pid) for machine in machines}
            sender = publisher.sender_pid
            assert sender is not None
            footprints[sender] = footprint(sender)
    told = [json.loads(reader.communicate("", DEADLINE_S)[0]) for reader in readers]
    assert [one["torn"] for one in told] == [0, 0, 0]
    assert all(len(set(one["seen"])) >= 5 for one in told)
    assert all(one["seen"] == sorted(one["seen"]) for one in told)
    for machine in machines:
        wait_until("leases ended", lambda machine=machine: machine.status().num_leases == 0)
        assert machine.status().num_segments <= 5  # Four, and one while all are held at once.
        assert machine.told("UpstreamLost") + machine.told("NextLost") + machine.told("PeerRefused") == []
    for pid, (own_bytes, num_fds) in footprints.items():
        assert footprint(pid)[0] <= own_bytes * 1.05 + (1 << 20)
        assert footprint(pid)[1] <= num_fds + 3  # A reader's connection may have been open at the first look or this.
    publisher.close()
