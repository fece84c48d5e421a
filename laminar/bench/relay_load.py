"""Measures a replica's load: from asking its machine's relay to the last tensor copied, beside a copy in memory."""

import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from laminar.bench.fleet import TOKEN, Fleet
from laminar.bench.machines import loopback
from laminar.config import RelayConfig
from laminar.relay.chunks import version_checksum
from laminar.relay.lease import Reader
from laminar.relay.manifest import LeasedVersion
from laminar.relay.views import views_of

NUM_ROUNDS = 9
DEADLINE_S = 60.0


def load_s(payload_bytes: int) -> Iterator[tuple[str, float, float]]:
    """(method, seconds, seconds of a copy in memory), medians of interleaved rounds.

    `load`: lease, checksum of every byte, copy. `load_unverified`: without the checksum.
    """
    torch.set_num_threads(1)
    fleet = Fleet(loopback(2), RelayConfig(), payload_bytes)
    try:
        handed_over = fleet.publish(1)
        fleet.wait_complete(handed_over.version, fleet.relays, DEADLINE_S)
        reader = Reader(fleet.run_id, 1, bytes.fromhex(TOKEN))
        with reader.lease(1, DEADLINE_S) as leased:
            sources = {entry.name: torch.ones(entry.shape) for entry in leased.manifest.tensors}
        targets = {name: torch.zeros_like(tensor) for name, tensor in sources.items()}
        times: dict[str, list[float]] = {"copy": [], "load": [], "load_unverified": []}
        for _ in range(NUM_ROUNDS):
            for method, verify in (("load", True), ("load_unverified", False)):
                began_s = time.perf_counter()
                with reader.lease(1, DEADLINE_S) as leased:
                    if verify:
                        assert version_checksum(leased.data, leased.manifest.chunk_bytes) == leased.checksum
                    _copy(leased, targets)
                times[method].append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            for name, source in sources.items():
                targets[name].copy_(source)
            times["copy"].append(time.perf_counter() - began_s)
        reader.close()
    finally:
        fleet.close()
    one_copy_s = statistics.median(times["copy"])
    for method in ("load", "load_unverified"):
        yield method, statistics.median(times[method]), one_copy_s


def _copy(leased: LeasedVersion, targets: dict[str, Tensor]) -> None:
    for name, view in views_of(leased).items():
        targets[name].copy_(view)
