"""Leads prompt groups through their life: dispatched, finished, scored, buffered, or dropped by name.

Every change of a trajectory's state that the ledger counts is made here.
"""

from collections.abc import Iterator

from laminar.config import Config
from laminar.control.messages import AnyCommand, Assignment, Forget, GroupId, PromptId, TrajectoryId
from laminar.control.staleness import note_finished
from laminar.control.state import ClusterState, Evaluation, Replica
from laminar.control.trajectory_state import UNFINISHED, Group, Segment, Trajectory, TrajectoryState

NUM_FAILURES_MAX = 1
"""Failures of one trajectory that are forgiven with another try."""
GROUP_SIZE_MIN = 2
"""A prompt group with fewer trajectories has no baseline and is not trained."""


def dispatch(
    state: ClusterState, prompt: PromptId, size: int, replica: Replica, now: float, *, evaluation: bool
) -> tuple[Group, list[Assignment]]:
    """Create a prompt group on a replica, at the version that it holds."""
    assert replica.version is not None, f"{replica} would generate without weights"
    segment = Segment(0, replica.version)
    group = Group(GroupId(state.next_group), prompt, evaluation, [], replica.version)
    state.next_group += 1
    state.groups[group.id] = group
    if not evaluation:
        state.num_groups_outstanding += 1
    assignments: list[Assignment] = []
    for _ in range(size):
        id = TrajectoryId(state.next_trajectory)
        state.next_trajectory += 1
        state.trajectories[id] = Trajectory(
            id, group.id, prompt, evaluation, TrajectoryState.QUEUED, replica.id, None, now, [segment]
        )
        group.trajectories.append(id)
        replica.trajectories[id] = None
        assignments.append(Assignment(id, 0, group.id, prompt))
    state.index.update(replica)
    (state.evaluation_ledger if evaluation else state.ledger).dispatched += size
    return group, assignments


def assignment(trajectory: Trajectory) -> Assignment:
    return Assignment(trajectory.id, trajectory.attempt, trajectory.group, trajectory.prompt, trajectory.num_tokens)


def finish(state: ClusterState, trajectory: Trajectory, num_tokens: int, *, truncated: bool) -> None:
    """The response is whole; what is left is its score."""
    leave_replica(state, trajectory)
    trajectory.state = TrajectoryState.FINISHED
    trajectory.num_tokens = num_tokens
    trajectory.drop_empty_segments()
    trajectory.truncated = truncated
    note_finished(state, trajectory)


def score(state: ClusterState, config: Config, trajectory: Trajectory, value: float) -> Iterator[AnyCommand]:
    trajectory.state = TrajectoryState.SCORED
    trajectory.score = value
    if trajectory.evaluation:
        yield from _end_evaluated(state, config, trajectory)
    else:
        yield from _settle(state, config, state.groups[trajectory.group])


def fail(state: ClusterState, config: Config, trajectory: Trajectory, cause: str) -> Iterator[AnyCommand]:
    """A member that fails while it is generated starts once more from its prompt, then is dropped by name."""
    leave_replica(state, trajectory)
    trajectory.num_failures += 1
    if trajectory.num_failures > NUM_FAILURES_MAX:
        yield from drop(state, config, trajectory, cause)
        return
    state.counters.num_trajectories_retried += 1
    trajectory.num_tokens = 0
    trajectory.state = TrajectoryState.QUEUED
    state.homeless[trajectory.id] = None


def restart(state: ClusterState, trajectory: Trajectory) -> None:
    """Its version is gone for good: it starts again, alone, at the newest one."""
    state.counters.num_trajectories_restarted += 1
    trajectory.segments.clear()
    trajectory.num_tokens = 0
    trajectory.state = TrajectoryState.QUEUED


def drop(state: ClusterState, config: Config, trajectory: Trajectory, cause: str) -> Iterator[AnyCommand]:
    """Count it under the kind of its cause (what stands before a colon) and forget it; its group goes on without it."""
    _remove(state, trajectory, cause.partition(":")[0])
    yield Forget(state.new_command(), (trajectory.id,))
    if trajectory.evaluation:
        _close_if_empty(state, _evaluation_of(state, trajectory), trajectory.group)
    else:
        yield from _settle(state, config, state.groups[trajectory.group])


def leave_replica(state: ClusterState, trajectory: Trajectory) -> None:
    """Give up its place on a replica, and the one reserved where it was to go."""
    if trajectory.replica is not None and (replica := state.replicas.get(trajectory.replica)):
        replica.trajectories.pop(trajectory.id, None)
        if not replica.trajectories and not replica.inbound:
            replica.evaluating = replica.in_tail = False
        state.index.update(replica)
    if trajectory.target is not None and (target := state.replicas.get(trajectory.target)):
        target.inbound.pop(trajectory.id, None)
        state.index.update(target)
    state.homeless.pop(trajectory.id, None)
    trajectory.replica = trajectory.target = None


def stay(state: ClusterState, trajectory: Trajectory) -> None:
    """It ended on its replica before it could be moved; what is left is the report of it."""
    if trajectory.target is not None and (target := state.replicas.get(trajectory.target)):
        target.inbound.pop(trajectory.id, None)
        state.index.update(target)
    trajectory.target = None
    trajectory.state = TrajectoryState.DECODING


def forget_trained(state: ClusterState, step: int) -> Iterator[AnyCommand]:
    """A checkpoint covers what was trained up to `step`: it is trained for good."""
    ids: list[TrajectoryId] = []
    covered = [id for id in state.trained if (state.groups[id].trained_step or 0) <= step]
    for id in covered:
        group = state.groups.pop(id)
        for trajectory in group.trajectories:
            del state.trajectories[trajectory]
        ids += group.trajectories
    state.trained = state.trained[len(covered) :]
    state.ledger.trained += len(ids)
    if ids:
        yield Forget(state.new_command(), tuple(ids))


def _settle(state: ClusterState, config: Config, group: Group) -> Iterator[AnyCommand]:
    """When the last member is scored or dropped, the group goes to the buffer, or is dropped by name."""
    members = [state.trajectories[id] for id in group.trajectories]
    if any(m.state in UNFINISHED or m.state is TrajectoryState.FINISHED for m in members):
        return
    if len(members) < GROUP_SIZE_MIN:
        yield from _drop_group(state, group, "group_too_small")
    elif config.buffer.filter_equal_rewards and len({m.score for m in members}) == 1:
        state.num_groups_refilled += 1
        yield from _drop_group(state, group, "equal_rewards")
    else:
        for member in members:
            member.state = TrajectoryState.BUFFERED
        state.buffer.append(group.id)


def _drop_group(state: ClusterState, group: Group, cause: str) -> Iterator[AnyCommand]:
    ids = tuple(group.trajectories)
    for id in ids:
        _remove(state, state.trajectories[id], cause)
    del state.groups[group.id]
    state.num_groups_outstanding -= 1
    if ids:
        yield Forget(state.new_command(), ids)


def _remove(state: ClusterState, trajectory: Trajectory, cause: str) -> None:
    leave_replica(state, trajectory)
    state.groups[trajectory.group].trajectories.remove(trajectory.id)
    del state.trajectories[trajectory.id]
    dropped = (state.evaluation_ledger if trajectory.evaluation else state.ledger).dropped
    dropped[cause] = dropped.get(cause, 0) + 1


def _end_evaluated(state: ClusterState, config: Config, trajectory: Trajectory) -> Iterator[AnyCommand]:
    assert trajectory.score is not None, f"{trajectory} is not scored"
    evaluation = _evaluation_of(state, trajectory)
    evaluation.num_scored += 1
    evaluation.score_sum += trajectory.score
    outcomes = evaluation.groups[trajectory.group]
    outcomes.num_scored += 1
    outcomes.num_passed += trajectory.score >= config.evaluation.pass_score_min
    state.groups[trajectory.group].trajectories.remove(trajectory.id)
    del state.trajectories[trajectory.id]
    state.evaluation_ledger.evaluated += 1
    _close_if_empty(state, evaluation, trajectory.group)
    yield Forget(state.new_command(), (trajectory.id,))


def _evaluation_of(state: ClusterState, trajectory: Trajectory) -> Evaluation:
    return next(e for e in state.evaluations if trajectory.group in e.groups)


def _close_if_empty(state: ClusterState, evaluation: Evaluation, group: GroupId) -> None:
    if not state.groups[group].trajectories:
        del state.groups[group]
        outcomes = evaluation.groups.pop(group)
        passed = evaluation.num_prompts.setdefault(outcomes.num_scored, {})
        passed[outcomes.num_passed] = passed.get(outcomes.num_passed, 0) + 1
        evaluation.ended = not evaluation.groups
