"""Many publishes with readers at random moments: no torn or mixed read, flat memory, nothing left behind."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from laminar.bench.fleet import Fleet
from laminar.bench.machines import loopback
from laminar.config import RelayConfig
from laminar.relay.manifest import Probe
from laminar.relay.publish import Publisher
from tests.relay.relay_machines import DEADLINE_S, ROOT, TOKEN, RelayProcess, wait_until

StartMachine = Callable[..., RelayProcess]


def start_reader(run_id: str, machine: int, seed: int, *, stall: bool = False) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("reader_process.py"))
    return subprocess.Popen(
        [sys.executable, script, run_id, str(machine), TOKEN.hex(), str(seed), "stall" if stall else "load"],
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


def soak(start_machine: StartMachine, run_id: str, *, num_publishes: int, num_words: int, burst: int) -> None:
    machines = [start_machine(0), start_machine(1)]
    machines[0].set_next(machines[1].address, 1)
    readers = [start_reader(run_id, seed % 2, seed, stall=seed == 3) for seed in range(4)]
    publisher = Publisher(run_id, TOKEN, RelayConfig())
    publisher.set_master(machines[0].address, epoch=1)
    weights = torch.zeros(num_words, dtype=torch.int32)
    footprints: dict[int, tuple[int, int]] = {}
    for version in range(1, num_publishes + 1):
        weights.fill_(version)
        publisher.hand_over(
            [("w", weights)], version=version, step=version, probe=Probe((), (), 1e-4), dtype=torch.float32
        )
        if version % burst == 0:  # Some overtake others and some do not.
            machines[1].wait_complete(version)
        if version == num_publishes // 4:
            sender = publisher.sender_pid
            assert sender is not None
            footprints = {pid: footprint(pid) for pid in (*(machine.pid for machine in machines), sender)}
    told = [json.loads(reader.communicate("", DEADLINE_S)[0]) for reader in readers]
    assert [one["torn"] for one in told] == [0, 0, 0, 0]
    assert all(len(set(one["seen"])) >= 5 for one in told)
    assert all(one["seen"] == sorted(one["seen"]) for one in told)
    for machine in machines:
        wait_until("leases ended", lambda machine=machine: machine.status().num_leases == 0)
        assert machine.status().num_segments <= 6  # Four, and one more for each that is held while others are needed.
        assert machine.told("UpstreamLost") + machine.told("NextLost") + machine.told("PeerRefused") == []
    for pid, (own_bytes, num_fds) in footprints.items():
        assert footprint(pid)[0] <= own_bytes * 1.05 + (1 << 20)
        assert footprint(pid)[1] <= num_fds + 4  # A reader's connection may have been open at the first look or this.
    publisher.close()


def test_hundred_quick_publishes_are_never_torn_and_leave_nothing(start_machine: StartMachine, run_id: str):
    soak(start_machine, run_id, num_publishes=100, num_words=1 << 20, burst=5)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_hundred_publishes_of_64_mb_are_never_torn_and_leave_nothing(start_machine: StartMachine, run_id: str):
    soak(start_machine, run_id, num_publishes=500, num_words=16 << 20, burst=2)


def test_after_a_kill_of_everything_nothing_is_left():
    shared_memory = set(Path("/dev/shm").iterdir())
    fleet = Fleet(loopback(3), RelayConfig(), 8 << 20)
    fleet.publish(1)
    fleet.wait_complete(1, fleet.relays, DEADLINE_S)
    assert fleet.run_id in Path("/proc/net/unix").read_text()
    processes = [psutil.Process(child.pid) for child in (fleet.trainer, *fleet.relays.values())]
    senders = processes[0].children()
    assert senders
    addresses = list(fleet.addresses)
    for child in (fleet.trainer, *fleet.relays.values()):
        child.kill()
    wait_until("the sender's end", lambda: not any(sender.is_running() for sender in senders))
    fleet.close()
    assert fleet.run_id not in Path("/proc/net/unix").read_text()
    assert set(Path("/dev/shm").iterdir()) <= shared_memory
    for address in addresses:
        with socket.socket() as probe:
            assert probe.connect_ex(address) != 0
