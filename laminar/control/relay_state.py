"""Holds what the control plane knows of the relays and of the trainer's sender: part of its state."""

import msgspec

from laminar.control.parts import MachineId


class Relay(msgspec.Struct):
    machine: MachineId
    heard_at_s: float
    started: bool = False
    behind_since_s: float | None = None
    """Since when it lacks the newest version without another having come; none while it has it."""
    complete: list[int] = []
    """Versions that the machine's replicas can load, ascending."""
    incoming_version: int | None = None
    incoming_bytes: int = 0
    sending_version: int | None = None
    sending_bytes: int = 0
    next_is_lost: bool = False
    """Whether it says that it cannot reach the next relay of the chain."""
    moved_at_s: float = 0.0
    """When the newest version last moved towards it: a byte left the one before it, or arrived here."""
    num_stalls: int = 0
    """Times that it was put at the end of the chain since it last completed a version."""
    num_nexts_stalled: int = 0
    """Times that one behind it was put at the end of the chain since it last completed a version."""


class Sender(msgspec.Struct):
    """The trainer's sender, which streams each hand-over to the master relay."""

    heard_at_s: float = 0.0
    version: int | None = None
    """What it was last heard to send."""
    num_bytes: int = 0
    master_is_lost: bool = False
    """Whether it says that it cannot reach the master relay."""
