"""Runs relays for the tests, in processes or in this one, and speaks to them as a trainer's sender would."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from laminar.config import RelayConfig
from laminar.relay.chunks import chunk_checksum, chunk_span, combine_checksums, count_chunks
from laminar.relay.handshake import Credentials, dial
from laminar.relay.happenings import RelayHappening
from laminar.relay.manifest import Manifest, Probe
from laminar.relay.relay import Relay, RelayStatus
from laminar.relay.shards import Shard
from laminar.relay.stream import push
from laminar.relay.transport import SocketTransport, Transport

ROOT = Path(__file__).parents[2]
TOKEN = b"the token of this test's run"
DEADLINE_S = 20.0
CHUNK_BYTES = 1 << 16


def wait_until(what: str, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    until = time.monotonic() + deadline_s
    while not (found := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"{what}: not within {deadline_s:g} s")
        time.sleep(0.002)
    return found


def manifest_of(version: int, num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    return Manifest(version, version, num_bytes, chunk_bytes, (), Probe((1, 2), (-0.5,), 1e-4))


def pattern_of(version: int, num_bytes: int) -> bytes:
    """Bytes that differ from version to version and from place to place, so that any mixture shows."""
    words = np.arange(num_bytes // 8, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(version)
    return words.tobytes()


class GatedSource:
    """A version in memory that is handed out only up to a chunk, until the gate is lifted."""

    shard: Shard | None = None

    def __init__(self, manifest: Manifest, data: bytes, gate: int | None = None) -> None:
        self.manifest = manifest
        self.view = memoryview(data)
        self.gate = gate
        self.opened = threading.Event()
        if gate is None:
            self.opened.set()

    def wait_chunk(self, index: int, still_wanted: Callable[[], bool]) -> int:
        if self.gate is not None and index >= self.gate:
            assert self.opened.wait(DEADLINE_S), "nobody lifted the gate"
        return self.chunk_checksum(index)

    def wait_complete(self, still_wanted: Callable[[], bool]) -> int:
        num_chunks = count_chunks(self.manifest.num_bytes, self.manifest.chunk_bytes)
        return combine_checksums([self.chunk_checksum(index) for index in range(num_chunks)])

    def chunk_checksum(self, index: int) -> int:
        return chunk_checksum(self.view[chunk_span(index, self.manifest.num_bytes, self.manifest.chunk_bytes)])


def send(
    address: tuple[str, int],
    run_id: str,
    source: GatedSource,
    *,
    epoch: int = 1,
    token: bytes = TOKEN,
    transport: Transport | None = None,
    beside: bool = False,
) -> None:
    """What a trainer's sender does for one version; raises what it would see."""
    link = dial(address, Credentials(run_id, token), 5.0)
    try:
        push(
            link,
            source,
            epoch,
            transport or SocketTransport(),
            answer_deadline_s=DEADLINE_S,
            still_wanted=lambda: True,
            on_progress=lambda _num_bytes: None,
            beside=beside,
        )
    finally:
        link.close()


def send_version(address: tuple[str, int], run_id: str, version: int, num_bytes: int, *, epoch: int = 1) -> bytes:
    data = pattern_of(version, num_bytes)
    send(address, run_id, GatedSource(manifest_of(version, num_bytes), data), epoch=epoch)
    return data


class InBackground(threading.Thread):
    """Runs a call in a thread; `outcome` joins it and returns its exception, if it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:  # noqa: BLE001 - handed to the test by outcome()
            self._error = error

    def outcome(self) -> Exception | None:
        self.join(DEADLINE_S)
        assert not self.is_alive(), "the call is still running"
        return self._error


class LocalRelay:
    """A relay in this process, with its happenings."""

    def __init__(self, machine: int, run_id: str, config: RelayConfig, token: bytes = TOKEN) -> None:
        self.happenings: list[RelayHappening] = []
        self.relay = Relay(machine, run_id, token, config, self.happenings.append)

    @property
    def address(self) -> tuple[str, int]:
        return self.relay.address

    def told(self, kind: type[RelayHappening]) -> list[Any]:
        return [happening for happening in list(self.happenings) if type(happening) is kind]

    def wait_told(self, kind: type[RelayHappening], **fields: object) -> Any:
        def find() -> Any:
            return next((one for one in self.told(kind) if fields.items() <= msgspec.structs.asdict(one).items()), None)

        return wait_until(f"{kind.__name__} {fields} among {self.happenings}", find)

    def wait_complete(self, version: int) -> None:
        wait_until(f"version {version} complete", lambda: version in self.relay.status().versions)


class RelayProcess:
    """A machine's relay in a process of its own (laminar.bench.relay_process), told what to do over its pipes."""

    def __init__(self, machine: int, run_id: str, config: RelayConfig) -> None:
        self.machine = machine
        self.happenings: list[dict[str, Any]] = []
        self._replies: list[Any] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "laminar.bench.relay_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        threading.Thread(target=self._read, daemon=True).start()
        host, port = self._ask(
            {"machine": machine, "run_id": run_id, "token": TOKEN.hex(), "config": config.model_dump(mode="json")}
        )
        self.address: tuple[str, int] = (host, port)

    def set_next(self, address: tuple[str, int] | None, epoch: int) -> None:
        self._ask({"set_next": address, "epoch": epoch})

    def retain(self, versions: list[int]) -> None:
        self._ask({"retain": versions})

    def send_version(self, version: int, address: tuple[str, int]) -> None:
        self._ask({"send_version": version, "to": address})

    def status(self) -> RelayStatus:
        return msgspec.convert(self._ask({"status": True}), RelayStatus)

    def told(self, kind: str, **fields: object) -> list[dict[str, Any]]:
        with self._changed:
            return [one for one in self.happenings if {"type": kind, **fields}.items() <= one.items()]

    def wait_told(self, kind: str, **fields: object) -> dict[str, Any]:
        return wait_until(
            f"{kind} {fields} from machine {self.machine}", lambda: next(iter(self.told(kind, **fields)), None)
        )

    def wait_complete(self, version: int) -> None:
        self.wait_told("VersionComplete", version=version)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def end(self) -> None:
        """Close it as its owner would, unless it was killed; it must end by itself."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                status = self._process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise
            assert status == 0, f"the relay of machine {self.machine} ended with {status}"

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        with self._changed:
            assert self._changed.wait_for(lambda: self._replies, DEADLINE_S), f"no reply to {order}"
            return self._replies.pop(0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                if "reply" in message:
                    self._replies.append(message["reply"])
                else:
                    self.happenings.append(message)
                self._changed.notify_all()
