"""On a machine with an accelerator: publishing from it and loading into it, through segments that are pinned once."""

import time
from collections.abc import Callable

import pytest
import torch

from laminar.config import RelayConfig
from laminar.relay.lease import Reader
from laminar.relay.manifest import Probe
from laminar.relay.publish import Publisher
from laminar.relay.views import views_of
from tests.relay.relay_machines import TOKEN, LocalRelay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
NUM_BYTES = 1 << 30
GB_PER_S_MIN = 5.0
"""Pageable memory stays below; PCIe 3 does more than twice as much."""


def test_weights_go_from_the_device_to_the_device_in_bf16_by_pinned_memory(
    start_relay: Callable[..., LocalRelay], run_id: str
):
    relay, publisher = start_relay(), Publisher(run_id, TOKEN, RelayConfig())
    publisher.set_master(relay.address, epoch=1)
    weights = [(f"w{index}", torch.randn(NUM_BYTES // 16, device="cuda")) for index in range(8)]
    reader = Reader(run_id, 0, TOKEN, pin=True)
    targets = {name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in weights}
    for version in (1, 2):
        stall_s = publisher.hand_over(
            weights, version=version, step=version, probe=Probe((), (), 5e-2), dtype=torch.bfloat16
        )
        relay.wait_complete(version)
        with reader.lease(version, 30.0) as leased:
            views = views_of(leased)
            began_s = time.perf_counter()
            for name, view in views.items():
                targets[name].copy_(view, non_blocking=True)
            torch.cuda.synchronize()
            load_s = time.perf_counter() - began_s
            views.clear()
            del view
        for name, tensor in weights:
            assert torch.equal(targets[name], tensor.to(torch.bfloat16))
    print(f"hand-over {NUM_BYTES / stall_s / 1e9:.1f} GB/s, load {NUM_BYTES / load_s / 1e9:.1f} GB/s")
    assert NUM_BYTES / load_s / 1e9 > GB_PER_S_MIN
    reader.close()
    publisher.close()
