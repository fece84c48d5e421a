"""Is a trainer as relays see it, alone: a publisher and some tensors; orders on stdin, what happened on stdout."""

import json
import sys
import threading
import time
from typing import Any

import msgspec
import torch

from laminar.bench.emulated_trainer import EmulatedTrainer
from laminar.bench.emulated_transport import Emulation
from laminar.bench.speech import Speech
from laminar.config import RelayConfig
from laminar.relay.handshake import Credentials
from laminar.relay.manifest import Probe
from laminar.relay.publish import Publisher

REPORT_INTERVAL_S = 0.1
TENSOR_BYTES = 4 << 20
"""Of most tensors: a matrix of a small model."""


class Start(msgspec.Struct):
    """The first line."""

    run_id: str
    token: str
    config: dict[str, Any]
    payload_bytes: int
    emulation: Emulation | None = None


class TrainerProcess:
    """Publishes weights whose every 8-byte word is the version's number."""

    def __init__(self, start: Start) -> None:
        torch.set_num_threads(1)
        self._speech = Speech()
        config, token = RelayConfig(**start.config), bytes.fromhex(start.token)
        self._emulated = start.emulation and EmulatedTrainer(
            Credentials(start.run_id, token), config, start.payload_bytes, start.emulation
        )
        self._publisher = Publisher(start.run_id, token, config)
        self._tensors = [
            (f"layer.{offset // TENSOR_BYTES}", torch.zeros(min(TENSOR_BYTES, start.payload_bytes - offset) // 4))
            for offset in range(0, start.payload_bytes, TENSOR_BYTES)
        ]
        self._copies = [torch.empty_like(tensor) for _, tensor in self._tensors]
        self._publisher.prepare(self._tensors, dtype=torch.float32)
        threading.Thread(target=self._report, daemon=True).start()

    def serve(self) -> None:
        self._speech.reply(None)
        for line in sys.stdin:
            self._speech.reply(self._obey(json.loads(line)))
        self._publisher.close()
        if self._emulated is not None:
            self._emulated.close()

    def _obey(self, order: dict[str, Any]) -> object:
        match order:
            case {"set_master": address, "epoch": epoch}:
                (self._emulated or self._publisher).set_master(tuple(address) if address else None, epoch=epoch)
            case {"hand_over": version, "num_relays": num_relays}:
                return self._hand_over(version, num_relays)
            case {"copy": _}:
                return self._warm_copy_s()
            case _:
                raise AssertionError(f"no such order: {order}")
        return None

    def _hand_over(self, version: int, num_relays: int) -> dict[str, float]:
        if self._emulated is not None:
            return {"stall_s": self._emulated.hand_over(version, num_relays), "at_s": time.monotonic()}
        for _, tensor in self._tensors:
            tensor.view(torch.int32).fill_(version)
        stall_s = self._publisher.hand_over(
            self._tensors,
            version=version,
            step=version,
            probe=Probe((), (), 1e-4),
            dtype=torch.float32,
            num_relays=num_relays,
        )
        return {"stall_s": stall_s, "at_s": time.monotonic()}

    def _warm_copy_s(self) -> float:
        """The same bytes copied into memory that was written before: what a hand-over cannot undercut."""
        for copy, (_, tensor) in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor)
        started = time.monotonic()
        for copy, (_, tensor) in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor)
        return time.monotonic() - started

    def _report(self) -> None:
        while True:
            time.sleep(REPORT_INTERVAL_S)
            status = self._publisher.sender_status() if self._emulated is None else self._emulated.status()
            self._speech.tell({"type": "sender", "status": msgspec.to_builtins(status)})
            for happening in self._publisher.sender_events():
                self._speech.tell({**msgspec.structs.asdict(happening), "type": type(happening).__name__})


if __name__ == "__main__":
    TrainerProcess(msgspec.json.decode(sys.stdin.readline(), type=Start)).serve()
