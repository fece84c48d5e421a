"""Measures what a lost machine costs a broadcast: killed, hung or cut off in mid-flight, at each place of the chain."""

from laminar.bench.fleet import Fleet
from laminar.bench.machines import Machine, Switch
from laminar.config import RelayConfig

DEADLINE_S = 60.0
KINDS = ("kill", "stop", "cut")


def places(num_relays: int) -> dict[str, int]:
    """The machines to lose, by their place in the chain."""
    return {"master": 1, "middle": 1 + num_relays // 2, "last": num_relays}


def undisturbed_s(machines: list[Machine], config: RelayConfig, payload_bytes: int) -> float:
    """From the hand-over to the last machine, the second time: nothing is allocated any more."""
    fleet = Fleet(machines, config, payload_bytes)
    try:
        _publish_everywhere(fleet, 1)
        return _publish_everywhere(fleet, 2)
    finally:
        fleet.close()


def disturbed_s(
    machines: list[Machine], switch: Switch, config: RelayConfig, payload_bytes: int, kind: str, lost: int
) -> tuple[float, int]:
    """The same with one machine lost when it has a third; also the number of survivors whose bytes were verified."""
    fleet = Fleet(machines, config, payload_bytes)
    try:
        _publish_everywhere(fleet, 1)
        handed_over = fleet.publish(2)
        fleet.wait_bytes(lost, 2, payload_bytes // 3, DEADLINE_S)
        lose(fleet, switch, kind, lost)
        survivors = [machine for machine in fleet.relays if machine != lost]
        ended_s = fleet.wait_complete(2, survivors, DEADLINE_S)
        held = [fleet.relays[machine].ask({"verify": 2}) for machine in survivors]
        return ended_s - handed_over.at_s, sum(one["whole"] for one in held)
    finally:
        switch.mend(lost)
        if kind == "stop":
            fleet.relays[lost].wake()
        fleet.close()


def lose(fleet: Fleet, switch: Switch, kind: str, machine: int) -> None:
    match kind:
        case "kill":
            fleet.relays[machine].kill()
        case "stop":
            fleet.relays[machine].stop()
        case "cut":
            switch.cut(machine)
        case _:
            raise ValueError(f"no such fault: {kind}")


def _publish_everywhere(fleet: Fleet, version: int) -> float:
    handed_over = fleet.publish(version)
    return fleet.wait_complete(version, fleet.relays, DEADLINE_S) - handed_over.at_s
