"""Is one machine's relay, alone: orders as JSON lines on stdin, replies, happenings and reports on stdout.

For benchmarks and tests, which need relays on emulated machines without a Ray node on each. It ends with its stdin.
"""

import json
import sys
import threading
import time
from typing import Any

import msgspec

from laminar.bench.emulated_transport import EmulatedTransport, Emulation
from laminar.bench.speech import Speech
from laminar.config import RelayConfig
from laminar.relay.chunks import version_checksum
from laminar.relay.happenings import RelayHappening
from laminar.relay.lease import lease
from laminar.relay.relay import Relay

REPORT_INTERVAL_S = 0.1
LEASE_DEADLINE_S = 10.0


class Start(msgspec.Struct):
    """The first line."""

    machine: int
    run_id: str
    token: str
    """In hexadecimal digits."""
    config: dict[str, Any]
    host: str = "127.0.0.1"
    emulation: Emulation | None = None
    reports: bool = False
    """Whether to tell the status ten times a second, and at every happening."""


class RelayProcess:
    def __init__(self, start: Start) -> None:
        self._start = start
        self._speech = Speech()
        self._happened = threading.Event()
        emulation = start.emulation
        self._relay = Relay(
            start.machine,
            start.run_id,
            bytes.fromhex(start.token),
            RelayConfig(**start.config),
            self._tell,
            host=start.host,
            transport=None if emulation is None else EmulatedTransport(emulation),
        )
        if start.reports:
            threading.Thread(target=self._report, daemon=True).start()

    def serve(self) -> None:
        self._speech.reply(self._relay.address)
        for line in sys.stdin:
            self._speech.reply(self._obey(json.loads(line)))
        self._relay.close()

    def _obey(self, order: dict[str, Any]) -> object:
        match order:
            case {"set_next": address, "epoch": epoch}:
                self._relay.set_next(tuple(address) if address else None, epoch)
            case {"retain": versions}:
                self._relay.retain(versions)
            case {"send_version": version, "to": address}:
                self._relay.send_version(version, tuple(address))
            case {"verify": version}:
                return self._verify(version)
            case {"status": _}:
                return msgspec.to_builtins(self._relay.status())
            case _:
                raise AssertionError(f"no such order: {order}")
        return None

    def _verify(self, version: int | None) -> dict[str, object]:
        """What a replica of this machine gets: which version, and whether its bytes are those that were published."""
        start = self._start
        with lease(start.run_id, start.machine, bytes.fromhex(start.token), version, LEASE_DEADLINE_S) as leased:
            whole = version_checksum(leased.data, leased.manifest.chunk_bytes) == leased.checksum
            return {"version": leased.manifest.version, "whole": whole, "checksum": leased.checksum}

    def _tell(self, happening: RelayHappening) -> None:
        self._speech.tell(
            {**msgspec.structs.asdict(happening), "type": type(happening).__name__, "at_s": time.monotonic()}
        )
        self._happened.set()

    def _report(self) -> None:
        while True:
            self._happened.wait(REPORT_INTERVAL_S)
            self._happened.clear()
            self._speech.tell({"type": "report", "status": msgspec.to_builtins(self._relay.status())})


if __name__ == "__main__":
    RelayProcess(msgspec.json.decode(sys.stdin.readline(), type=Start)).serve()
