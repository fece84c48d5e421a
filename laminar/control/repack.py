"""Repacks: moves the long tails of replicas of one version onto few of them, so that the others can refresh.

Algorithm 1 of the Laminar paper, with one guard added: a replica is source or destination in one plan, never both.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

import msgspec

from laminar.config import Config
from laminar.control.messages import AnyCommand, Release, ReplicaId
from laminar.control.state import Awaited, ClusterState, Replica
from laminar.control.trajectory_state import TrajectoryState

_Place = tuple[float, ReplicaId, float, int]
"""A candidate as a target: KV tokens held, id, KV tokens that it may hold, trajectories it has room for."""


class Migration(msgspec.Struct, frozen=True):
    """Everything that `source` decodes goes on on `target`."""

    source: ReplicaId
    target: ReplicaId


def plan_repack(replicas: Iterable[Replica], *, kv_utilization_max: float) -> list[Migration]:
    """Best-fit packing within each weight version: lightest source first, fullest target that still has room.

    A candidate is in its tail (no work waits, KV utilization has begun to fall) and below its decode batch bound B,
    in which trajectories that wait for a tool count. It holds the KV of all of them, or what it holds would not tell
    how much room they need. A target holds at most B trajectories and `kv_utilization_max` of its KV capacity
    afterwards. O(candidates²) only where the fullest targets have too many trajectories for every source.
    """
    tails = sorted((r for r in replicas if _is_candidate(r)), key=lambda r: (r.kv_utilization, r.id))
    places_by_version: dict[int | None, list[_Place]] = {}
    for replica in tails:
        places_by_version.setdefault(replica.version, []).append(_place(replica, kv_utilization_max))
    for places in places_by_version.values():
        places.sort()
    receiving: dict[ReplicaId, None] = {}
    plan: list[Migration] = []
    for source in tails:
        places = places_by_version[source.version]
        if source.id in receiving or (target := _fullest_that_fits(source, places)) is None:
            continue
        num_kv_tokens, num_held = source.kv_utilization * source.kv_capacity_tokens, len(source.trajectories)
        del places[bisect_left(places, (num_kv_tokens, source.id))]
        del places[bisect_left(places, target)]
        insort(places, (target[0] + num_kv_tokens, target[1], target[2], target[3] - num_held))
        receiving[target[1]] = None
        plan.append(Migration(source.id, target[1]))
    return plan


def check(state: ClusterState, config: Config, now: float) -> None:
    """Sample KV utilization: a replica is in its tail once nothing waits and utilization fell since the last sample.

    That holds until its batch ends: in a tail of few long trajectories utilization rises between two that finish. While
    some wait for a tool without their KV, a fall may be only theirs, and is none.
    """
    state.checked_at_s = now
    for replica in state.replicas.values():
        below = min(config.repack.kv_utilization_max, replica.kv_utilization_at_check)
        if replica.num_waiting or replica.num_waiting_without_kv:
            replica.in_tail = False
        elif replica.trajectories and replica.kv_utilization < below:
            replica.in_tail = True
        replica.kv_utilization_at_check = replica.kv_utilization


def start_repack(state: ClusterState, config: Config, now: float) -> Iterator[AnyCommand]:
    plan = plan_repack(state.replicas.values(), kv_utilization_max=config.repack.kv_utilization_max)
    state.counters.num_repack_plans += bool(plan)
    for move in plan:
        source, target = state.replicas[move.source], state.replicas[move.target]
        ids = tuple(source.trajectories)
        source.releasing = state.expect(
            Awaited.RELEASE, now, config.faults.report_deadline_s, replica=source.id, trajectories=ids
        )
        for id in ids:
            state.trajectories[id].state = TrajectoryState.MOVING
            state.trajectories[id].target = target.id
            target.inbound[id] = None
        state.index.update(source)
        state.index.update(target)
        state.counters.num_repack_moves += 1
        state.counters.num_trajectories_moved += len(ids)
        yield Release(source.releasing, source.id, ids)


def _place(replica: Replica, kv_utilization_max: float) -> _Place:
    num_kv_tokens = replica.kv_utilization * replica.kv_capacity_tokens
    num_kv_tokens_max = kv_utilization_max * replica.kv_capacity_tokens
    return num_kv_tokens, replica.id, num_kv_tokens_max, replica.decode_batch_max - len(replica.trajectories)


def _fullest_that_fits(source: Replica, places: list[_Place]) -> _Place | None:
    """places: those of the source's version, the source's own among them, the fullest last."""
    num_kv_tokens, num_held = source.kv_utilization * source.kv_capacity_tokens, len(source.trajectories)
    for place in reversed(places):
        if num_held <= place[3] and place[0] + num_kv_tokens <= place[2] and place[1] != source.id:
            return place
    return None


def _is_candidate(replica: Replica) -> bool:
    return (
        replica.started
        and replica.in_tail
        and not replica.evaluating
        and replica.loading is None
        and replica.releasing is None
        and not replica.inbound
        and not replica.num_waiting_without_kv
        and 0 < len(replica.trajectories) < replica.decode_batch_max
    )
