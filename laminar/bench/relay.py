"""Measures the relay tier: hand-over, chain, load and faults, beside plain copies and other ways to broadcast.

    laminar bench relay --json                          everything; about six minutes
    python -m laminar.bench.relay --only chain,load     some of it

One object a measurement. `seconds` is from the hand-over to the last machine (load: from the lease to the last tensor;
stall: what the trainer waits), `one_copy_s` a plain copy of the same bytes, measured beside it over the same link (load
and stall: in memory). Links: loopback; emulated_<n>mbit, network namespaces with the kernel's rate limit; where those
are not permitted paced_<n>mbit, loopback paced by the sender.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from laminar.bench import relay_faults
from laminar.bench.emulated_transport import Emulation
from laminar.bench.fleet import Fleet
from laminar.bench.machines import Machine, NotPermitted, emulated, loopback
from laminar.bench.relay_load import load_s
from laminar.bench.rivals import gloo_s, raw_socket_s, ray_s, sequential_s
from laminar.config import RelayConfig

SECTIONS = ("loopback", "chain", "formula", "stall", "load", "faults")
PAYLOAD_BYTES = 64 << 20
SMALL_PAYLOAD_BYTES = 16 << 20
"""At 100 Mbit/s, so that ten publishes take seconds."""
NUM_ROUNDS = 5
CHUNK_COST_S = 5e-5
"""What a chunk costs a relay beside its bytes: system calls, the interpreter."""
STARTUP_S = 0.02
DEADLINE_S = 120.0
CHAINS = ((2, 1000), (4, 1000), (8, 1000), (16, 400))


class Measurement(msgspec.Struct, omit_defaults=True):
    link: str
    num_relays: int
    method: str
    payload_bytes: int
    seconds: float
    one_copy_s: float
    ratio_to_one_copy: float
    expected_s: float | None = None
    """What the formula of the paper's appendix D gives."""
    fault: str | None = None
    """What happened to which relay in mid-broadcast."""
    extra_s: float | None = None
    """Beyond an undisturbed broadcast."""
    load_average: float | None = None
    """Of this machine's last minute: how many others wanted its cores."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laminar bench relay", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a measurement")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}")
    arguments = parser.parse_args(argv)
    for section in arguments.only.split(","):
        for measurement in _section(section):
            print(_json(measurement) if arguments.json else _line(measurement), flush=True)
    return 0


def _section(name: str) -> Iterator[Measurement]:
    match name:
        case "loopback":
            yield from _on_loopback()
        case "chain":
            for num_relays, mbit_per_s in CHAINS:
                yield from _chains(num_relays, mbit_per_s)
        case "formula":
            yield from _formula()
        case "stall":
            yield from _stalls()
        case "load":
            for method, seconds, one_copy_s in load_s(4 * PAYLOAD_BYTES):
                yield _measured("memory", 1, method, 4 * PAYLOAD_BYTES, seconds, one_copy_s)
        case "faults":
            yield from _faults()
        case _:
            raise ValueError(f"--only={name}: choose from {', '.join(SECTIONS)}")


def _on_loopback() -> Iterator[Measurement]:
    for num_relays in (1, 2, 4):
        machines = loopback(num_relays + 1)
        payload_bytes = 4 * PAYLOAD_BYTES if num_relays == 1 else PAYLOAD_BYTES
        one_copy_s = raw_socket_s(machines, payload_bytes)
        yield _measured("loopback", num_relays, "raw_socket", payload_bytes, one_copy_s, one_copy_s)
        seconds = chain_s(machines, RelayConfig(), payload_bytes)
        yield _measured("loopback", num_relays, "chain", payload_bytes, seconds, one_copy_s)
        if num_relays > 1:
            yield from _rivals("loopback", machines, payload_bytes, one_copy_s)


def _chains(num_relays: int, mbit_per_s: int) -> Iterator[Measurement]:
    with _links(num_relays + 1, mbit_per_s) as (link, machines, emulation):
        one_copy_s = PAYLOAD_BYTES / (mbit_per_s * 125e3) if emulation else raw_socket_s(machines, PAYLOAD_BYTES)
        yield _measured(link, num_relays, "raw_socket", PAYLOAD_BYTES, one_copy_s, one_copy_s)
        config = RelayConfig(link_startup_s=CHUNK_COST_S, link_bytes_per_s=PAYLOAD_BYTES / one_copy_s)
        seconds = chain_s(machines, config, PAYLOAD_BYTES, emulation)
        yield _measured(link, num_relays, "chain", PAYLOAD_BYTES, seconds, one_copy_s)
        if emulation is None:
            yield from _rivals(link, machines, PAYLOAD_BYTES, one_copy_s)


def _rivals(link: str, machines: list[Machine], payload_bytes: int, one_copy_s: float) -> Iterator[Measurement]:
    num_relays = len(machines) - 1
    yield _measured(link, num_relays, "sequential", payload_bytes, sequential_s(machines, payload_bytes), one_copy_s)
    yield _measured(link, num_relays, "gloo", payload_bytes, gloo_s(machines, payload_bytes), one_copy_s)
    if link == "loopback":
        # In a namespace of its own, where Ray finds no address but one: on a host with several it may take another.
        with emulated(1, 10_000) as alone:
            seconds = ray_s(alone.machines[0], num_relays, payload_bytes)
        yield _measured(link, num_relays, "ray", payload_bytes, seconds, one_copy_s)


def _formula() -> Iterator[Measurement]:
    """With a start-up time and an acknowledgement for each chunk, and the number of chunks that is best then."""
    for num_relays in (3, 7):
        with _links(num_relays + 1, 1000) as (link, machines, _):
            one_copy_s = raw_socket_s(machines, 2 * PAYLOAD_BYTES)
            hops_after_first = num_relays - 1
            num_chunks = round(math.sqrt(hops_after_first * one_copy_s / STARTUP_S))
            expected_s = (num_chunks + hops_after_first) * (one_copy_s / num_chunks + STARTUP_S)
            config = RelayConfig(chunk_bytes=-(-2 * PAYLOAD_BYTES // num_chunks))
            emulation = Emulation(startup_s=STARTUP_S, acknowledged=True)
            seconds = chain_s(machines, config, 2 * PAYLOAD_BYTES, emulation)
            measured = _measured(link, num_relays, "chain_acknowledged", 2 * PAYLOAD_BYTES, seconds, one_copy_s)
            measured.expected_s = expected_s
            yield measured


def _stalls() -> Iterator[Measurement]:
    for num_relays in (1, 4, 16):
        with _links(num_relays + 1, 100) as (link, machines, emulation):
            config = RelayConfig(link_startup_s=CHUNK_COST_S, link_bytes_per_s=12e6)
            fleet = Fleet(machines, config, SMALL_PAYLOAD_BYTES, emulation=emulation)
            try:
                stalls: list[float] = []
                copies: list[float] = []
                for version in range(1, 2 * NUM_ROUNDS + 1):
                    copies.append(fleet.trainer.ask({"copy": True}))
                    stalls.append(fleet.publish(version).stall_s)
                    fleet.wait_complete(version, fleet.relays, DEADLINE_S)
            finally:
                fleet.close()
        seconds, one_copy_s = statistics.median(stalls), statistics.median(copies)
        yield _measured(link, num_relays, "stall", SMALL_PAYLOAD_BYTES, seconds, one_copy_s)


def _faults() -> Iterator[Measurement]:
    num_relays = 5
    config = RelayConfig(link_startup_s=CHUNK_COST_S, link_bytes_per_s=120e6)
    with emulated(num_relays + 1, 1000) as switch:
        one_copy_s = raw_socket_s(switch.machines, PAYLOAD_BYTES)
        undisturbed_s = relay_faults.undisturbed_s(switch.machines, config, PAYLOAD_BYTES)
        for kind in relay_faults.KINDS:
            for place, machine in relay_faults.places(num_relays).items():
                seconds, num_whole = relay_faults.disturbed_s(
                    switch.machines, switch, config, PAYLOAD_BYTES, kind, machine
                )
                assert num_whole == num_relays - 1, f"{num_whole} survivors have what was published"
                measured = _measured("emulated_1000mbit", num_relays, "chain", PAYLOAD_BYTES, seconds, one_copy_s)
                measured.fault, measured.extra_s = f"{kind} {place}", round(seconds - undisturbed_s, 3)
                yield measured


def chain_s(
    machines: list[Machine], config: RelayConfig, payload_bytes: int, emulation: Emulation | None = None
) -> float:
    """From the hand-over to the last machine: the median of some rounds, after two that take memory."""
    fleet = Fleet(machines, config, payload_bytes, emulation=emulation)
    try:
        seconds: list[float] = []
        for version in range(1, NUM_ROUNDS + config.num_versions_kept + 1):
            handed_over = fleet.publish(version)
            seconds.append(fleet.wait_complete(version, fleet.relays, DEADLINE_S) - handed_over.at_s)
        return statistics.median(seconds[config.num_versions_kept :])
    finally:
        fleet.close()


@contextmanager
def _links(num_machines: int, mbit_per_s: int) -> Iterator[tuple[str, list[Machine], Emulation | None]]:
    """Emulated machines, or loopback that the relays pace, where the kernel does not let us."""
    with ExitStack() as stack:
        try:
            switch = stack.enter_context(emulated(num_machines, mbit_per_s))
        except NotPermitted as error:
            print(f"no network namespaces ({error}): paced loopback instead", file=sys.stderr)
            yield f"paced_{mbit_per_s}mbit", loopback(num_machines), Emulation(bytes_per_s=mbit_per_s * 125e3)
        else:
            yield f"emulated_{mbit_per_s}mbit", switch.machines, None


def _measured(
    link: str, num_relays: int, method: str, payload_bytes: int, seconds: float, one_copy_s: float
) -> Measurement:
    return Measurement(
        link,
        num_relays,
        method,
        payload_bytes,
        round(seconds, 5),
        round(one_copy_s, 5),
        round(seconds / one_copy_s, 4),
        load_average=round(os.getloadavg()[0], 1),
    )


def _line(measured: Measurement) -> str:
    fault = f", {measured.fault} (+{measured.extra_s} s)" if measured.fault else ""
    return (
        f"{measured.link:18} {measured.num_relays:2} relays  {measured.method:18} {measured.seconds:9.4f} s "
        f"{measured.ratio_to_one_copy:8.3f} x one copy{fault}"
    )


def _json(measured: Measurement) -> str:
    return json.dumps(msgspec.to_builtins(measured))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
