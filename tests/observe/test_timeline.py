import pytest

from laminar.control.messages import MachineId, ReplicaId, TrajectoryId
from laminar.control.state import ClusterState, Phase, Replica, TrainerPhase
from laminar.observe.timeline import Absence, Timeline, drawn


def add_replica(state: ClusterState, id: int, machine: int = 0, *, started: bool = True) -> Replica:
    replica = Replica(ReplicaId(id), MachineId(machine), heard_at_s=0.0, started=started, version=0)
    state.replicas[replica.id] = replica
    state.next_replica = id + 1
    return replica


def phases(timeline: Timeline, place: int = 0) -> list[tuple[float, float, str]]:
    return [(i.start_s, i.end_s, str(i.phase)) for i in timeline.places[place].intervals]


@pytest.fixture
def state() -> ClusterState:
    return ClusterState()


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


def test_an_interval_lasts_until_the_phase_changes(state: ClusterState, timeline: Timeline):
    replica = add_replica(state, 0)
    timeline.observe(0.0, state)
    timeline.observe(1.0, state)
    replica.trajectories = {TrajectoryId(1): None, TrajectoryId(2): None}
    timeline.observe(2.0, state)
    del replica.trajectories[TrajectoryId(1)]
    timeline.observe(3.0, state)
    replica.in_tail = True
    timeline.observe(5.0, state)
    timeline.observe(6.0, state)
    assert phases(timeline) == [(0.0, 2.0, "idle"), (2.0, 5.0, "generating"), (5.0, 6.0, "tail")]
    generating = timeline.places[0].intervals[1]
    assert (generating.num_trajectories_first, generating.num_trajectories_last) == (2, 1)


def test_a_new_version_begins_a_new_interval(state: ClusterState, timeline: Timeline):
    replica = add_replica(state, 0)
    timeline.observe(0.0, state)
    replica.version = 3
    timeline.observe(1.0, state)
    assert [i.version for i in timeline.places[0].intervals] == [0, 3]


def test_what_lasted_no_time_is_not_kept(state: ClusterState, timeline: Timeline):
    replica = add_replica(state, 0)
    timeline.observe(0.0, state)
    replica.evaluating = True
    timeline.observe(1.0, state)
    replica.evaluating = False
    replica.in_tail, replica.trajectories = True, {TrajectoryId(1): None}
    timeline.observe(1.0, state)
    timeline.observe(2.0, state)
    assert phases(timeline) == [(0.0, 1.0, "idle"), (1.0, 2.0, "tail")]


def test_a_lost_replica_is_lost_from_its_last_report_until_its_replacement(state: ClusterState, timeline: Timeline):
    replica = add_replica(state, 0)
    replica.trajectories = {TrajectoryId(1): None}
    timeline.observe(0.0, state)
    replica.heard_at_s = 4.0
    timeline.observe(4.0, state)
    replica.in_tail = True
    timeline.observe(6.0, state)
    del state.replicas[replica.id]
    timeline.observe(9.0, state)
    timeline.observe(10.0, state)
    add_replica(state, 1, started=False)
    timeline.observe(11.0, state)
    timeline.observe(12.0, state)
    assert phases(timeline) == [(0.0, 4.0, "generating"), (4.0, 11.0, "lost"), (11.0, 12.0, "starting")]
    assert [i.replica for i in timeline.places[0].intervals] == [0, 0, 1]


def test_a_replacement_takes_the_place_on_its_own_machine(state: ClusterState, timeline: Timeline):
    for id in range(4):
        add_replica(state, id, machine=id // 2)
    timeline.observe(0.0, state)
    del state.replicas[ReplicaId(0)], state.replicas[ReplicaId(2)]
    add_replica(state, 4, machine=1)
    timeline.observe(1.0, state)
    timeline.observe(2.0, state)
    assert [p.replica for p in timeline.places] == [0, 1, 4, 3]
    assert isinstance(timeline.places[0].intervals[-1].phase, Absence)


def test_the_time_between_two_starts_is_down(state: ClusterState, timeline: Timeline):
    add_replica(state, 0)
    timeline.observe(0.0, state)
    timeline.observe(3.0, state)
    timeline.resume(10.0)
    state.replicas.clear()
    add_replica(state, 1, started=False)
    timeline.observe(10.0, state)
    timeline.observe(11.0, state)
    assert phases(timeline) == [(0.0, 3.0, "idle"), (3.0, 10.0, "down"), (10.0, 11.0, "starting")]


def test_idle_ratio_counts_only_the_time_up(state: ClusterState, timeline: Timeline):
    first, second = add_replica(state, 0, started=False), add_replica(state, 1)
    second.trajectories = {TrajectoryId(1): None}
    timeline.observe(0.0, state)
    first.started = True
    timeline.observe(6.0, state)
    timeline.observe(10.0, state)
    assert timeline.replicas_idle_ratio(0.0, 10.0) == pytest.approx(4 / 14)
    assert timeline.replicas_idle_ratio(8.0, 10.0) == pytest.approx(0.5)
    assert timeline.replicas_idle_ratio(0.0, 6.0) == 0.0
    ratios = timeline.replicas_time_ratio(0.0, 10.0)
    assert ratios["idle"] == pytest.approx(4 / 14)
    assert sum(ratios.values()) == pytest.approx(1.0)
    assert "starting" not in ratios


def test_trainer_idle_ratio_is_its_waiting(state: ClusterState, timeline: Timeline):
    for now, phase in [
        (0.0, TrainerPhase.STARTING),
        (1.0, TrainerPhase.WAITING),
        (4.0, TrainerPhase.TRAINING),
        (8.0, TrainerPhase.PUBLISHING),
        (9.0, TrainerPhase.WAITING),
        (11.0, TrainerPhase.WAITING),
    ]:
        state.trainer.phase = phase
        timeline.observe(now, state)
    assert timeline.trainer_s(TrainerPhase.TRAINING, 0.0, 11.0) == 4.0
    assert timeline.trainer_idle_ratio(0.0, 11.0) == pytest.approx(5 / 10)
    assert [i.step for i in timeline.trainer] == [1] * 5


def test_what_is_too_short_to_see_is_drawn_as_part_of_its_neighbour(state: ClusterState, timeline: Timeline):
    replica = add_replica(state, 0)
    for now, trajectories in [(0.0, {TrajectoryId(1): None}), (5.0, {}), (5.01, {TrajectoryId(2): None}), (9.0, {})]:
        replica.trajectories = trajectories
        timeline.observe(now, state)
    timeline.observe(12.0, state)
    intervals = timeline.places[0].intervals
    seen = drawn(intervals, 0.1)
    assert [(i.start_s, i.end_s, i.phase) for i in seen] == [(0.0, 9.0, Phase.GENERATING), (9.0, 12.0, Phase.IDLE)]
    assert len(intervals) == 4
    assert intervals[0].end_s == 5.0
    assert drawn(intervals, 0.0) == intervals
