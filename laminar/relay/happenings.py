"""Names everything that a relay or a trainer's sender tells of: each is a fact, for the event log or the control plane.

VersionComplete and VersionEvicted are control's own events and go to it as they are.
"""

import msgspec

from laminar.control.messages import VersionComplete, VersionEvicted


class NextLost(msgspec.Struct, frozen=True, tag=True):
    """The next relay of the chain cannot be reached, hangs or refuses. Told once until it works again or changes."""

    machine: int
    address: tuple[str, int]
    cause: str


class UpstreamLost(msgspec.Struct, frozen=True, tag=True):
    """A version stopped arriving: its stream broke, or what came was not what was sent. Resumed at num_bytes."""

    machine: int
    version: int
    num_bytes: int
    cause: str


class PeerRefused(msgspec.Struct, frozen=True, tag=True):
    """Someone connected and was sent away before it gave or got anything: a wrong token, garbage, a bad frame."""

    machine: int
    peer: str
    cause: str


class LeaseExpired(msgspec.Struct, frozen=True, tag=True):
    """A reader held a version beyond the deadline and is taken for dead; its segment is abandoned to it.

    It counts against the ring and is not written again until the reader's socket closes.
    """

    machine: int
    version: int
    held_s: float


RelayHappening = VersionComplete | VersionEvicted | NextLost | UpstreamLost | PeerRefused | LeaseExpired


class VersionSent(msgspec.Struct, frozen=True, tag=True):
    """The master relay has the version complete and checksummed."""

    version: int
    num_bytes: int
    seconds: float


class SendSuperseded(msgspec.Struct, frozen=True, tag=True):
    """A version never got to the master: a newer one was handed over while it could not be sent."""

    version: int
    by: int


class SendRefused(msgspec.Struct, frozen=True, tag=True):
    """The master has a newer version complete already; the trainer's version counter is behind the run's."""

    version: int
    cause: str


class MasterLost(msgspec.Struct, frozen=True, tag=True):
    """The master relay cannot be reached, hangs or refuses; retried until set_master names another."""

    address: tuple[str, int]
    cause: str


class SenderLost(msgspec.Struct, frozen=True, tag=True):
    """The sender process died; `restarted` tells whether another took over the newest version."""

    cause: str
    restarted: bool


SenderHappening = VersionSent | SendSuperseded | SendRefused | MasterLost | SenderLost
