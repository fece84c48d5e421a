"""What a relay does with peers that are not of the run or break the protocol; a broadcast goes through beside it."""

import os
import socket
import struct
from collections.abc import Callable
from itertools import pairwise
from unittest.mock import ANY

import msgspec
import pytest

from laminar.config import RelayConfig
from laminar.relay.chunks import CHUNK_BYTES_MAX
from laminar.relay.handshake import Credentials, dial
from laminar.relay.happenings import PeerRefused, UpstreamLost
from laminar.relay.lease import RelayUnreachable, lease, socket_name
from laminar.relay.links import HEADER, LENGTH_MAX, MAGIC, Kind, Link, LinkError, LinkRefused
from laminar.relay.relay import Relay
from laminar.relay.stream import Hello
from tests.relay.relay_machines import (
    CHUNK_BYTES,
    TOKEN,
    GatedSource,
    InBackground,
    LocalRelay,
    RelayProcess,
    manifest_of,
    pattern_of,
    send,
    send_version,
    wait_until,
)
from tests.relay.wire_tap import WireTap

NUM_BYTES = 20 * CHUNK_BYTES + 8
StartRelay = Callable[..., LocalRelay]


def refused_cause(relay: LocalRelay) -> str:
    wait_until("a refusal", lambda: relay.told(PeerRefused))
    return relay.told(PeerRefused)[0].cause


def assert_a_broadcast_goes_through(relay: LocalRelay, run_id: str) -> None:
    data = send_version(relay.address, run_id, 9, NUM_BYTES)
    with lease(run_id, relay.relay.machine, TOKEN, 9, 5.0) as leased:
        assert bytes(leased.data) == data


def test_wrong_token_is_refused_on_the_port(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    with pytest.raises(LinkRefused, match="wrong token"):
        dial(relay.address, Credentials(run_id, b"another token"), 5.0)
    assert "wrong token" in refused_cause(relay)
    assert_a_broadcast_goes_through(relay, run_id)


def test_token_of_another_run_is_refused(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    with pytest.raises(LinkRefused, match="wrong token"):
        dial(relay.address, Credentials("another run", TOKEN), 5.0)


def test_wrong_token_gets_no_weights(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    send_version(relay.address, run_id, 1, NUM_BYTES)
    with (
        pytest.raises(LinkRefused, match="wrong token"),
        lease(run_id, 0, b"another token", None, 5.0),
    ):
        pass
    assert "wrong token" in refused_cause(relay)


def test_impostor_without_the_token_gets_no_weights(run_id: str):
    """It took a relay's place, and can do no more than fail: the dialler sends nothing before the proof."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        host, port = impostor.getsockname()
        sending = InBackground(lambda: dial((host, port), Credentials(run_id, TOKEN), 5.0))
        connection, _ = impostor.accept()
        link = Link(connection, "the victim")
        link.limit_waits(5.0)
        link.send(Kind.CHALLENGE, os.urandom(32))
        link.receive(Kind.PROOF)
        link.send(Kind.WELCOME, os.urandom(32))
        assert "has not got the token" in str(sending.outcome())
        link.close()


def test_token_never_crosses_the_link(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    tap = WireTap(relay.address)
    send_version(tap.address, run_id, 1, NUM_BYTES)
    assert len(tap.seen) > NUM_BYTES
    assert TOKEN not in tap.seen
    tap.close()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n", HEADER.pack(MAGIC + 1, Kind.PROOF, LENGTH_MAX[Kind.PROOF], 0, 0)],
)
def test_garbage_is_refused_by_name(start_relay: StartRelay, run_id: str, garbage: bytes):
    relay = start_relay()
    with socket.create_connection(relay.address) as peer:
        peer.sendall(garbage)
        assert "garbage" in refused_cause(relay)
    assert_a_broadcast_goes_through(relay, run_id)


def test_garbage_from_a_local_peer_is_refused_by_name(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(socket_name(run_id, 0))
        peer.sendall(os.urandom(4096).replace(b"LW", b"xx"))
        assert "garbage" in refused_cause(relay)


def test_peer_that_leaves_in_mid_frame_is_refused_by_name(start_relay: StartRelay):
    relay = start_relay()
    with socket.create_connection(relay.address) as peer:
        peer.sendall(HEADER.pack(MAGIC, Kind.PROOF, LENGTH_MAX[Kind.PROOF], 0, 0)[:10])
        peer.shutdown(socket.SHUT_WR)
        assert "closed the link after 10 of 24 bytes of PROOF" in refused_cause(relay)


@pytest.mark.parametrize("length", [LENGTH_MAX[Kind.PROOF] + 1, 2**32 - 1])
def test_oversized_frame_before_the_proof_is_refused(start_relay: StartRelay, run_id: str, length: int):
    relay = start_relay()
    with socket.create_connection(relay.address) as peer:
        peer.sendall(HEADER.pack(MAGIC, Kind.PROOF, length, 0, 0))
        assert "oversized frame" in refused_cause(relay)
    assert_a_broadcast_goes_through(relay, run_id)


def test_other_frames_before_the_proof_are_refused(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    with socket.create_connection(relay.address) as peer:
        peer.sendall(HEADER.pack(MAGIC, Kind.HELLO, 4, 0, 0) + b"\0" * 4)
        assert "sent HELLO, not PROOF" in refused_cause(relay)


def begin_stream(relay: LocalRelay, run_id: str, version: int = 1) -> Link:
    link = dial(relay.address, Credentials(run_id, TOKEN), 5.0)
    link.send(Kind.HELLO, msgspec.msgpack.encode(Hello(manifest_of(version, NUM_BYTES), 1, "sockets")))
    assert link.receive(Kind.ANSWER)[0].index == 0
    return link


def assert_upstream_lost(relay: LocalRelay, link: Link, cause: str) -> None:
    with pytest.raises(LinkRefused, match=cause):
        link.receive(Kind.DONE)
    link.close()
    assert cause in relay.wait_told(UpstreamLost, version=1, machine=0, num_bytes=ANY).cause
    assert relay.relay.status().versions == ()


def test_oversized_chunk_is_refused(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    link = begin_stream(relay, run_id)
    link._socket.sendall(HEADER.pack(MAGIC, Kind.CHUNK, CHUNK_BYTES_MAX + 1, 0, 0))
    assert_upstream_lost(relay, link, "oversized frame")
    assert_a_broadcast_goes_through(relay, run_id)


def test_chunk_of_another_length_than_the_manifests_is_refused(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    link = begin_stream(relay, run_id)
    link.send(Kind.CHUNK, b"\0" * (CHUNK_BYTES - 1))
    assert_upstream_lost(relay, link, f"instead of chunk 0 of version 1, {CHUNK_BYTES} bytes")
    assert_a_broadcast_goes_through(relay, run_id)


def test_chunk_out_of_order_is_refused(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    link = begin_stream(relay, run_id)
    link.send(Kind.CHUNK, b"\0" * CHUNK_BYTES, index=3)
    assert_upstream_lost(relay, link, "sent chunk 3 of")


def test_truncated_chunk_is_told_and_the_version_resumed(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    source = GatedSource(manifest_of(1, NUM_BYTES), pattern_of(1, NUM_BYTES))
    link = begin_stream(relay, run_id)
    link.send(Kind.CHUNK, source.view[:CHUNK_BYTES], checksum=source.chunk_checksum(0))
    link._socket.sendall(HEADER.pack(MAGIC, Kind.CHUNK, CHUNK_BYTES, 1, source.chunk_checksum(1)) + b"\0" * 100)
    link.close()
    lost = relay.wait_told(UpstreamLost, version=1)
    assert f"after 100 of {CHUNK_BYTES} bytes of chunk 1 of version 1" in lost.cause
    assert lost.num_bytes == CHUNK_BYTES
    send(relay.address, run_id, source)
    with lease(run_id, 0, TOKEN, 1, 5.0) as leased:
        assert leased.data == source.view


def test_bad_chunk_is_refused_and_asked_for_again(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    source = GatedSource(manifest_of(1, NUM_BYTES), pattern_of(1, NUM_BYTES))
    link = begin_stream(relay, run_id)
    link.send(Kind.CHUNK, source.view[:CHUNK_BYTES], checksum=source.chunk_checksum(0))
    link.send(Kind.CHUNK, source.view[:CHUNK_BYTES], index=1, checksum=source.chunk_checksum(1))
    assert_upstream_lost(relay, link, "chunk 1 of version 1 from peer")
    again = dial(relay.address, Credentials(run_id, TOKEN), 5.0)
    again.send(Kind.HELLO, msgspec.msgpack.encode(Hello(source.manifest, 1, "sockets")))
    assert again.receive(Kind.ANSWER)[0].index == 1
    again.close()


@pytest.mark.parametrize("flip_at", [NUM_BYTES // 2, NUM_BYTES // 3])
def test_bit_flipped_between_two_relays_is_found_and_the_broadcast_completes(
    start_relay: StartRelay, run_id: str, flip_at: int
):
    first, second = start_relay(0), start_relay(1)
    tap = WireTap(second.address, flip_at)
    first.relay.set_next(tap.address, 1)
    data = send_version(first.address, run_id, 1, NUM_BYTES)
    second.wait_complete(1)
    assert tap.flipped
    assert "does not match its checksum" in second.wait_told(UpstreamLost, version=1).cause
    with lease(run_id, 1, TOKEN, 1, 5.0) as leased:
        assert bytes(leased.data) == data
    tap.close()


@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        (msgspec.structs.replace(manifest_of(1, NUM_BYTES), chunk_bytes=0), "set relay.chunk_bytes"),
        (msgspec.structs.replace(manifest_of(1, NUM_BYTES), chunk_bytes=2**40), "set relay.chunk_bytes"),
        (msgspec.structs.replace(manifest_of(1, NUM_BYTES), num_bytes=0), "has 0 bytes"),
        (msgspec.structs.replace(manifest_of(1, NUM_BYTES), version=-1), "count from 0"),
    ],
)
def test_impossible_manifest_is_refused_by_name(start_relay: StartRelay, run_id: str, manifest, complaint: str):
    relay = start_relay()
    link = dial(relay.address, Credentials(run_id, TOKEN), 5.0)
    link.send(Kind.HELLO, msgspec.msgpack.encode(Hello(manifest, 1, "sockets")))
    assert complaint in refused_cause(relay)
    link.close()
    assert_a_broadcast_goes_through(relay, run_id)


def test_hello_that_is_no_hello_is_refused_by_name(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    link = dial(relay.address, Credentials(run_id, TOKEN), 5.0)
    link.send(Kind.HELLO, b"\x80\x04\x95")  # How a pickle begins.
    assert "sent no Hello" in refused_cause(relay)
    link.close()


def test_silent_peer_is_sent_away(start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, run_id: str):
    monkeypatch.setattr("laminar.relay.relay.HANDSHAKE_DEADLINE_S", 0.1)
    relay = start_relay()
    with socket.create_connection(relay.address):
        assert "no byte of PROOF" in refused_cause(relay)


def test_flood_of_connections_is_bounded(start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, run_id: str):
    monkeypatch.setattr("laminar.relay.relay.NUM_PEERS_MAX", 4)
    relay = start_relay()
    peers = [socket.create_connection(relay.address) for _ in range(6)]
    assert "4 connections are open already" in refused_cause(relay)
    for peer in peers:
        peer.close()
    wait_until("the places free again", lambda: not relay.relay._peers)
    assert_a_broadcast_goes_through(relay, run_id)


def test_port_in_use_names_the_port_and_the_setting(start_relay: StartRelay, run_id: str):
    taken = start_relay(0).address[1]
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{taken} .*set relay\.port to a free one"):
        Relay(1, run_id, TOKEN, RelayConfig(port=taken), lambda _happening: None)


def test_second_relay_of_one_machine_is_refused(start_relay: StartRelay, run_id: str):
    start_relay(0)
    with pytest.raises(OSError, match="has a relay for machine 0 already"):
        Relay(0, run_id, TOKEN, RelayConfig(), lambda _happening: None)


def test_run_id_too_long_for_a_socket_name_is_refused():
    with pytest.raises(ValueError, match="use at most 80 bytes"):
        Relay(0, "x" * 120, TOKEN, RelayConfig(), lambda _happening: None)


def test_empty_token_is_refused(run_id: str):
    with pytest.raises(ValueError, match="token"):
        Relay(0, run_id, b"", RelayConfig(), lambda _happening: None)


def test_no_relay_is_unreachable_within_the_deadline(run_id: str):
    with pytest.raises(RelayUnreachable, match="on machine 3: nobody listens there"), lease(run_id, 3, TOKEN, 1, 0.1):
        pass


def test_frames_have_a_fixed_header():
    assert HEADER.size == struct.calcsize("!HHIQQ") == 24


def test_link_ends_by_name(start_relay: StartRelay, run_id: str):
    relay = start_relay()
    link = begin_stream(relay, run_id)
    relay.relay.close()
    with pytest.raises((LinkError, ConnectionResetError)):
        link.receive(Kind.DONE)
    link.close()


def test_a_broadcast_completes_while_hostile_peers_are_at_every_relay(
    start_machine: Callable[..., RelayProcess], run_id: str
):
    """A wrong token, garbage, an oversized frame and a silent one, in mid-broadcast; each is told by name."""
    machines = [start_machine(machine) for machine in range(3)]
    for before, after in pairwise(machines):
        before.set_next(after.address, 1)
    source = GatedSource(manifest_of(1, NUM_BYTES), pattern_of(1, NUM_BYTES), gate=10)
    sending = InBackground(lambda: send(machines[0].address, run_id, source))
    wait_until("ten chunks at the tail", lambda: machines[2].status().incoming_bytes == 10 * CHUNK_BYTES)
    silent = [socket.create_connection(machine.address) for machine in machines]
    for machine in machines:
        with pytest.raises(LinkRefused, match="wrong token"):
            dial(machine.address, Credentials(run_id, b"another token"), 5.0)
        for hostile in (b"GET / HTTP/1.1\r\n\r\n" * 4, HEADER.pack(MAGIC, Kind.PROOF, 2**31, 0, 0)):
            with socket.create_connection(machine.address) as peer:
                peer.sendall(hostile)
        for cause in ("wrong token", "garbage", "oversized frame"):
            wait_until(cause, lambda m=machine, c=cause: any(c in told["cause"] for told in m.told("PeerRefused")))
    source.opened.set()
    assert sending.outcome() is None
    for machine in machines:
        machine.wait_complete(1)
        assert machine.told("UpstreamLost") + machine.told("NextLost") == []
        with lease(run_id, machine.machine, TOKEN, 1, 5.0) as leased:
            assert leased.data == source.view
    for connection in silent:
        connection.close()
