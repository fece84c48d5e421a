"""Measures staleness (trainer's version minus the trajectory's) and publish lag. Bounds nothing."""

from laminar.control.state import ClusterState
from laminar.control.trajectory_state import Group, Trajectory


def note_finished(state: ClusterState, trajectory: Trajectory) -> None:
    if not trajectory.evaluation:
        assert trajectory.version is not None, f"{trajectory} finished without ever having a version"
        _count(state.staleness_at_finish, state.trainer.version - trajectory.version)


def note_trained(state: ClusterState, group: Group, trajectory: Trajectory) -> None:
    """Its step begins: the version that the trainer holds now is the one it is compared with."""
    _change(state, group, trajectory, 1)


def forget_trained(state: ClusterState, group: Group, trajectory: Trajectory) -> None:
    """Its step is undone: the trainer went back to a checkpoint before it."""
    _change(state, group, trajectory, -1)


def publish_lags(state: ClusterState) -> list[int]:
    """Newest version handed over minus the one held, for every replica that holds one."""
    return [state.trainer.version - r.version for r in state.replicas.values() if r.version is not None]


def _change(state: ClusterState, group: Group, trajectory: Trajectory, by: int) -> None:
    assert trajectory.version is not None, f"{trajectory} was trained without ever having a version"
    assert group.trained_at_version is not None, f"{group} was trained at no version"
    _count(state.staleness_at_train, group.trained_at_version - trajectory.version, by)
    _count(state.trained_by_version, trajectory.version, by)


def _count(histogram: dict[int, int], value: int, by: int = 1) -> None:
    histogram[value] = histogram.get(value, 0) + by
    if histogram[value] == 0:
        del histogram[value]
