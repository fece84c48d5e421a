"""Pretends to be the relays: when a version arrives on which machine, what is kept, what is evicted.

trainer ──publish──► master ──► next ──► …      a version comes to each at its place's time after the hand-over;
                                                behind a relay that is gone or hangs it waits for a new chain
"""

from collections.abc import Iterable, Iterator

import msgspec

from laminar.control.messages import (
    AnyEvent,
    CommandFailed,
    Fetch,
    MachineId,
    RelayReport,
    RelayStarted,
    VersionComplete,
    VersionEvicted,
)
from laminar.sim.clock import Clock
from laminar.sim.shape import Shape

RECONNECT_S = 0.1
"""What a new chain needs before versions flow again."""


class Relay(msgspec.Struct, eq=False):
    """One machine's. `incoming`: the version that is to arrive next; a newer one overtakes it."""

    machine: MachineId
    complete: dict[int, float] = {}
    """Versions that its replicas can load, by when they came; ascending."""
    incoming: int | None = None
    held: bool = False
    """Whether the incoming one is stuck behind a relay that does not forward."""
    silent: bool = False


class SimulatedRelays:
    def __init__(self, clock: Clock, shape: Shape, *, num_versions_kept: int) -> None:
        self._clock = clock
        self._arrivals_s = shape.arrivals_s
        self._num_versions_kept = num_versions_kept
        self._relays: dict[MachineId, Relay] = {}
        self._chain: tuple[MachineId, ...] = ()
        self._retained: tuple[int, ...] = ()
        self._newest: int | None = None
        self._slow: dict[MachineId, float] = {}

    def start(self, machine: MachineId, delay_s: float) -> None:
        """Bring one up, empty; what is left of an old one there is ended."""

        def come_up() -> Iterable[AnyEvent]:
            self._relays[machine] = Relay(machine)
            return (RelayStarted(machine),)

        self._clock.at(self._clock.now + delay_s, come_up)

    def kill(self, machine: MachineId) -> bool:
        """Whether there was one to kill."""
        return self._relays.pop(machine, None) is not None

    def silence(self, machine: MachineId) -> None:
        """It hangs for good."""
        if (relay := self._relays.get(machine)) is not None:
            relay.silent = True

    def slow_down(self, machine: MachineId, factor: float) -> None:
        """Versions published from now on take so many times as long to it, and to those behind it."""
        self._slow[machine] = factor

    def set_chain(self, machines: tuple[MachineId, ...]) -> None:
        """What was stuck flows again, and whoever lacks the newest version gets it."""
        self._chain = machines
        for relay in self._in_chain():
            if relay.held:
                relay.held = False
                self._clock.at(self._clock.now + RECONNECT_S, lambda relay=relay: self._arrive(relay, relay.incoming))
            elif self._newest is not None and relay.incoming is None and self._newest not in relay.complete:
                self._send(relay, self._newest)

    def retain(self, versions: tuple[int, ...]) -> None:
        self._retained = versions

    def publish(self, version: int) -> None:
        """The trainer has handed it over."""
        self._newest = version
        for relay in self._in_chain():
            self._send(relay, version)

    def fetch(self, command: Fetch) -> None:
        """An older version comes from the source's relay, in the time of one hop, or the command fails."""

        def arrive() -> Iterable[AnyEvent]:
            relay = self._relays.get(command.machine)
            if relay is None or relay.silent or not self.has(command.source, command.version):
                return (CommandFailed(command.id, f"version {command.version} did not come from {command.source}"),)
            return self._keep(relay, command.version)

        self._clock.at(self._clock.now + self._arrivals_s[0], arrive)

    def has(self, machine: MachineId, version: int) -> bool:
        relay = self._relays.get(machine)
        return relay is not None and not relay.silent and version in relay.complete

    def came_now(self, machine: MachineId, version: int) -> bool:
        """Whether it became complete there at this very moment."""
        relay = self._relays.get(machine)
        return relay is not None and relay.complete.get(version) == self._clock.now

    def reports(self) -> Iterator[AnyEvent]:
        for relay in list(self._relays.values()):
            if not relay.silent:
                yield RelayReport(relay.machine, relay.incoming, 0)

    def _in_chain(self) -> list[Relay]:
        return [self._relays[machine] for machine in self._chain if machine in self._relays]

    def _send(self, relay: Relay, version: int) -> None:
        relay.incoming, relay.held = version, False
        place = self._chain.index(relay.machine)
        factor = max((self._slow.get(machine, 1.0) for machine in self._chain[: place + 1]), default=1.0)
        at_s = self._clock.now + factor * self._arrivals_s[min(place, len(self._arrivals_s) - 1)]
        self._clock.at(at_s, lambda: self._arrive(relay, version))

    def _arrive(self, relay: Relay, version: int | None) -> Iterable[AnyEvent]:
        """The last byte is due; it comes if every relay before it in the chain forwards."""
        if version is None or relay.incoming != version or self._relays.get(relay.machine) is not relay:
            return ()
        before = self._chain[: self._chain.index(relay.machine)] if relay.machine in self._chain else ()
        blocked = any(machine not in self._relays or self._relays[machine].silent for machine in before)
        if relay.silent or blocked:
            relay.held = True
            return ()
        relay.incoming = None
        return self._keep(relay, version)

    def _keep(self, relay: Relay, version: int) -> Iterable[AnyEvent]:
        """At the limit the oldest that nobody needs goes, else the oldest; never the newest."""
        relay.complete[version] = self._clock.now
        relay.complete = dict(sorted(relay.complete.items()))
        events: list[AnyEvent] = [VersionComplete(relay.machine, version)]
        while len(relay.complete) > self._num_versions_kept:
            *older, _ = relay.complete
            oldest = next((v for v in older if v not in self._retained), older[0])
            del relay.complete[oldest]
            events.append(VersionEvicted(relay.machine, oldest))
        return events
