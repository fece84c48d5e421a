"""An older version goes from one machine to another, beside what the chain brings."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from laminar.relay.lease import VersionGone
from laminar.relay.links import LinkRefused
from tests.relay.relay_machines import (
    CHUNK_BYTES,
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
from tests.relay.test_relay_chain import assert_holds

NUM_BYTES = 40 * CHUNK_BYTES + 8
StartRelay = Callable[..., LocalRelay]


def test_an_older_version_arrives_where_a_newer_one_is_complete(
    start_machine: Callable[..., RelayProcess], run_id: str
):
    first, late = start_machine(0), start_machine(1)
    old, newest = (send_version(first.address, run_id, version, NUM_BYTES) for version in (1, 2))
    first.set_next(late.address, 1)
    late.wait_complete(2)
    assert late.status().versions == (2,)
    first.send_version(1, late.address)
    assert late.status().versions == (1, 2)
    assert_holds(run_id, 1, 1, old)
    assert_holds(run_id, 1, None, newest)


def test_it_comes_beside_a_version_that_the_chain_is_bringing(start_relay: StartRelay, run_id: str):
    first, late = start_relay(0), start_relay(1)
    old = send_version(first.address, run_id, 1, NUM_BYTES)
    arriving = GatedSource(manifest_of(2, NUM_BYTES), pattern_of(2, NUM_BYTES), gate=25)
    sending = InBackground(lambda: send(late.address, run_id, arriving))
    wait_until("25 chunks", lambda: late.relay.status().incoming_bytes == 25 * CHUNK_BYTES)
    first.relay.send_version(1, late.address)
    assert late.relay.status().versions == (1,)
    assert late.relay.status().incoming_version == 2
    arriving.opened.set()
    assert sending.outcome() is None
    late.wait_complete(2)
    assert_holds(run_id, 1, 1, old)
    assert_holds(run_id, 1, 2, pattern_of(2, NUM_BYTES))


def test_what_is_there_already_is_refused_and_what_is_gone_is_an_error(start_relay: StartRelay, run_id: str):
    first, second = start_relay(0), start_relay(1)
    for relay in (first, second):
        send_version(relay.address, run_id, 1, NUM_BYTES)
    with pytest.raises(LinkRefused, match="version 1 is here or arriving already"):
        first.relay.send_version(1, second.address)
    with pytest.raises(VersionGone, match="version 5"):
        first.relay.send_version(5, second.address)


def test_one_that_breaks_off_leaves_nothing_and_can_be_sent_again(start_relay: StartRelay, run_id: str):
    first, second = start_relay(0), start_relay(1)
    data = pattern_of(1, NUM_BYTES)
    source = GatedSource(manifest_of(1, NUM_BYTES), data, gate=25)
    broken = InBackground(lambda: send(second.address, run_id, source, beside=True))
    wait_until("the stream", lambda: second.relay._peers)
    wait_until("chunks", lambda: second.relay.status().num_segments == 1)
    (link,) = second.relay._peers.values()
    link.shutdown()
    source.opened.set()
    assert isinstance(broken.outcome(), OSError)
    wait_until("its end", lambda: not second.relay._peers)
    assert second.relay.status().versions == ()
    send_version(first.address, run_id, 1, NUM_BYTES)
    first.relay.send_version(1, second.address)
    assert_holds(run_id, 1, 1, data)


def test_the_memory_of_one_that_broke_off_is_used_again(start_relay: StartRelay, run_id: str):
    (relay,) = [start_relay(0)]
    for version, _ in pairwise(range(8)):
        source = GatedSource(manifest_of(version, NUM_BYTES), pattern_of(version, NUM_BYTES), gate=3)
        broken = InBackground(lambda source=source: send(relay.address, run_id, source, beside=True))
        wait_until("the stream", lambda: relay.relay._peers)
        for link in list(relay.relay._peers.values()):
            link.shutdown()
        source.opened.set()
        assert isinstance(broken.outcome(), OSError)
        wait_until("its end", lambda: not relay.relay._peers)
    assert relay.relay.status().num_segments <= 1
