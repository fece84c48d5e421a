"""Hands versions over through an emulated link: the trainer's sender, but for its transport, in this process."""

import mmap
import time

from laminar.bench.emulated_transport import EmulatedTransport, Emulation
from laminar.config import RelayConfig
from laminar.relay.chunks import best_chunk_bytes
from laminar.relay.forward import Forwarder
from laminar.relay.handshake import Credentials
from laminar.relay.keeper import SenderStatus
from laminar.relay.manifest import Manifest, Probe
from laminar.relay.orders import Send
from laminar.relay.sender import Desk, SlotSource

NUM_SLOTS = 2


class EmulatedTrainer:
    """Nothing is copied at a hand-over but the version's number into one of two slots."""

    def __init__(self, credentials: Credentials, config: RelayConfig, payload_bytes: int, emulation: Emulation) -> None:
        self._config = config
        self._payload_bytes = payload_bytes
        self._delivered = self._newest = -1
        self._sent_bytes = 0
        self._slots = [mmap.mmap(-1, payload_bytes) for _ in range(NUM_SLOTS)]
        self._desk = Desk(lambda _answer: None)
        for slot, mapping in enumerate(self._slots):
            mapping[:] = bytes(payload_bytes)
            self._desk.add_slot(slot, mapping)
        self._forwarder: Forwarder[SlotSource] = Forwarder(
            self._desk,
            credentials,
            EmulatedTransport(emulation),
            answer_deadline_s=config.publish_deadline_s,
            on_progress=self._note_progress,
            on_lost=lambda _address, _cause: None,
            on_delivered=self._note_delivered,
        )

    def set_master(self, address: tuple[str, int] | None, epoch: int) -> None:
        self._forwarder.set_next(address, epoch)

    def hand_over(self, version: int, num_relays: int) -> float:
        """Returns the seconds that it took."""
        started = time.monotonic()
        slot = version % NUM_SLOTS
        self._slots[slot][:8] = version.to_bytes(8, "little")
        chunk_bytes = self._config.chunk_bytes or best_chunk_bytes(
            self._payload_bytes,
            num_relays,
            link_startup_s=self._config.link_startup_s,
            link_bytes_per_s=self._config.link_bytes_per_s,
        )
        manifest = Manifest(version, version, self._payload_bytes, chunk_bytes, (), Probe((), (), 1e-4))
        self._newest = version
        self._desk.put(Send(slot, manifest, None))
        return time.monotonic() - started

    def status(self) -> SenderStatus:
        if self._newest <= self._delivered:
            return SenderStatus(None, 0, False)
        return SenderStatus(self._newest, self._sent_bytes, self._forwarder.next_is_lost)

    def close(self) -> None:
        self._forwarder.close()

    def _note_progress(self, version: int, num_bytes: int) -> None:
        self._sent_bytes = num_bytes if version == self._newest else 0

    def _note_delivered(self, source: SlotSource, newest: int, seconds: float) -> None:
        self._delivered = newest
