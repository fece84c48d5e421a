"""Names what can go wrong in a simulated cluster, and the wire that messages to control go over."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from laminar.control.messages import AnyEvent, MachineId, ReplicaId


class Fault(msgspec.Struct, frozen=True, tag=True, tag_field="fault"):
    """Something that happens to the world at a time, whatever control knows of it."""

    at_s: float


class KillReplica(Fault, frozen=True):
    """Its process dies, and the death is seen soon."""

    replica: ReplicaId


class HangReplica(Fault, frozen=True):
    """It goes silent for good; nobody tells."""

    replica: ReplicaId


class PauseReplica(Fault, frozen=True):
    """It stands still for a while, silent, and goes on as if nothing had been."""

    replica: ReplicaId
    seconds: float


class KillMachine(Fault, frozen=True):
    """Its replicas and its relay die."""

    machine: MachineId


class KillRelay(Fault, frozen=True):
    machine: MachineId


class HangRelay(Fault, frozen=True):
    """It takes in no more versions and reports nothing."""

    machine: MachineId


class SlowLink(Fault, frozen=True):
    """For a while versions take `factor` times as long to this machine, and to those that come after it."""

    machine: MachineId
    factor: float
    seconds: float


class KillTrainer(Fault, frozen=True):
    pass


class StallController(Fault, frozen=True):
    """Control handles nothing for a while; what arrives meanwhile waits."""

    seconds: float


AnyFault = (
    KillReplica
    | HangReplica
    | PauseReplica
    | KillMachine
    | KillRelay
    | HangRelay
    | SlowLink
    | KillTrainer
    | StallController
)


class Wire(Protocol):
    """Carries events to control."""

    def arrivals(self, event: AnyEvent, now: float) -> Sequence[float]:
        """When the event reaches control: once, later, several times, or never."""
        ...


class IdealWire:
    def arrivals(self, event: AnyEvent, now: float) -> Sequence[float]:
        return (now,)
