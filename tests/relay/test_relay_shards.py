"""Several trainer ranks publish what they hold; the master relay puts it together, and nothing is gathered anywhere."""

import threading
from collections.abc import Callable, Iterator
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.config import RelayConfig
from laminar.relay.happenings import UpstreamLost
from laminar.relay.layout import TensorForm, laid_out_bytes, lay_out
from laminar.relay.lease import lease
from laminar.relay.manifest import Probe
from laminar.relay.publish import Publisher
from laminar.relay.shards import Body, Rows, Shard, check_cover, check_shard, plan_shard
from laminar.relay.views import views_of
from tests.relay.relay_machines import TOKEN, LocalRelay

PROBE = Probe((), (), 1e-4)
StartRelay = Callable[..., LocalRelay]


def model(version: float) -> dict[str, torch.Tensor]:
    """Odd sizes, a scalar, an empty tensor, fewer rows than ranks, and one that every rank has whole."""
    return {
        "embed": torch.arange(37 * 5, dtype=torch.float32).view(37, 5) + version,
        "scale": torch.tensor(version),
        "none": torch.empty(0, 3),
        "two_rows": torch.arange(14, dtype=torch.float32).view(2, 7) - version,
        "steps": torch.tensor([3, 4, int(version)], dtype=torch.int64),
        "big": torch.arange(40_001, dtype=torch.float32) * version,
    }


def rows_of(shape: tuple[int, ...], rank: int, num_ranks: int) -> Rows:
    """As FSDP2 does: equal pieces of dimension 0, rounded up, so that the last ranks may have none."""
    each = -(-shape[0] // num_ranks)
    first = min(rank * each, shape[0])
    return Rows(shape, first, min(each, shape[0] - first))


def sharded(
    tensors: dict[str, torch.Tensor], rank: int, num_ranks: int
) -> tuple[dict[str, torch.Tensor], dict[str, Rows]]:
    rows = {
        name: rows_of(tuple(tensor.shape), rank, num_ranks)
        for name, tensor in tensors.items()
        if name not in ("scale", "steps")
    }
    held = {
        name: tensor[rows[name].first : rows[name].first + rows[name].num_rows] if name in rows else tensor
        for name, tensor in tensors.items()
    }
    return held, rows


class Ranks:
    """The publishers of a trainer's ranks, in this process."""

    def __init__(self, run_id: str, num_ranks: int) -> None:
        config = RelayConfig(chunk_bytes=1 << 12)
        self.publishers = [Publisher(run_id, TOKEN, config, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
        self.num_ranks = num_ranks

    def set_master(self, address: tuple[str, int], epoch: int) -> None:
        for publisher in self.publishers:
            publisher.set_master(address, epoch=epoch)

    def hand_over(self, version: int, only: tuple[int, ...] | None = None) -> None:
        for rank in range(self.num_ranks) if only is None else only:
            held, rows = sharded(model(float(version)), rank, self.num_ranks)
            publisher = self.publishers[rank]
            publisher.prepare(held.items(), dtype=torch.float32, rows=rows)
            publisher.hand_over(held.items(), version=version, step=version, probe=PROBE, dtype=torch.float32)


@pytest.fixture
def start_ranks(run_id: str) -> Iterator[Callable[[int], Ranks]]:
    torch.set_num_threads(1)
    started: list[Ranks] = []

    def start(num_ranks: int) -> Ranks:
        started.append(Ranks(run_id, num_ranks))
        return started[-1]

    yield start
    for ranks in started:
        for publisher in ranks.publishers:
            publisher.close()


def assert_serves(run_id: str, machine: int, version: int) -> None:
    with lease(run_id, machine, TOKEN, version, 10.0) as leased:
        views = views_of(leased)
        assert list(views) == list(model(1.0))
        for name, tensor in model(float(version)).items():
            assert torch.equal(views[name], tensor), name
        views.clear()


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_what_the_ranks_hold_arrives_as_one_whole_everywhere(
    start_relay: StartRelay, start_ranks: Callable[[int], Ranks], run_id: str, num_ranks: int
):
    relays = [start_relay(0), start_relay(1)]
    relays[0].relay.set_next(relays[1].address, 1)
    ranks = start_ranks(num_ranks)
    ranks.set_master(relays[0].address, 1)
    for version in (1, 2, 3):
        ranks.hand_over(version)
        for relay in relays:
            relay.wait_complete(version)
            assert_serves(run_id, relay.relay.machine, version)
    for relay in relays:
        assert relay.told(UpstreamLost) == []


def test_a_version_is_shown_to_nobody_before_the_last_rank_has_sent_its_part(
    start_relay: StartRelay, start_ranks: Callable[[int], Ranks], run_id: str
):
    relay, ranks = start_relay(), start_ranks(3)
    ranks.set_master(relay.address, 1)
    ranks.hand_over(1, only=(0, 2))
    threading.Event().wait(0.5)
    assert relay.relay.status().versions == ()
    ranks.hand_over(1, only=(1,))
    relay.wait_complete(1)
    assert_serves(run_id, 0, 1)


def test_a_rank_s_part_that_is_overtaken_is_never_mixed_with_the_next_version(
    start_relay: StartRelay, start_ranks: Callable[[int], Ranks], run_id: str
):
    relay, ranks = start_relay(), start_ranks(3)
    ranks.set_master(relay.address, 1)
    ranks.hand_over(1, only=(0,))
    ranks.hand_over(2, only=(1, 2))
    ranks.hand_over(2, only=(0,))
    relay.wait_complete(2)
    assert relay.relay.status().versions == (2,)
    assert_serves(run_id, 0, 2)


def test_a_new_master_goes_on_with_what_the_chain_had_brought_it(
    start_relay: StartRelay, start_ranks: Callable[[int], Ranks], run_id: str
):
    first, second = start_relay(0), start_relay(1)
    first.relay.set_next(second.address, 1)
    ranks = start_ranks(2)
    ranks.set_master(first.address, 1)
    ranks.hand_over(1, only=(0,))
    threading.Event().wait(0.3)
    first.relay.close()
    ranks.set_master(second.address, 2)
    ranks.hand_over(1, only=(1,))
    second.wait_complete(1)
    assert_serves(run_id, 1, 1)


def test_rows_that_are_not_those_of_the_whole_are_refused_by_name(start_ranks: Callable[[int], Ranks]):
    (publisher, _) = start_ranks(2).publishers
    with pytest.raises(ValueError, match=r"tensor 'w' of shape \(3, 2\) is not rows 0 to 2 of one of shape \(4, 2\)"):
        publisher.prepare([("w", torch.ones(3, 2))], dtype=torch.float32, rows={"w": Rows((4, 2), 0, 2)})


# ----------------------------------------------------------------------------------------------------- the pure part


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], int]:
    shapes = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=6))
    return shapes, draw(st.integers(1, 6))


@given(layouts(), st.data())
def test_shards_are_a_whole_and_bodies_know_where_their_bytes_lie(layout, data):
    shapes, num_ranks = layout
    forms = [TensorForm(str(i), "float32", shape) for i, shape in enumerate(shapes)]
    entries = lay_out((form, "float32", 4) for form in forms)
    whole_bytes = laid_out_bytes(entries)
    is_sharded = [data.draw(st.booleans()) for _ in shapes]
    shards = [
        plan_shard(
            entries,
            {str(i): rows_of(s, rank, num_ranks) for i, s in enumerate(shapes) if is_sharded[i]},
            rank=rank,
            num_ranks=num_ranks,
            whole_bytes=whole_bytes,
        )
        for rank in range(num_ranks)
    ]
    check_cover(shards, whole_bytes)
    for shard in shards:
        check_shard(shard, whole_bytes)
        body = Body(shard)
        places = [place for offset, n in shard.ranges for place in range(offset, offset + n)]
        assert body.num_bytes == len(places)
        start = data.draw(st.integers(0, len(places)))
        stop = data.draw(st.integers(start, len(places)))
        assert [p for span in body.spans(start, stop) for p in range(span.start, span.stop)] == places[start:stop]
        assert body.frontier(start, whole_bytes) == (places[start] if start < len(places) else whole_bytes)
        offset = data.draw(st.integers(0, whole_bytes))
        assert body.num_bytes_below(offset) == sum(place < offset for place in places)


@pytest.mark.parametrize(
    ("ranges", "complaint"),
    [
        ([((0, 10),), ((20, 12),)], "no rank sends the bytes from 10 to 20"),
        ([((0, 20),), ((10, 22),)], "rank 1 and another both send the bytes from 10 to 20"),
        ([((0, 10),), ((10, 10),)], "no rank sends the bytes from 20 to 32"),
    ],
)
def test_shards_that_are_no_whole_are_refused_by_place(ranges, complaint: str):
    shards = [Shard(rank, len(ranges), tuple(one)) for rank, one in enumerate(ranges)]
    with pytest.raises(ValueError, match=complaint):
        check_cover(shards, 32)


@pytest.mark.parametrize(
    "shard",
    [Shard(2, 2, ()), Shard(-1, 2, ()), Shard(0, 2, ((0, 0),)), Shard(0, 2, ((0, 8), (4, 8))), Shard(0, 2, ((30, 8),))],
)
def test_a_shard_that_cannot_be_is_refused(shard: Shard):
    with pytest.raises(ValueError, match="rank"):
        check_shard(shard, 32)


def test_bodies_of_many_ranges_start_where_the_one_before_ends():
    sizes = [3, 5, 7]
    shard = Shard(0, 1, tuple((start * 10, size) for start, size in zip(accumulate([0, *sizes]), sizes, strict=False)))
    assert Body(shard).spans(2, 9) == [slice(2, 3), slice(30, 35), slice(80, 81)]
