"""Defines what a trainer's publisher and its sender process say to each other, over a socket that only they have."""

from typing import Literal

import msgspec

from laminar.relay.handshake import Credentials
from laminar.relay.happenings import SenderHappening
from laminar.relay.manifest import Manifest
from laminar.relay.shards import Shard


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first order. The token comes this way, never in an argument or the environment, which others can read."""

    credentials: Credentials
    answer_deadline_s: float
    transport: Literal["sockets", "nixl"]


class AddSlot(msgspec.Struct, frozen=True, tag=True):
    """One of the publisher's segments; its descriptor comes along."""

    slot: int
    num_bytes: int


class SetMaster(msgspec.Struct, frozen=True, tag=True):
    address: tuple[str, int] | None
    epoch: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """The slot holds this version, and is not written until Released."""

    slot: int
    manifest: Manifest
    shard: Shard | None


Order = Join | AddSlot | SetMaster | Send


class Released(msgspec.Struct, frozen=True, tag=True):
    """The sender is done with the slot: a newer version is there, and this one is not being sent."""

    slot: int


class Sending(msgspec.Struct, frozen=True, tag=True):
    """So much of a version has left for the master relay; told now and then."""

    version: int
    num_bytes: int


Answer = Released | Sending | SenderHappening
