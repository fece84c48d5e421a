"""The repack plan, replica by replica."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from laminar.config import Config, DataConfig, ModelConfig
from laminar.control.messages import CommandId, MachineId, ReplicaId, TrajectoryId
from laminar.control.repack import Migration, check, plan_repack
from laminar.control.state import ClusterState, Replica

CONFIG = Config(model=ModelConfig(path=Path("unused")), data=DataConfig(train_files=(Path("unused"),)))


def make_replica(id: int, num_trajectories: int, kv_utilization: float, *, version: int = 1, bound: int = 8) -> Replica:
    """A replica in its tail."""
    return Replica(
        ReplicaId(id),
        MachineId(0),
        0.0,
        started=True,
        version=version,
        kv_capacity_tokens=1000,
        decode_batch_max=bound,
        kv_utilization=kv_utilization,
        in_tail=True,
        trajectories={TrajectoryId(100 * id + i): None for i in range(num_trajectories)},
    )


def plan(*replicas: Replica) -> list[tuple[int, int]]:
    return [(move.source, move.target) for move in plan_repack(replicas, kv_utilization_max=0.99)]


def test_the_lightest_replica_moves_to_the_fullest_that_has_room():
    assert plan(make_replica(0, 1, 0.1), make_replica(1, 2, 0.2), make_replica(2, 3, 0.3)) == [(0, 2), (1, 2)]


def test_versions_do_not_mix():
    assert plan(make_replica(0, 1, 0.1), make_replica(1, 1, 0.1, version=2)) == []


def test_a_target_holds_at_most_its_decode_batch_bound():
    assert plan(make_replica(0, 5, 0.1), make_replica(1, 6, 0.2)) == []


def test_a_target_is_not_filled_beyond_its_kv_capacity():
    assert plan(make_replica(0, 1, 0.5), make_replica(1, 1, 0.6)) == []


def test_a_replica_is_source_or_target_never_both():
    moves = plan(*(make_replica(i, 2, 0.1 * (i + 1)) for i in range(4)))
    assert not {s for s, _ in moves} & {t for _, t in moves}


def test_who_has_work_waiting_evaluates_loads_or_receives_is_left_alone():
    waiting, evaluating, loading, receiving = (make_replica(i, 1, 0.1) for i in range(4))
    waiting.in_tail = False
    evaluating.evaluating = True
    loading.loading = CommandId(1)
    receiving.inbound[TrajectoryId(9)] = None
    assert plan(waiting, evaluating, loading, receiving, make_replica(4, 1, 0.1)) == []


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.floats(0.01, 0.98), st.integers(1, 2)),
        min_size=2,
        max_size=12,
    )
)
def test_a_plan_never_overfills(shapes: list[tuple[int, float, int]]):
    replicas = {i: make_replica(i, n, kv, version=v) for i, (n, kv, v) in enumerate(shapes)}
    moves: list[Migration] = plan_repack(replicas.values(), kv_utilization_max=0.99)
    assert len({m.source for m in moves}) == len(moves)
    for target in {m.target for m in moves}:
        received = [replicas[m.source] for m in moves if m.target == target] + [replicas[target]]
        assert sum(len(r.trajectories) for r in received) <= 8
        assert sum(r.kv_utilization for r in received) <= 0.99 + 1e-9
        assert len({r.version for r in received}) == 1


def test_one_whose_waiting_trajectories_lost_their_kv_is_no_candidate():
    """What it holds would not tell how much room they need elsewhere."""
    without, other = make_replica(0, 2, 0.1), make_replica(1, 2, 0.2)
    assert plan(without, other) == [(0, 1)]
    without.num_waiting_without_kv = 1
    assert plan(without, other) == []


def test_kv_that_was_given_up_by_those_that_wait_is_no_tail():
    """Utilization falls, and nobody has finished."""
    replica = make_replica(0, 4, 0.3)
    replica.in_tail, replica.kv_utilization_at_check = False, 0.6
    replica.num_waiting_without_kv = 2
    state = ClusterState(replicas={replica.id: replica})
    check(state, CONFIG, now=5.0)
    assert not replica.in_tail
    replica.num_waiting_without_kv, replica.kv_utilization = 0, 0.2
    check(state, CONFIG, now=10.0)
    assert replica.in_tail


def test_trajectories_that_wait_count_against_the_decode_batch_bound():
    waiting = make_replica(0, 5, 0.1)
    assert plan(waiting, make_replica(1, 2, 0.2, bound=6)) == [(1, 0)]
    assert plan(waiting, make_replica(1, 4, 0.2, bound=8)) == []


def best_fit_by_search(replicas: list[Replica]) -> list[tuple[int, int]]:
    """The same rule, read off its definition: for each source all targets are looked at."""
    tails = sorted(replicas, key=lambda r: (r.kv_utilization, r.id))
    kv_tokens = {r.id: r.kv_utilization * r.kv_capacity_tokens for r in tails}
    num_held = {r.id: len(r.trajectories) for r in tails}
    emptied, receiving, moves = [], [], []
    for source in tails:
        fits = [
            target
            for target in tails
            if target.id != source.id
            and target.id not in emptied
            and target.version == source.version
            and kv_tokens[target.id] + kv_tokens[source.id] <= 0.99 * target.kv_capacity_tokens
            and num_held[target.id] + num_held[source.id] <= target.decode_batch_max
        ]
        if source.id not in receiving and fits:
            target = max(fits, key=lambda r: (kv_tokens[r.id], r.id))
            kv_tokens[target.id] += kv_tokens[source.id]
            num_held[target.id] += num_held[source.id]
            emptied.append(source.id)
            receiving.append(target.id)
            moves.append((source.id, target.id))
    return moves


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 20), st.integers(1, 3), st.integers(7, 9)), max_size=30))
def test_the_plan_is_that_of_a_search_through_all_targets(
    shapes: list[tuple[int, int, int, int]],
):
    """Replicas of two sizes and three versions, many of them equally full."""
    replicas = [
        make_replica(i, held, kv / 20, version=version, bound=bound)
        for i, (held, kv, version, bound) in enumerate(shapes)
    ]
    for replica in replicas[::2]:
        replica.kv_capacity_tokens *= 2
    candidates = [r for r in replicas if len(r.trajectories) < r.decode_batch_max]
    assert plan(*replicas) == best_fit_by_search(candidates)
