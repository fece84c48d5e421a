"""Decides which older versions travel between machines: the newest comes down the chain, these on order.

A version that live trajectories need is kept on NUM_COPIES machines, so that the loss of one does not restart them;
and it is fetched to a machine whose empty replica could take up homeless trajectories of it, if no such machine has it.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from laminar.config import Config
from laminar.control.messages import AnyCommand, Fetch, MachineId
from laminar.control.state import Awaited, ClusterState, Relay

NUM_COPIES = 2
PAUSE_S = 1.0
"""After a fetch that failed."""


def order(state: ClusterState, config: Config, now: float) -> Iterator[AnyCommand]:
    """Start what is missing; at most one fetch a version at a time, and none of the newest."""
    if now < state.fetch_again_at_s:
        return
    for version in state.retained:
        holders = list(islice(_holders(state, version), NUM_COPIES)) if version < state.trainer.version else []
        is_safe = len(holders) == NUM_COPIES and not _is_awaited(state, version)
        if not holders or is_safe or _is_fetched(state, version):
            continue
        machine = _machine_in_need(state, version)
        if machine is None and len(holders) < NUM_COPIES:
            machine = _machine_with_room(state, config, version)
        if machine is not None:
            id = state.expect(Awaited.FETCH, now, config.relay.publish_deadline_s, version=version, machine=machine)
            yield Fetch(id, machine, version, holders[0])


def fail(state: ClusterState, now: float) -> None:
    """A fetch came to nothing: its source lost the version or died, or a link broke. It is asked for again later."""
    state.fetch_again_at_s = now + PAUSE_S


def forget(state: ClusterState, machine: MachineId) -> None:
    """A relay was lost, and with it what was on its way there."""
    for command in [c for c, p in state.pending.items() if p.awaited is Awaited.FETCH and p.machine == machine]:
        del state.pending[command]


def _holders(state: ClusterState, version: int) -> Iterator[MachineId]:
    return (machine for machine, relay in state.relays.items() if relay.started and version in relay.complete)


def _is_awaited(state: ClusterState, version: int) -> bool:
    """Whether homeless trajectories can only go on under it."""
    return any(state.trajectories[id].version == version for id in state.homeless)


def _is_fetched(state: ClusterState, version: int) -> bool:
    return any(p.awaited is Awaited.FETCH and p.version == version for p in state.pending.values())


def _machine_in_need(state: ClusterState, version: int) -> MachineId | None:
    """Where an empty replica could load it for homeless trajectories; none if they have, or will have, a home."""
    if not _is_awaited(state, version):
        return None
    if any(r.version == version for r in state.replicas.values()):
        return None
    if any(p.awaited is Awaited.LOAD and p.version == version for p in state.pending.values()):
        return None
    empty = [r.machine for r in state.empty_replicas() if _is_up(state, r.machine)]
    holders = dict.fromkeys(_holders(state, version))
    return None if not empty or any(machine in holders for machine in empty) else empty[0]


def _machine_with_room(state: ClusterState, config: Config, version: int) -> MachineId | None:
    """The machine with most room among those that lack it; none where it would push out what is needed as well."""
    coming = Counter(p.machine for p in state.pending.values() if p.awaited is Awaited.FETCH)
    rooms = {
        machine: config.relay.num_versions_kept - coming[machine] - _num_needed(state, relay)
        for machine, relay in state.relays.items()
        if relay.started and version not in relay.complete
    }
    # One place for it and one for the version that arrives next.
    fitting = [machine for machine, room in rooms.items() if room >= 2]
    return max(fitting, key=lambda machine: (rooms[machine], -machine), default=None)


def _num_needed(state: ClusterState, relay: Relay) -> int:
    """Versions on a relay that must stay: the newest and those retained."""
    return sum(v in state.retained or v == relay.complete[-1] for v in relay.complete)


def _is_up(state: ClusterState, machine: MachineId) -> bool:
    relay = state.relays.get(machine)
    return relay is not None and relay.started
