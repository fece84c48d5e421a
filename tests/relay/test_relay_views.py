"""A replica of several tensor-parallel ranks reads its slices, fused or split, from what was published whole."""

from collections.abc import Callable

import pytest
import torch

from laminar.config import RelayConfig
from laminar.relay.lease import lease
from laminar.relay.manifest import Probe
from laminar.relay.publish import Publisher
from laminar.relay.views import Split, fill, slice_of, views_of
from tests.relay.relay_machines import TOKEN, LocalRelay

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 8, 4, 2, 2, 12
WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(7))
    for name, shape in {
        "q": (HEADS * HEAD_DIM, HIDDEN),
        "k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "o": (HIDDEN, HEADS * HEAD_DIM),
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
        "norm": (HIDDEN,),
    }.items()
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_of_a_replica_gets_its_slices_and_together_they_are_the_model(
    start_relay: Callable[..., LocalRelay], run_id: str, num_ranks: int
):
    relay = start_relay()
    publisher = Publisher(run_id, TOKEN, RelayConfig())
    publisher.set_master(relay.address, epoch=1)
    publisher.hand_over(WEIGHTS.items(), version=1, step=1, probe=Probe((), (), 1e-4), dtype=torch.float32)
    relay.wait_complete(1)
    kv = Split(0, num_parts=min(KV_HEADS, num_ranks))
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(8))
    mlp_out = torch.zeros(5, HIDDEN)
    for rank in range(num_ranks):
        at = {"rank": rank, "num_ranks": num_ranks}
        gate_up = torch.zeros(2 * INNER // num_ranks, HIDDEN)
        key_value = torch.zeros(2 * KV_HEADS * HEAD_DIM // min(KV_HEADS, num_ranks), HIDDEN)
        with lease(run_id, 0, TOKEN, 1, 5.0) as leased:
            views = views_of(leased)
            fill(gate_up, ("gate", "up"), views, Split(0), **at)
            fill(key_value, ("k", "v"), views, kv, **at)
            down = slice_of("down", views["down"], Split(1), **at).clone()
            assert torch.equal(slice_of("norm", views["norm"], None, **at), WEIGHTS["norm"])
            views.clear()
        gate, up = gate_up.chunk(2)
        mlp_out += ((x @ gate.T) * (x @ up.T)) @ down.T
        part = rank * min(KV_HEADS, num_ranks) // num_ranks
        expected = torch.cat([WEIGHTS[name].chunk(min(KV_HEADS, num_ranks))[part] for name in ("k", "v")])
        assert torch.equal(key_value, expected)
    whole = ((x @ WEIGHTS["gate"].T) * (x @ WEIGHTS["up"].T)) @ WEIGHTS["down"].T
    assert torch.allclose(mlp_out, whole, atol=1e-4)
    publisher.close()


def test_a_slice_is_a_view_of_the_very_bytes():
    tensor = torch.arange(12.0).view(4, 3)
    assert slice_of("w", tensor, Split(0), rank=1, num_ranks=2).data_ptr() == tensor[2].data_ptr()


def test_what_cannot_be_shared_out_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"tensor 'w': dimension 0 of \(5, 2\) cannot be shared out as 2 parts among 2"
    ):
        slice_of("w", torch.ones(5, 2), Split(0), rank=0, num_ranks=2)
    with pytest.raises(ValueError, match="3 parts among 4"):
        slice_of("w", torch.ones(6, 2), Split(0, num_parts=3), rank=0, num_ranks=4)


def test_parts_that_do_not_fill_a_parameter_are_refused_before_anything_is_written():
    target = torch.zeros(5, 2)
    with pytest.raises(ValueError, match=r"gate \(2, 2\), up \(2, 2\) do not fill a parameter of shape \(5, 2\)"):
        fill(target, ("gate", "up"), {"gate": torch.ones(2, 2), "up": torch.ones(2, 2)}, Split(0))
    with pytest.raises(ValueError, match="tensor 'up' is not in this version"):
        fill(target, ("gate", "up"), {"gate": torch.ones(2, 2)}, Split(0))
    assert not target.any()
