"""Repacks: moves the long tails of replicas of one version onto few of them, so that the others can refresh.

Algorithm 1 of the Laminar paper, with one guard added: a replica is source or destination in one plan, never both.
"""

from collections.abc import Iterable, Iterator

import msgspec

from laminar.config import Config
from laminar.control.messages import AnyCommand, Release, ReplicaId
from laminar.control.state import Awaited, ClusterState, Replica
from laminar.control.trajectory_state import TrajectoryState


class Migration(msgspec.Struct, frozen=True):
    """Everything that `source` decodes goes on on `target`."""

    source: ReplicaId
    target: ReplicaId


def plan_repack(replicas: Iterable[Replica], *, kv_utilization_max: float) -> list[Migration]:
    """Best-fit packing within each weight version: lightest source first, fullest target that still has room.

    A candidate is in its tail (no work waits, KV utilization has begun to fall) and below its decode batch bound B,
    in which trajectories that wait for a tool count. It holds the KV of all of them, or what it holds would not tell
    how much room they need. A target holds at most B trajectories and `kv_utilization_max` of its KV capacity
    afterwards. O(candidates²).
    """
    tails = sorted((r for r in replicas if _is_candidate(r)), key=lambda r: (r.kv_utilization, r.id))
    kv_tokens = {r.id: r.kv_utilization * r.kv_capacity_tokens for r in tails}
    num_held = {r.id: len(r.trajectories) for r in tails}
    emptied: dict[ReplicaId, None] = {}
    receiving: dict[ReplicaId, None] = {}
    plan: list[Migration] = []
    for source in tails:
        if source.id in receiving:
            continue
        fits = [
            target
            for target in tails
            if target.id != source.id
            and target.id not in emptied
            and target.version == source.version
            and kv_tokens[target.id] + kv_tokens[source.id] <= kv_utilization_max * target.kv_capacity_tokens
            and num_held[target.id] + num_held[source.id] <= target.decode_batch_max
        ]
        if not fits:
            continue
        target = max(fits, key=lambda r: (kv_tokens[r.id], r.id))
        kv_tokens[target.id] += kv_tokens[source.id]
        num_held[target.id] += num_held[source.id]
        emptied[source.id] = receiving[target.id] = None
        plan.append(Migration(source.id, target.id))
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
