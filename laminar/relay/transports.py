"""Builds the transport that `relay.transport` names."""

from typing import Literal, assert_never

from laminar.relay.transport import SocketTransport, Transport


def build_transport(kind: Literal["sockets", "nixl"]) -> Transport:
    match kind:
        case "sockets":
            return SocketTransport()
        case "nixl":
            from laminar.relay.nixl import NixlTransport  # Heavy, and only with the extra `rdma`.

            return NixlTransport()
        case _:
            assert_never(kind)
