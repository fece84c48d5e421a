"""Chains of relays in real processes: delivery, resuming, overtaking, and memory that stays flat."""

import os
import signal
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest

from laminar.config import RelayConfig
from laminar.relay.chunks import version_checksum
from laminar.relay.happenings import NextLost
from laminar.relay.lease import lease
from laminar.relay.links import LinkError, LinkRefused
from tests.relay.relay_machines import (
    CHUNK_BYTES,
    TOKEN,
    GatedSource,
    InBackground,
    LocalRelay,
    RelayProcess,
    manifest_of,
    pattern_of,
    send,
    send_version,
    wait_until,
)

NUM_BYTES = 40 * CHUNK_BYTES + 8  # The last chunk is a short one.
StartMachine = Callable[..., RelayProcess]


def chain(start_machine: StartMachine, num_relays: int, epoch: int = 1) -> list[RelayProcess]:
    machines = [start_machine(machine) for machine in range(num_relays)]
    for before, after in pairwise(machines):
        before.set_next(after.address, epoch)
    return machines


def assert_holds(run_id: str, machine: int, version: int | None, data: bytes) -> None:
    with lease(run_id, machine, TOKEN, version, 5.0) as leased:
        assert bytes(leased.data) == data
        assert leased.checksum == version_checksum(leased.data, leased.manifest.chunk_bytes)


@pytest.mark.parametrize("num_relays", [2, 3])
def test_every_machine_of_a_chain_gets_every_byte(start_machine: StartMachine, run_id: str, num_relays: int):
    machines = chain(start_machine, num_relays)
    for version in (1, 2):
        data = send_version(machines[0].address, run_id, version, NUM_BYTES)
        for machine in machines:
            machine.wait_complete(version)
            assert_holds(run_id, machine.machine, version, data)
            assert_holds(run_id, machine.machine, None, data)


def test_chunks_are_forwarded_while_later_ones_are_still_to_come(start_machine: StartMachine, run_id: str):
    machines = chain(start_machine, 3)
    source = GatedSource(manifest_of(1, NUM_BYTES), pattern_of(1, NUM_BYTES), gate=25)
    sending = InBackground(lambda: send(machines[0].address, run_id, source))
    wait_until("25 chunks at the tail", lambda: machines[2].status().incoming_bytes == 25 * CHUNK_BYTES)
    assert machines[2].status().versions == ()
    source.opened.set()
    assert sending.outcome() is None
    machines[2].wait_complete(1)
    assert_holds(run_id, 2, 1, pattern_of(1, NUM_BYTES))


def test_chain_rebuilt_past_a_killed_relay_resumes_at_the_first_missing_chunk(start_machine: StartMachine, run_id: str):
    machines = chain(start_machine, 3)
    source = GatedSource(manifest_of(1, NUM_BYTES), pattern_of(1, NUM_BYTES), gate=25)
    sending = InBackground(lambda: send(machines[0].address, run_id, source))
    wait_until("25 chunks at the tail", lambda: machines[2].status().incoming_bytes == 25 * CHUNK_BYTES)
    machines[1].kill()
    assert machines[2].wait_told("UpstreamLost", version=1)["num_bytes"] == 25 * CHUNK_BYTES
    machines[0].set_next(machines[2].address, 2)
    # Nothing new can have come: so it starts where the tail stopped, not at the beginning.
    wait_until("resumed", lambda: machines[0].status().sending_bytes == 25 * CHUNK_BYTES)
    assert machines[2].status().incoming_bytes == 25 * CHUNK_BYTES
    source.opened.set()
    assert sending.outcome() is None
    machines[2].wait_complete(1)
    assert_holds(run_id, 2, 1, pattern_of(1, NUM_BYTES))


def test_hung_relay_is_told_and_passed_by_and_does_no_harm_when_it_wakes(
    start_machine: StartMachine, start_relay: Callable[..., LocalRelay], run_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("laminar.relay.stream.SEND_STALL_S", 0.3)
    num_bytes = 1024 * CHUNK_BYTES  # More than the sockets in between can hold.
    first, middle, last = start_relay(0), start_machine(1), start_machine(2)
    first.relay.set_next(middle.address, 1)
    middle.set_next(last.address, 1)
    data = pattern_of(1, num_bytes)
    source = GatedSource(manifest_of(1, num_bytes), data, gate=25)
    sending = InBackground(lambda: send(first.address, run_id, source))
    wait_until("25 chunks at the tail", lambda: last.status().incoming_bytes == 25 * CHUNK_BYTES)
    os.kill(middle.pid, signal.SIGSTOP)
    source.opened.set()
    assert "took no byte of CHUNK for 0.3 s" in first.wait_told(NextLost, address=middle.address).cause
    assert sending.outcome() is None
    first.relay.set_next(last.address, 2)
    last.wait_complete(1)
    os.kill(middle.pid, signal.SIGCONT)
    # It still believes that it feeds the last one; what it says there is refused or changes nothing.
    later = send_version(first.address, run_id, 2, NUM_BYTES, epoch=2)
    last.wait_complete(2)
    assert_holds(run_id, 2, 1, data)
    assert_holds(run_id, 2, 2, later)


def test_sender_resumes_at_a_new_master(start_machine: StartMachine, run_id: str):
    machines = chain(start_machine, 2)
    data = pattern_of(1, NUM_BYTES)
    source = GatedSource(manifest_of(1, NUM_BYTES), data, gate=25)
    sending = InBackground(lambda: send(machines[0].address, run_id, source))
    wait_until("25 chunks at the tail", lambda: machines[1].status().incoming_bytes == 25 * CHUNK_BYTES)
    machines[0].kill()
    source.opened.set()
    assert isinstance(sending.outcome(), OSError)
    send(machines[1].address, run_id, GatedSource(manifest_of(1, NUM_BYTES), data), epoch=2)
    assert_holds(run_id, 1, 1, data)


def test_newer_version_overtakes_one_that_is_still_arriving(start_machine: StartMachine, run_id: str):
    machines = chain(start_machine, 2)
    source = GatedSource(manifest_of(1, NUM_BYTES), pattern_of(1, NUM_BYTES), gate=25)
    older = InBackground(lambda: send(machines[0].address, run_id, source))
    wait_until("25 chunks at the tail", lambda: machines[1].status().incoming_bytes == 25 * CHUNK_BYTES)
    data = send_version(machines[0].address, run_id, 2, NUM_BYTES)
    source.opened.set()
    assert isinstance(older.outcome(), OSError)
    for machine in machines:
        machine.wait_complete(2)
        assert machine.status().versions == (2,)
        assert_holds(run_id, machine.machine, None, data)


def test_older_or_equal_version_is_refused_by_name(start_machine: StartMachine, run_id: str):
    (machine,) = chain(start_machine, 1)
    send_version(machine.address, run_id, 5, NUM_BYTES)
    for version in (4, 5):
        with pytest.raises(LinkRefused, match=f"version {version} is not newer than version 5, complete"):
            send_version(machine.address, run_id, version, NUM_BYTES)


def test_predecessor_that_the_chain_left_behind_is_refused(start_machine: StartMachine, run_id: str):
    (machine,) = chain(start_machine, 1)
    send_version(machine.address, run_id, 1, NUM_BYTES, epoch=3)
    with pytest.raises(LinkRefused, match="chain epoch 2 is over; it is 3"):
        send_version(machine.address, run_id, 2, NUM_BYTES, epoch=2)


def test_order_to_forward_that_comes_late_changes_nothing(start_machine: StartMachine, run_id: str):
    first, second, third = (start_machine(machine) for machine in range(3))
    first.set_next(second.address, 2)
    first.set_next(third.address, 1)
    send_version(first.address, run_id, 1, NUM_BYTES)
    second.wait_complete(1)
    assert third.happenings == []


def test_late_joiner_catches_up_with_the_newest(start_machine: StartMachine, run_id: str):
    (first,) = chain(start_machine, 1)
    for version in (1, 2):
        data = send_version(first.address, run_id, version, NUM_BYTES)
    late = start_machine(7)
    first.set_next(late.address, 2)
    late.wait_complete(2)
    assert_holds(run_id, 7, None, data)
    assert late.status().versions == (2,)


def test_lost_next_is_told_once_and_served_when_it_is_back(start_machine: StartMachine, run_id: str):
    first, second = chain(start_machine, 2)
    address = second.address
    second.kill()
    data = send_version(first.address, run_id, 1, NUM_BYTES)
    assert tuple(first.wait_told("NextLost")["address"]) == address
    back = start_machine(1, RelayConfig(port=address[1]))
    back.wait_complete(1)
    assert_holds(run_id, 1, None, data)
    assert len(first.told("NextLost")) == 1


def test_two_weights_under_one_version_are_never_mixed(start_machine: StartMachine, run_id: str):
    """A trainer that died in mid-publish and was resumed may use the number again, for other weights."""
    machines = chain(start_machine, 2)
    source = GatedSource(manifest_of(1, NUM_BYTES), pattern_of(1, NUM_BYTES), gate=25)
    first = InBackground(lambda: send(machines[0].address, run_id, source))
    wait_until("25 chunks at the tail", lambda: machines[1].status().incoming_bytes == 25 * CHUNK_BYTES)
    other = pattern_of(77, NUM_BYTES)
    with pytest.raises(LinkError, match="does not match its checksum"):
        send(machines[0].address, run_id, GatedSource(manifest_of(1, NUM_BYTES), other))
    source.opened.set()
    assert isinstance(first.outcome(), OSError)
    assert machines[0].status().versions == ()
    send(machines[0].address, run_id, GatedSource(manifest_of(1, NUM_BYTES), other))
    for machine in machines:
        machine.wait_complete(1)
        assert_holds(run_id, machine.machine, 1, other)


def test_reader_keeps_its_version_while_many_newer_ones_arrive(start_machine: StartMachine, run_id: str):
    (machine,) = chain(start_machine, 1)
    data = send_version(machine.address, run_id, 1, NUM_BYTES)
    with lease(run_id, 0, TOKEN, 1, 5.0) as leased:
        half = bytes(leased.data[: NUM_BYTES // 2])
        for version in range(2, 12):
            send_version(machine.address, run_id, version, NUM_BYTES)
        assert half + bytes(leased.data[NUM_BYTES // 2 :]) == data
        assert machine.status().versions == (1, 9, 10, 11)
    machine.wait_told("VersionEvicted", version=8)
    assert {one["version"] for one in machine.told("VersionEvicted")} == set(range(2, 9))


def test_chain_without_upstream_or_orders_waits_quietly(start_machine: StartMachine):
    machines = chain(start_machine, 2)
    threading.Event().wait(0.3)
    assert [machine.happenings for machine in machines] == [[], []]
