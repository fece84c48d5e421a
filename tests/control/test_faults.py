"""What is lost is made good, by name; what cannot be, ends the run by name."""

import pytest

from laminar.config import FaultsConfig, TrajectoryLevelSchedule
from laminar.control import messages as m
from laminar.control.trajectory_state import TrajectoryState
from tests.control.fake_world import FakeWorld, make_config, make_plane


def test_a_silent_replica_s_trajectories_go_on_from_their_tokens_at_their_version():
    config = make_config(num_steps=4)
    world, control = FakeWorld(config, seed=7), make_plane(config)
    world.hang(2, 2.5)
    held: dict[int, tuple[int | None, int]] = {}
    for now, event in world.events():
        if isinstance(event, m.Tick) and 2 in control.state.replicas:
            held = {
                id: (control.state.trajectories[id].version, control.state.trajectories[id].num_tokens)
                for id in control.state.replicas[m.ReplicaId(2)].trajectories
            }
        for command in control.handle(event, now):
            world.execute(command)
        control.state.check()
    resumed = {
        a.trajectory: (command.version, a.num_tokens)
        for _, command in world.commands
        if isinstance(command, m.Resume)
        for a in command.trajectories
    }
    assert held, "the replica that went silent held nothing; choose another moment"
    assert all(resumed[id] == was for id, was in held.items())
    assert control.state.counters.num_trajectories_rescued == len(held)
    assert control.state.counters.num_trajectories_restarted == 0


def test_reports_of_a_replica_given_up_are_late_and_change_nothing():
    config = make_config()
    world, control = FakeWorld(config, seed=1), make_plane(config)
    world.hang(0, 2.0)
    world.run(control)
    late = m.ReplicaReport(m.ReplicaId(0), 0.5, 1, 0, 0, finished=(m.Finished(m.TrajectoryId(0), 0, 10, False),))
    num_late = control.state.counters.num_late_messages
    control.state.ended = False
    assert not [c for c in control.handle(late, world.now) if isinstance(c, m.ScoreTrajectories)]
    assert control.state.counters.num_late_messages == num_late + 1


def test_when_the_controller_itself_stalled_nobody_is_blamed():
    config = make_config()
    world, control = FakeWorld(config, seed=1), make_plane(config)
    for now, event in world.events():
        later = now if now < 3 else now + 60.0
        for command in control.handle(event, later):
            world.execute(command)
    assert control.state.counters.num_controller_stalls == 1
    assert control.state.counters.num_replicas_lost == 0


def test_a_run_whose_replicas_cannot_be_replaced_any_more_ends_by_name():
    config = make_config(num_replicas=1, num_replacements_max=1)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    world.kill(0, 2.0)
    world.kill(1, 5.0)
    world.run(control)
    assert world.outcome is not None
    assert world.outcome.failed
    assert "no replica is left" in world.outcome.cause
    assert "faults.num_replacements_max=1" in world.outcome.cause


def test_a_relay_that_cannot_be_replaced_any_more_ends_the_run_by_name():
    config = make_config(num_machines=1, num_replacements_max=2)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    for at_s in (2.0, 4.0, 6.0):
        world.kill_relay(0, at_s)
    world.run(control)
    assert world.outcome is not None
    assert world.outcome.failed
    assert "no relay is left" in world.outcome.cause


def test_a_version_that_no_relay_holds_any_more_restarts_its_trajectories_alone_and_marks_their_groups():
    num_restarted = num_groups_mixed = 0
    for seed in range(8):
        config = make_config(num_machines=1, num_replicas=3)
        world, control = FakeWorld(config, seed), make_plane(config)
        world.hang(0, 3.6)
        world.kill_relay(0, 3.8)
        world.run(control)
        num_restarted += control.state.counters.num_trajectories_restarted
        num_groups_mixed += control.state.counters.num_groups_mixed
        assert control.state.ledger.dispatched == control.state.ledger.trained
    assert num_restarted > 0
    assert num_groups_mixed > 0


def test_an_evaluation_whose_version_is_gone_is_given_up_and_the_run_ends():
    num_given_up = 0
    for seed in range(12):
        config = make_config(num_machines=1, num_replicas=3)
        world, control = FakeWorld(config, seed), make_plane(config)
        world.hang(0, 4.2)
        world.kill_relay(0, 4.4)
        world.run(control)
        assert world.outcome is not None
        assert not world.outcome.failed
        num_given_up += control.state.counters.num_evaluations_skipped
        num_given_up += control.state.evaluation_ledger.dropped.get("version_gone", 0)
    assert num_given_up > 0


def test_a_command_without_an_outcome_ends_its_replica_s_wait_by_name():
    config = make_config().model_copy(update={"faults": FaultsConfig(load_deadline_s=1.0, report_deadline_s=2.0)})
    world, control = FakeWorld(config, seed=0), make_plane(config)
    execute, swallowed = world.execute, []

    def swallow_the_first_load(command: m.AnyCommand) -> None:
        if isinstance(command, m.Load) and not swallowed:
            swallowed.append(command)
        else:
            execute(command)

    world.run(control, swallow_the_first_load)
    stopped = [c for _, c in world.commands if isinstance(c, m.StopReplica)]
    assert [(s.replica, s.cause) for s in stopped] == [(swallowed[0].replica, "no outcome of load within 1 s")]


@pytest.mark.parametrize("kind", ["environment", "engine"])
def test_a_member_that_fails_twice_is_dropped_by_name_and_its_group_trains_without_it(kind: str):
    config = make_config(schedule=TrajectoryLevelSchedule(), num_steps=2, interval_steps=None)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    doomed: m.TrajectoryId | None = None
    failed_attempts: list[int] = []
    for now, event in world.events():
        for command in control.handle(event, now):
            world.execute(command)
        decoding = [t for t in control.state.trajectories.values() if t.state is TrajectoryState.DECODING]
        doomed = doomed if doomed is not None or not decoding else decoding[0].id
        for trajectory in decoding:
            if trajectory.id == doomed and trajectory.attempt not in failed_attempts:
                failed_attempts.append(trajectory.attempt)
                assert trajectory.replica is not None
                world.replicas[trajectory.replica].running.pop(trajectory.id, None)
                failed = (m.Failed(trajectory.id, trajectory.attempt, f"{kind}: scripted"),)
                world.send(0.0, m.ReplicaReport(trajectory.replica, 0.1, 1, 0, 0, failed=failed))
        control.state.check()
    assert failed_attempts == [0, 1]
    assert control.state.ledger.dropped == {kind: 1}
    assert control.state.ledger.trained == 2 * 8 * 4 - 1


def test_a_failed_checkpoint_leaves_the_run_going_and_is_counted():
    config = make_config()
    world, control = FakeWorld(config, seed=0), make_plane(config)
    execute, failed = world.execute, []

    def fail_the_first_save(command: m.AnyCommand) -> None:
        if isinstance(command, m.SaveCheckpoint) and not failed:
            failed.append(command)
            world.send(0.1, m.CommandFailed(command.id, "disk full"))
        else:
            execute(command)

    world.run(control, fail_the_first_save)
    assert world.outcome is not None
    assert not world.outcome.failed
    assert control.state.counters.num_checkpoints_failed == 1
    assert control.state.ledger.trained == 6 * 8 * 4
