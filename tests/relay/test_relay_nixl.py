"""The same chain, resuming and refusals when NIXL carries the chunks, over TCP; skipped where it is not installed."""

import importlib.util
from collections.abc import Callable
from itertools import pairwise

import pytest

from laminar.config import RelayConfig
from laminar.relay.transports import build_transport
from tests.relay.relay_machines import (
    CHUNK_BYTES,
    GatedSource,
    InBackground,
    RelayProcess,
    manifest_of,
    pattern_of,
    send,
    wait_until,
)
from tests.relay.test_relay_chain import assert_holds

is_installed = importlib.util.find_spec("nixl_cu12") is not None
needs_nixl = pytest.mark.skipif(not is_installed, reason="nixl-cu12 is not installed (extra `rdma`)")
NUM_BYTES = 40 * CHUNK_BYTES + 8
CONFIG = RelayConfig(transport="nixl")


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")


@pytest.fixture
def start_chain(over_tcp: None, start_machine: Callable[..., RelayProcess]) -> Callable[[int], list[RelayProcess]]:
    def start(num_relays: int) -> list[RelayProcess]:
        machines = [start_machine(machine, CONFIG) for machine in range(num_relays)]
        for before, after in pairwise(machines):
            before.set_next(after.address, 1)
        return machines

    return start


@needs_nixl
def test_every_machine_gets_every_byte(start_chain: Callable[[int], list[RelayProcess]], run_id: str):
    machines, transport = start_chain(3), build_transport("nixl")
    for version in (1, 2, 3, 4, 5, 6):
        data = pattern_of(version, NUM_BYTES)
        send(machines[0].address, run_id, GatedSource(manifest_of(version, NUM_BYTES), data), transport=transport)
        for machine in machines:
            machine.wait_complete(version)
            assert_holds(run_id, machine.machine, version, data)


@needs_nixl
def test_chain_past_a_killed_relay_resumes_at_the_first_missing_chunk(
    start_chain: Callable[[int], list[RelayProcess]], run_id: str
):
    machines, transport = start_chain(3), build_transport("nixl")
    source = GatedSource(manifest_of(1, NUM_BYTES), pattern_of(1, NUM_BYTES), gate=25)
    sending = InBackground(lambda: send(machines[0].address, run_id, source, transport=transport))
    wait_until("chunks at the tail", lambda: machines[2].status().incoming_bytes > 8 * CHUNK_BYTES)
    machines[1].kill()
    machines[2].wait_told("UpstreamLost", version=1)
    machines[0].set_next(machines[2].address, 2)
    source.opened.set()
    assert sending.outcome() is None
    machines[2].wait_complete(1)
    assert_holds(run_id, 2, 1, pattern_of(1, NUM_BYTES))


@needs_nixl
def test_a_version_cut_off_in_the_middle_leaves_its_memory_to_nobody_else(
    start_chain: Callable[[int], list[RelayProcess]], run_id: str
):
    """The peer that was given up might write there later."""
    (machine,), transport = start_chain(1), build_transport("nixl")
    source = GatedSource(manifest_of(1, NUM_BYTES), pattern_of(1, NUM_BYTES), gate=25)
    older = InBackground(lambda: send(machine.address, run_id, source, transport=transport))
    wait_until("chunks", lambda: machine.status().incoming_bytes > 8 * CHUNK_BYTES)
    for version in (2, 3, 4):
        data = pattern_of(version, NUM_BYTES)
        send(machine.address, run_id, GatedSource(manifest_of(version, NUM_BYTES), data), transport=transport)
        assert_holds(run_id, 0, version, data)
    source.opened.set()
    assert isinstance(older.outcome(), OSError)
    assert machine.status().num_segments == 4
    assert machine.status().versions == (2, 3, 4)


@needs_nixl
def test_a_sender_by_sockets_is_refused_by_name(start_chain: Callable[[int], list[RelayProcess]], run_id: str):
    (machine,) = start_chain(1)
    with pytest.raises(OSError):  # noqa: PT011 - the relay hangs up; why is in its own words
        send(machine.address, run_id, GatedSource(manifest_of(1, NUM_BYTES), pattern_of(1, NUM_BYTES)))
    assert "set relay.transport alike everywhere" in machine.wait_told("PeerRefused")["cause"]


@pytest.mark.skipif(is_installed, reason="nixl-cu12 is installed")
def test_without_the_extra_the_setting_is_refused_by_name():
    with pytest.raises(ValueError, match=r"relay.transport=nixl needs the extra `rdma`"):
        build_transport("nixl")
