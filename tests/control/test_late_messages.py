"""What comes late is told by its attempt number, also from the very replica that a trajectory is on."""

import pytest

from laminar.control import messages as m
from laminar.control.plane import ControlPlane
from laminar.control.trajectory_state import Trajectory, TrajectoryState
from tests.control.fake_world import FakeWorld, make_config, make_plane


@pytest.mark.parametrize(
    "late",
    [
        {"failed": (m.Failed(m.TrajectoryId(0), 0, "engine: scripted"),)},
        {"finished": (m.Finished(m.TrajectoryId(0), 0, 400, True),)},
        {"progress": (m.Progress(m.TrajectoryId(0), 0, 399),)},
    ],
    ids=lambda late: next(iter(late)),
)
def test_a_late_message_of_an_attempt_that_failed_here_changes_nothing_of_the_next_one(late):
    """There is one replica, so a member that failed starts again where it was."""
    config = make_config(num_replicas=1, num_machines=1, num_steps=2, interval_steps=None)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    first = _until_decoding(world, control, attempt=0)
    failed = (m.Failed(first.id, 0, "engine: scripted"),)
    world.replicas[0].running.pop(first.id)
    world.send(0.0, m.ReplicaReport(m.ReplicaId(0), 0.1, 1, 0, 0, failed=failed))
    again = _until_decoding(world, control, attempt=1)
    before = (again.state, again.num_tokens, again.num_failures, control.state.counters.num_late_messages)
    control.handle(m.ReplicaReport(m.ReplicaId(0), 0.1, 1, 0, 0, **late), world.now)
    assert (again.state, again.num_tokens, again.num_failures, control.state.counters.num_late_messages - 1) == before
    world.run(control)
    assert control.state.ledger.trained == control.state.ledger.dispatched == 2 * 8 * 4


def _until_decoding(world: FakeWorld, control: ControlPlane, *, attempt: int) -> Trajectory:
    """Let the run go on until trajectory 0 has made tokens in this attempt."""
    for now, event in world.events():
        for command in control.handle(event, now):
            world.execute(command)
        control.state.check()
        found = control.state.trajectories.get(m.TrajectoryId(0))
        if found is not None and found.attempt == attempt and found.state is TrajectoryState.DECODING:
            return found
    raise AssertionError(f"attempt {attempt} of trajectory 0 never decoded")


@pytest.mark.parametrize("kind", [m.TrainerStarted, m.RelayStarted, m.ReplicaStarted])
def test_a_start_that_is_told_once_more_changes_nothing(kind: type[m.AnyEvent]):
    """At any later moment: a second start would publish anew, forget versions, or empty a replica."""
    config = make_config(interval_steps=3)
    world, control = FakeWorld(config, seed=1), make_plane(config)
    told: list[m.AnyEvent] = []
    num_late = 0
    for number, (now, event) in enumerate(world.events()):
        for command in control.handle(event, now):
            world.execute(command)
        if isinstance(event, kind):
            told.append(event)
        if told and number % 7 == 0:
            assert control.handle(told[number % len(told)], now) == []
            num_late += 1
        control.state.check()
    assert num_late > 20
    assert control.state.counters.num_late_messages == num_late
    assert control.state.ledger.trained == control.state.ledger.dispatched == 6 * 8 * 4
