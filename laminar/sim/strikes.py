"""Lets faults strike the simulated cluster."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, assert_never

from laminar.control.messages import AnyEvent, RelayLost, ReplicaId, ReplicaLost
from laminar.sim.faults import (
    AnyFault,
    HangRelay,
    HangReplica,
    KillMachine,
    KillRelay,
    KillReplica,
    KillTrainer,
    PauseReplica,
    SlowLink,
    StallController,
)

if TYPE_CHECKING:
    from laminar.sim.world import World

DEATH_SEEN_S = 0.05
"""From a process's death to the news of it."""


def strike(world: "World", fault: AnyFault) -> Iterable[AnyEvent]:
    """Do it to the world; what comes back is what control still hears of those that it strikes."""
    match fault:
        case KillReplica():
            return _kill_replica(world, fault.replica)
        case HangReplica():
            return _still(world, fault.replica, float("inf"))
        case PauseReplica():
            return _still(world, fault.replica, fault.seconds)
        case KillMachine():
            return _kill_machine(world, fault)
        case KillRelay():
            if world.relays.kill(fault.machine):
                world.clock.tell(DEATH_SEEN_S, RelayLost(fault.machine, "killed"))
        case HangRelay():
            world.relays.silence(fault.machine)
        case SlowLink():
            world.relays.slow_down(fault.machine, fault.factor)
            world.clock.at(fault.at_s + fault.seconds, lambda: _restore_link(world, fault))
        case KillTrainer():
            if (lost := world.trainer.kill()) is not None:
                world.clock.tell(DEATH_SEEN_S, lost)
        case StallController():
            world.control_stalled_until_s = world.clock.now + fault.seconds
        case _:
            assert_never(fault)
    return ()


def _kill_replica(world: "World", id: ReplicaId) -> Iterator[AnyEvent]:
    replica = world.fleet.replicas.get(id)
    if replica is None:
        return
    if not replica.is_silent(world.clock.now):
        yield world.fleet.last_words(replica)
    if world.fleet.stop(id):
        world.clock.tell(DEATH_SEEN_S, ReplicaLost(id, "killed"))


def _still(world: "World", id: ReplicaId, seconds: float) -> Iterator[AnyEvent]:
    replica = world.fleet.replicas.get(id)
    if replica is not None and not replica.is_silent(world.clock.now):
        yield world.fleet.last_words(replica)
        replica.pause(world.clock.now, seconds)
        world.fleet.rouse(replica)


def _kill_machine(world: "World", fault: KillMachine) -> Iterator[AnyEvent]:
    for id, replica in list(world.fleet.replicas.items()):
        if replica.machine == fault.machine:
            yield from _kill_replica(world, id)
    if world.relays.kill(fault.machine):
        world.clock.tell(DEATH_SEEN_S, RelayLost(fault.machine, "killed"))


def _restore_link(world: "World", fault: SlowLink) -> Iterable[AnyEvent]:
    world.relays.slow_down(fault.machine, 1.0)
    return ()
