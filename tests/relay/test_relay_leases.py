"""What a reader may rely on while it holds a version, and what a relay does with readers that stay or die."""

import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from laminar.config import RelayConfig
from laminar.control.messages import VersionEvicted
from laminar.relay.happenings import LeaseExpired
from laminar.relay.lease import RelayUnreachable, VersionGone, lease
from tests.relay.relay_machines import CHUNK_BYTES, DEADLINE_S, ROOT, TOKEN, LocalRelay, send_version, wait_until

NUM_BYTES = 4 * CHUNK_BYTES
StartRelay = Callable[..., LocalRelay]


def test_version_that_is_not_there_is_named_with_what_is(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    with pytest.raises(VersionGone, match="does not have a complete version; none is complete there"):
        lease(run_id, 0, TOKEN, None, 5.0).__enter__()
    for version in (3, 4):
        send_version(relay.address, run_id, version, NUM_BYTES)
    with pytest.raises(VersionGone, match="does not have version 2; complete there: 3, 4") as gone:
        lease(run_id, 0, TOKEN, 2, 5.0).__enter__()
    assert (gone.value.version, gone.value.available) == (2, (3, 4))


def test_retained_and_leased_versions_outlive_the_others(start_relay: StartRelay, run_id: str):
    relay = start_relay(config=RelayConfig(num_versions_kept=4))
    for version in (1, 2, 3, 4):
        send_version(relay.address, run_id, version, NUM_BYTES)
    relay.relay.retain([2])
    with lease(run_id, 0, TOKEN, 1, 5.0):
        for version in (5, 6, 7):
            send_version(relay.address, run_id, version, NUM_BYTES)
        wait_until("told of those that went", lambda: len(relay.told(VersionEvicted)) >= 3)
        assert [one.version for one in relay.told(VersionEvicted)] == [3, 4, 5]
        assert relay.relay.status().versions == (1, 2, 6, 7)
    wait_until("the lease ended", lambda: relay.relay.status().num_leases == 0)
    send_version(relay.address, run_id, 8, NUM_BYTES)
    assert relay.relay.status().versions == (2, 6, 7, 8)


def test_retained_version_goes_before_the_newest_and_is_told(start_relay: StartRelay, run_id: str):
    relay = start_relay(config=RelayConfig(num_versions_kept=3))
    relay.relay.retain([1, 2, 3])
    for version in (1, 2, 3, 4):
        send_version(relay.address, run_id, version, NUM_BYTES)
    relay.wait_told(VersionEvicted, version=1)
    assert relay.relay.status().versions == (2, 3, 4)


def test_all_versions_leased_takes_one_segment_more(start_relay: StartRelay, run_id: str):
    relay = start_relay(config=RelayConfig(num_versions_kept=3))
    leases = []
    for version in (1, 2, 3, 4):
        send_version(relay.address, run_id, version, NUM_BYTES)
        leases.append(lease(run_id, 0, TOKEN, version, 5.0))
        leases[-1].__enter__()
    status = relay.relay.status()
    assert (status.versions, status.num_overflows, status.num_segments) == ((1, 2, 3, 4), 1, 4)
    for one in leases:
        one.__exit__(None, None, None)


def test_expired_lease_is_told_and_its_reader_keeps_its_bytes(start_relay: StartRelay, run_id: str):
    relay = start_relay(config=RelayConfig(num_versions_kept=3, lease_deadline_s=0.2))
    data = send_version(relay.address, run_id, 1, NUM_BYTES)
    with lease(run_id, 0, TOKEN, 1, 5.0) as leased:
        assert 0.2 <= relay.wait_told(LeaseExpired, version=1).held_s < 5
        for version in range(2, 8):
            send_version(relay.address, run_id, version, NUM_BYTES)
        assert relay.relay.status().num_leases_expired == 1
        assert bytes(leased.data) == data
    wait_until("the reader left", lambda: relay.relay.status().num_leases_expired == 0)
    send_version(relay.address, run_id, 8, NUM_BYTES)
    assert relay.relay.status().versions == (6, 7, 8)
    assert len(relay.told(LeaseExpired)) == 1


HOLD = """
import sys
from laminar.relay.lease import lease
with lease(sys.argv[1], 0, bytes.fromhex(sys.argv[2]), None, 5.0) as leased:
    print(leased.manifest.version, flush=True)
    sys.stdin.read()
"""


def test_killed_reader_frees_its_version(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    send_version(relay.address, run_id, 1, NUM_BYTES)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, run_id, TOKEN.hex()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"1\n"
        assert relay.relay.status().num_leases == 1
        reader.send_signal(signal.SIGKILL)
        wait_until("the lease ended", lambda: relay.relay.status().num_leases == 0)


def test_leased_bytes_cannot_be_written(start_relay: StartRelay, run_id: str, monkeypatch: pytest.MonkeyPatch):
    relay = start_relay()
    send_version(relay.address, run_id, 1, NUM_BYTES)
    descriptors: list[int] = []

    def map_and_keep(fd: int, num_bytes: int) -> mmap.mmap:
        descriptors.append(os.dup(fd))
        return mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)

    monkeypatch.setattr("laminar.relay.lease.map_read_only", map_and_keep)
    with lease(run_id, 0, TOKEN, 1, 5.0) as leased:
        assert leased.data.readonly
        with pytest.raises(PermissionError):
            mmap.mmap(descriptors[0], NUM_BYTES)
        with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
            os.ftruncate(descriptors[0], 0)
    os.close(descriptors[0])


def test_view_that_outlives_its_lease_is_an_error(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    send_version(relay.address, run_id, 1, NUM_BYTES)
    kept = []
    with (
        pytest.raises(RuntimeError, match="version 1 is still viewed after its lease ended"),
        lease(run_id, 0, TOKEN, 1, 5.0) as leased,
    ):
        kept.append(np.frombuffer(leased.data, np.uint8))
    with pytest.raises(KeyError, match="the reader's own"), lease(run_id, 0, TOKEN, 1, 5.0) as leased:
        _fail_holding(np.frombuffer(leased.data, np.uint8))
    wait_until("the leases ended", lambda: relay.relay.status().num_leases == 0)


def _fail_holding(view: np.ndarray) -> None:
    raise KeyError("the reader's own error is not hidden", view[0])


def test_leases_leave_no_descriptors(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    send_version(relay.address, run_id, 1, NUM_BYTES)

    def num_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with lease(run_id, 0, TOKEN, 1, 5.0):
        pass
    wait_until("the lease ended", lambda: not relay.relay._peers)
    before = num_descriptors()
    for _ in range(50):
        with lease(run_id, 0, TOKEN, None, 5.0):
            pass
    wait_until("the leases ended", lambda: not relay.relay._peers)
    assert num_descriptors() == before


def test_hung_relay_is_unreachable_within_the_deadline(run_id: str, start_machine):
    machine = start_machine(0)
    send_version(machine.address, run_id, 1, NUM_BYTES)
    os.kill(machine.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RelayUnreachable, match="no byte of CHALLENGE"), lease(run_id, 0, TOKEN, None, 0.3):
            pass
    finally:
        os.kill(machine.pid, signal.SIGCONT)


def test_reader_waits_for_a_relay_that_is_only_starting(start_relay: StartRelay, run_id: str):
    threading.Timer(0.2, start_relay).start()
    with pytest.raises(VersionGone), lease(run_id, 0, TOKEN, None, DEADLINE_S):
        pass


def test_other_processes_of_a_reader_open_what_is_lent_by_its_path(start_relay: StartRelay, run_id: str):
    """As vLLM's workers do. When the lease has ended the path is gone, or leads elsewhere."""
    relay = start_relay()
    send_version(relay.address, run_id, 1, NUM_BYTES)
    read = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read(int(sys.argv[2])))"
    with lease(run_id, 0, TOKEN, 1, 5.0) as leased:
        command = [sys.executable, "-c", read, leased.path, str(NUM_BYTES)]
        done = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE_S)
        assert done.stdout == bytes(leased.data)
        inode = os.stat(leased.path).st_ino
    assert not Path(leased.path).exists() or os.stat(leased.path).st_ino != inode
