"""Decides the relays' chain: who is the master, who forwards to whom, and which versions are kept."""

from collections.abc import Iterator

from laminar.control.messages import AnyCommand, MachineId, RetainVersions, SetChain, VersionComplete
from laminar.control.state import ClusterState, Relay, TrainerPhase


def chain(state: ClusterState) -> SetChain:
    """Machines in id order, so that a late joiner does not reshuffle the others."""
    machines = sorted(m for m, relay in state.relays.items() if relay.started)
    return SetChain(state.new_command(), tuple(machines))


def take_in_start(state: ClusterState, machine: MachineId, now: float) -> Iterator[AnyCommand]:
    state.relays[machine] = Relay(machine, heard_at_s=now, started=True)
    note_progress(state, now)
    yield chain(state)
    yield RetainVersions(state.new_command(), state.retained)


def take_in_complete(state: ClusterState, event: VersionComplete, now: float) -> None:
    relay = state.relays.get(event.machine)
    if relay is None:
        state.counters.num_late_messages += 1
        return
    if event.version not in relay.complete:
        relay.complete = sorted([*relay.complete, event.version])
    relay.behind_since_s = None
    note_progress(state, now)


def note_progress(state: ClusterState, now: float) -> None:
    """After a hand-over or an arrival: which relays lack the newest version from now on, and has it come everywhere?

    A version whose trainer was lost while it was sent may never come, which is no relay's fault.
    """
    trainer = state.trainer
    if trainer.phase is TrainerPhase.STARTING:
        for relay in state.relays.values():
            relay.behind_since_s = None
        return
    relays = [relay for relay in state.relays.values() if relay.started]
    for relay in relays:
        if trainer.version < 0 or trainer.version in relay.complete:
            relay.behind_since_s = None
        elif relay.behind_since_s is None:
            relay.behind_since_s = now
    if relays and all(relay.behind_since_s is None for relay in relays) and not trainer.is_everywhere:
        trainer.is_everywhere = trainer.version >= 0
        trainer.broadcast_s = max(0.0, now - trainer.handed_over_at_s)


def leave(state: ClusterState, machine: MachineId, now: float) -> SetChain:
    """Rebuild the chain without a lost relay; its neighbours resume at the first missing chunk."""
    state.relays[machine] = Relay(machine, heard_at_s=now)
    state.counters.num_relays_lost += 1
    return chain(state)


def retain(state: ClusterState) -> Iterator[AnyCommand]:
    """Tell the relays which versions live trajectories or due evaluations need, when that changed."""
    needed: dict[int, None] = {}
    for replica in state.replicas.values():
        if replica.version is not None and replica.trajectories:
            needed[replica.version] = None
    for id in state.homeless:
        if (version := state.trajectories[id].version) is not None:
            needed[version] = None
    for evaluation in state.evaluations:
        if not evaluation.ended:
            needed[evaluation.version] = None
    versions = tuple(sorted(needed))
    if versions != state.retained:
        state.retained = versions
        yield RetainVersions(state.new_command(), versions)
