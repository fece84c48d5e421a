"""Decides the relays' chain: who is the master, who forwards to whom, who is passed by, and which versions are kept.

A broadcast stands still at a relay when the one before it (for the master: the trainer's sender) has bytes of the
newest version that it lacks, and for STALL_S neither did one of them leave the former nor arrive at the latter. Whoever
is to blame goes to the end of the chain, where nobody waits for it, and catches up from there once it can: it was only
slow, or cut off. One that is dead is lost besides (faults.py), by the news of its death or by its silence.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

from laminar.control.messages import (
    AnyCommand,
    MachineId,
    RelayReport,
    RetainVersions,
    SenderReport,
    SetChain,
    VersionComplete,
)
from laminar.control.state import Awaited, ClusterState, Relay, TrainerPhase

STALL_S = 0.6
"""Relays and the sender tell of their progress every 0.1 s."""
BROKEN_S = 0.25
"""Instead of STALL_S where the link to a relay broke and the relay itself is silent: both together say that it died."""
NUM_DOUBLINGS_MAX = 6
"""Each move to the end doubles STALL_S for a relay until it completes a version, so often at most: where everything is
slow, moves become rare instead of breaking what still flows."""


def take_in_start(state: ClusterState, machine: MachineId, now: float) -> Iterator[AnyCommand]:
    """A relay is up: it joins at the end, so that nobody else's upstream changes; before the first version, by id."""
    known = state.relays.get(machine)
    if known is not None and known.started:
        state.counters.num_late_messages += 1
        return
    state.relays[machine] = Relay(machine, heard_at_s=now, started=True)
    chain = [*(m for m in state.chain if m != machine), machine]
    note_progress(state, now)
    yield _set_chain(state, sorted(chain) if state.trainer.version < 0 else chain, now)
    yield RetainVersions(state.new_command(), state.retained)


def take_in_complete(state: ClusterState, event: VersionComplete, now: float) -> None:
    relay = state.relays.get(event.machine)
    if relay is None:
        state.counters.num_late_messages += 1
        return
    if event.version not in relay.complete:
        relay.complete = sorted([*relay.complete, event.version])
    if event.version >= state.trainer.version:
        relay.num_stalls = relay.num_nexts_stalled = 0
    relay.behind_since_s = None
    for command, pending in tuple(state.pending.items()):
        if pending.awaited is Awaited.FETCH and (pending.machine, pending.version) == (event.machine, event.version):
            del state.pending[command]
            state.counters.num_versions_fetched += 1
    note_progress(state, now)


def take_in_report(state: ClusterState, event: RelayReport, now: float) -> None:
    relay = state.relays.get(event.machine)
    if relay is None:
        return
    relay.heard_at_s = now
    if (event.incoming_version, event.incoming_bytes) != (relay.incoming_version, relay.incoming_bytes):
        relay.incoming_version, relay.incoming_bytes = event.incoming_version, event.incoming_bytes
        relay.moved_at_s = now
    if (event.sending_version, event.sending_bytes) != (relay.sending_version, relay.sending_bytes):
        relay.sending_version, relay.sending_bytes = event.sending_version, event.sending_bytes
        for before, after in pairwise(state.chain):
            if before == relay.machine:
                state.relays[after].moved_at_s = now
    relay.next_is_lost = event.next_is_lost


def take_in_sender_report(state: ClusterState, event: SenderReport, now: float) -> None:
    sender = state.trainer.sender
    sender.heard_at_s, sender.master_is_lost = now, event.master_is_lost
    if (event.version, event.num_bytes) != (sender.version, sender.num_bytes):
        sender.version, sender.num_bytes = event.version, event.num_bytes
        if state.chain:
            state.relays[state.chain[0]].moved_at_s = now


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


def pass_by_stalled(state: ClusterState, now: float) -> Iterator[AnyCommand]:
    """At every tick: if the broadcast stands still somewhere, put whoever is to blame at the end of the chain."""
    for position, machine in enumerate(state.chain):
        relay = state.relays[machine]
        before = state.relays[state.chain[position - 1]] if position else None
        if not _has_more(state, before, relay, now):
            relay.moved_at_s = now
        elif now - relay.moved_at_s > _limit_s(state, before, relay, now):
            blamed = _blame(before, relay, now)
            if blamed.machine != state.chain[-1]:
                yield from _move_to_end(state, blamed, now)
                return


def leave(state: ClusterState, machine: MachineId, now: float) -> SetChain:
    """Rebuild the chain without a lost relay; its neighbours resume at the first missing chunk."""
    state.relays[machine] = Relay(machine, heard_at_s=now)
    state.counters.num_relays_lost += 1
    return _set_chain(state, [m for m in state.chain if m != machine], now)


def restart_clocks(state: ClusterState, now: float) -> None:
    """The controller itself stalled, so it does not know who did."""
    for relay in state.relays.values():
        relay.moved_at_s = now


def retain(state: ClusterState) -> Iterator[AnyCommand]:
    """Tell the relays which versions live trajectories or due evaluations need, when that changed."""
    needed = dict.fromkeys(state.index.num_serving)
    for id in state.homeless:
        if (version := state.trajectories[id].newest_version) is not None:
            needed[version] = None
    for evaluation in state.evaluations:
        if not evaluation.ended:
            needed[evaluation.version] = None
    versions = tuple(sorted(needed))
    if versions != state.retained:
        state.retained = versions
        yield RetainVersions(state.new_command(), versions)


def _has_more(state: ClusterState, before: Relay | None, relay: Relay, now: float) -> bool:
    """Whether the one before (none: the trainer's sender) has bytes of the newest version that the relay lacks."""
    version = state.trainer.version
    if version < 0:
        return False
    if before is None:
        # A sender that is silent, or not up yet, is not kept waiting by anybody.
        is_there = now - state.trainer.sender.heard_at_s <= STALL_S
        return is_there and _bytes_of(relay, version) < math.inf
    return _bytes_of(before, version) > _bytes_of(relay, version)


def _bytes_of(relay: Relay, version: int) -> float:
    """How much of a version a relay has; all of it also when it has, or is receiving, a newer one."""
    if (relay.complete and relay.complete[-1] >= version) or (relay.incoming_version or 0) > version:
        return math.inf
    return relay.incoming_bytes if relay.incoming_version == version else 0


def _limit_s(state: ClusterState, before: Relay | None, relay: Relay, now: float) -> float:
    is_broken = state.trainer.sender.master_is_lost if before is None else before.next_is_lost
    limit_s = BROKEN_S if is_broken and now - relay.heard_at_s > BROKEN_S else STALL_S
    return limit_s * 2 ** min(relay.num_stalls, NUM_DOUBLINGS_MAX)


def _blame(before: Relay | None, relay: Relay, now: float) -> Relay:
    """The one before if it is silent itself, or if another behind it stood still already; else the relay."""
    if before is None or now - relay.heard_at_s > BROKEN_S:
        return relay
    if now - before.heard_at_s > STALL_S or before.num_nexts_stalled:
        return before
    before.num_nexts_stalled += 1
    return relay


def _move_to_end(state: ClusterState, relay: Relay, now: float) -> Iterator[AnyCommand]:
    relay.num_stalls += 1
    state.counters.num_relays_passed_by += 1
    yield _set_chain(state, [*(m for m in state.chain if m != relay.machine), relay.machine], now)


def _set_chain(state: ClusterState, machines: list[MachineId], now: float) -> SetChain:
    """The order from now on. Whoever gets another upstream has the whole of STALL_S to hear from it."""
    before = dict(zip(state.chain, [None, *state.chain], strict=False))
    for upstream, machine in zip([None, *machines], machines, strict=False):
        if machine not in before or before[machine] != upstream:
            state.relays[machine].moved_at_s = now
    state.chain = machines
    return SetChain(state.new_command(), tuple(machines))
