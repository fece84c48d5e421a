"""A machine is lost in mid-broadcast: every survivor ends with the whole version, and nobody waits for ever.

Real processes on emulated machines, control's own rules. How long it takes is measured by `laminar bench relay`.
"""

import time
from collections.abc import Iterator

import pytest

from laminar.bench.fleet import Fleet
from laminar.bench.machines import NotPermitted, Switch, emulated
from laminar.bench.relay_faults import lose
from laminar.config import RelayConfig

NUM_RELAYS = 4
MBIT_PER_S = 100
PAYLOAD_BYTES = 8 << 20
CONFIG = RelayConfig(chunk_bytes=1 << 17)
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def switch() -> Iterator[Switch]:
    try:
        with emulated(NUM_RELAYS + 1, MBIT_PER_S) as switch:
            yield switch
    except NotPermitted as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")


@pytest.fixture
def fleet(switch: Switch) -> Iterator[Fleet]:
    """Every machine has version 1, and its memory."""
    fleet = Fleet(switch.machines, CONFIG, PAYLOAD_BYTES)
    fleet.publish(1)
    fleet.wait_complete(1, fleet.relays, DEADLINE_S)
    yield fleet
    fleet.close()


def assert_whole(fleet: Fleet, machines: list[int], version: int) -> None:
    held = [fleet.relays[machine].ask({"verify": None}) for machine in machines]
    assert [one["version"] for one in held] == [version] * len(machines)
    assert all(one["whole"] for one in held)
    assert len({one["checksum"] for one in held}) == 1


@pytest.mark.parametrize("lost", [1, 2, 4], ids=["master", "middle", "last"])
@pytest.mark.parametrize("kind", ["kill", "stop", "cut"])
def test_every_survivor_gets_the_version(fleet: Fleet, switch: Switch, kind: str, lost: int):
    survivors = [machine for machine in fleet.relays if machine != lost]
    fleet.publish(2)
    fleet.wait_bytes(lost, 2, PAYLOAD_BYTES // 4, DEADLINE_S)
    try:
        lose(fleet, switch, kind, lost)
        fleet.wait_complete(2, survivors, DEADLINE_S)
        assert_whole(fleet, survivors, 2)
        if kind == "kill":
            assert sorted(fleet.chain) == survivors
        elif lost != NUM_RELAYS:
            assert fleet.chain[-1] == lost, "nobody waits for it"
        # And the next one too, by the chain as it is now.
        fleet.publish(3)
        fleet.wait_complete(3, survivors, DEADLINE_S)
    finally:
        switch.mend(lost)
        if kind == "stop":
            fleet.relays[lost].wake()
    if kind != "kill":
        # It was only slow, or cut off: it catches up from where it is, at the end of the chain.
        fleet.wait_complete(3, [lost], DEADLINE_S)
        assert_whole(fleet, list(fleet.relays), 3)


def test_a_trainer_killed_in_mid_publish_leaves_the_last_whole_version_everywhere(fleet: Fleet):
    fleet.publish(2)
    fleet.wait_bytes(1, 2, PAYLOAD_BYTES // 4, DEADLINE_S)
    fleet.trainer.kill()
    time.sleep(0.5)  # What had left it may still arrive.
    assert_whole(fleet, list(fleet.relays), 1)
    # The one that takes its place publishes under a new number, over what is left of the old one.
    fleet.restart_trainer()
    fleet.publish(3)
    fleet.wait_complete(3, fleet.relays, DEADLINE_S)
    assert_whole(fleet, list(fleet.relays), 3)


def test_two_publishes_in_quick_succession_end_with_the_newest_everywhere(fleet: Fleet):
    for version in (2, 3):
        fleet.publish(version)
    fleet.wait_complete(3, fleet.relays, DEADLINE_S)
    assert_whole(fleet, list(fleet.relays), 3)
