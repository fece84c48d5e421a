"""Gives every relay test a run of its own, so that tests never meet on a socket name."""

import uuid
from collections.abc import Callable, Iterator

import pytest

from laminar.config import RelayConfig
from tests.relay.relay_machines import TOKEN, LocalRelay, RelayProcess


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def start_machine(run_id: str) -> Iterator[Callable[..., RelayProcess]]:
    """Starts the relay of one machine in a process of its own; all are ended after the test."""
    started: list[RelayProcess] = []

    def start(machine: int, config: RelayConfig | None = None) -> RelayProcess:
        started.append(RelayProcess(machine, run_id, config or RelayConfig()))
        return started[-1]

    yield start
    for machine in started:
        machine.end()


@pytest.fixture
def start_relay(run_id: str) -> Iterator[Callable[..., LocalRelay]]:
    """Starts a relay inside the test's own process; all are closed after the test."""
    started: list[LocalRelay] = []

    def start(machine: int = 0, config: RelayConfig | None = None, token: bytes = TOKEN) -> LocalRelay:
        started.append(LocalRelay(machine, run_id, config or RelayConfig(), token))
        return started[-1]

    yield start
    for relay in started:
        relay.relay.close()
