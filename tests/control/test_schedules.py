"""What each schedule promises: staleness, versions, who waits for whom."""

from collections.abc import Iterator

import pytest

from laminar.config import (
    OneStepStaleSchedule,
    PartialRolloutSchedule,
    ScheduleConfig,
    StreamingSchedule,
    SynchronousSchedule,
    TrajectoryLevelSchedule,
)
from laminar.control import messages as m
from laminar.control.plane import ControlPlane
from laminar.control.state import TrainerPhase
from laminar.control.trajectory_state import Trajectory, TrajectoryState
from tests.control.fake_world import FakeWorld, make_config, make_plane

NUM_STEPS = 8


def finish(schedule: ScheduleConfig, *, seed: int = 1, train_s: float = 0.25) -> tuple[FakeWorld, ControlPlane]:
    config = make_config(schedule=schedule, num_steps=NUM_STEPS)
    world, control = FakeWorld(config, seed), make_plane(config)
    world.train_s = train_s
    world.run(control)
    assert world.outcome is not None
    assert not world.outcome.failed, world.outcome.cause
    return world, control


def num_dispatched(world: FakeWorld) -> Iterator[tuple[float, int, int]]:
    """Time, version and number of prompt groups of each training batch."""
    for now, command in world.commands:
        if isinstance(command, m.Generate) and not command.evaluation:
            yield now, command.version, len(command.trajectories) // 4


@pytest.mark.parametrize("train_s", [0.05, 2.0], ids=["training is short", "training is long"])
@pytest.mark.parametrize(
    ("schedule", "allowed"),
    [(SynchronousSchedule(), {0}), (OneStepStaleSchedule(), {0, 1}), (StreamingSchedule(), {0, 1})],
    ids=["synchronous", "one_step_stale", "streaming"],
)
def test_staleness_of_the_schedules_that_switch_together(schedule: ScheduleConfig, allowed: set[int], train_s: float):
    _, control = finish(schedule, train_s=train_s)
    assert set(control.state.staleness_at_train) <= allowed
    if schedule == OneStepStaleSchedule():
        # The first batch alone has nothing to be stale against.
        assert control.state.staleness_at_train == {0: 32, 1: (NUM_STEPS - 1) * 32}
    if schedule == StreamingSchedule() and train_s < 0.1:
        # While a replica loads, the step whose tail it waited for may end: then it takes that step's weights too.
        assert set(control.state.staleness_at_train) == {0, 1}


@pytest.mark.parametrize("schedule", [OneStepStaleSchedule(), StreamingSchedule()], ids=lambda s: s.kind)
@pytest.mark.parametrize("train_s", [0.05, 2.0], ids=["training is short", "training is long"])
def test_the_next_batch_begins_when_this_one_has_been_generated_to_its_end(schedule: ScheduleConfig, train_s: float):
    config = make_config(schedule=schedule, num_steps=NUM_STEPS, interval_steps=None)
    world, control = FakeWorld(config, seed=3), make_plane(config)
    world.train_s = train_s
    num_groups = 0
    for now, event in world.events():
        commands = control.handle(event, now)
        if any(isinstance(c, m.Generate) for c in commands):
            if num_groups % 8 == 0:
                assert not [t for t in control.state.trajectories.values() if t.group < num_groups and unfinished(t)]
            num_groups += sum(len(c.trajectories) // 4 for c in commands if isinstance(c, m.Generate))
        for command in commands:
            world.execute(command)
    batches = list(num_dispatched(world))
    assert sum(n for _, _, n in batches) == NUM_STEPS * 8
    if isinstance(schedule, OneStepStaleSchedule):
        assert sorted({version for _, version, _ in batches}) == list(range(NUM_STEPS - 1))


def unfinished(trajectory: Trajectory) -> bool:
    return trajectory.state in (TrajectoryState.QUEUED, TrajectoryState.DECODING, TrajectoryState.MOVING)


def test_generation_goes_on_while_the_trainer_works_and_not_under_synchronous():
    shares = []
    for schedule in (SynchronousSchedule(), OneStepStaleSchedule()):
        config = make_config(schedule=schedule, num_steps=NUM_STEPS, interval_steps=None)
        world, control = FakeWorld(config, seed=1), make_plane(config)
        training = busy = 0
        for now, event in world.events():
            for command in control.handle(event, now):
                world.execute(command)
            if isinstance(event, m.Tick) and control.state.trainer.phase is TrainerPhase.TRAINING:
                training += 1
                busy += any(r.trajectories for r in control.state.replicas.values())
        shares.append(busy / training)
    assert shares[0] == 0
    assert shares[1] > 0.5


def test_streaming_trains_on_a_batch_whose_tail_still_decodes_and_one_step_stale_never():
    overlapped = []
    for schedule in (OneStepStaleSchedule(), StreamingSchedule()):
        config = make_config(schedule=schedule, num_steps=NUM_STEPS, interval_steps=None)
        world, control = FakeWorld(config, seed=1), make_plane(config)
        num_early = 0
        for now, event in world.events():
            commands = control.handle(event, now)
            for command in commands:
                if isinstance(command, m.TrainMiniBatch):
                    in_step = 8 * (command.step - 1)
                    members = [t for t in control.state.trajectories.values() if in_step <= t.group < in_step + 8]
                    num_early += any(unfinished(t) for t in members)
                    assert len(command.trajectories) == 8, "a mini-batch is two prompt groups"
                world.execute(command)
            control.state.check()
        overlapped.append(num_early)
    assert overlapped[0] == 0
    assert overlapped[1] > NUM_STEPS


def test_streaming_stopped_in_the_middle_of_a_step_trains_what_it_took_and_saves_it():
    config = make_config(schedule=StreamingSchedule(), num_steps=50, interval_steps=None)
    world, control = FakeWorld(config, seed=1), make_plane(config)
    stopped_in_step = None
    for now, event in world.events():
        for command in control.handle(event, now):
            world.execute(command)
        trainer = control.state.trainer
        if stopped_in_step is None and trainer.phase is TrainerPhase.WAITING and trainer.groups:
            stopped_in_step = trainer.step
            world.send(0.0, m.StopRequested("stopped by SIGINT"))
        control.state.check()
    assert stopped_in_step is not None
    assert control.state.trainer.step == control.state.trainer.saved_step == stopped_in_step + 1
    assert control.state.counters.num_steps_short == 1


# ---------------------------------------------------------------------------------------------------- partial rollout


@pytest.mark.parametrize("train_s", [0.05, 1.0], ids=["training is short", "training is long"])
@pytest.mark.parametrize("staleness_max", [0, 1, 2, None])
@pytest.mark.parametrize("seed", range(4))
def test_admission_bounds_the_staleness_of_partial_rollout(staleness_max: int | None, train_s: float, seed: int):
    schedule = PartialRolloutSchedule(staleness_max=staleness_max)
    _, control = finish(schedule, seed=seed, train_s=train_s)
    assert control.state.ledger.trained == NUM_STEPS * 32
    worst = max(control.state.staleness_at_train)
    if staleness_max is None:
        assert worst >= 1
    else:
        assert worst <= staleness_max


def test_every_replica_that_decodes_is_interrupted_at_a_publish_and_none_that_evaluates():
    config = make_config(schedule=PartialRolloutSchedule(), num_steps=NUM_STEPS)
    world, control = FakeWorld(config, seed=1), make_plane(config)
    num_held = 0
    for now, event in world.events():
        evaluating = {r.id for r in control.state.replicas.values() if r.evaluating}
        for command in control.handle(event, now):
            if isinstance(command, m.Load) and command.interrupt:
                assert command.replica not in evaluating
                num_held += len(control.state.replicas[command.replica].trajectories)
            world.execute(command)
        control.state.check()
        for replica in control.state.replicas.values():
            newest = control.state.newest_complete(replica.machine)
            if replica.trajectories and not replica.evaluating and replica.loading is None and newest is not None:
                assert replica.version == newest
    assert num_held > NUM_STEPS * 4
    assert [e.step for e in control.state.evaluations] == [0, 2, 4, 6, 8]
    assert all(e.num_scored == 12 for e in control.state.evaluations)


@pytest.mark.parametrize("seed", range(12))
def test_each_token_keeps_its_version_through_interrupts_and_losses(seed: int):
    """Also where a replica dies between abort and load, or a newer version comes while it loads."""
    config = make_config(schedule=PartialRolloutSchedule(staleness_max=2), num_steps=NUM_STEPS)
    world, control = FakeWorld(config, seed), make_plane(config)
    world.late_share = world.repeat_share = 0.2
    world.hang(seed % 4, 3.0 + 0.1 * seed)
    spans: list[int] = []
    num_killed_in_interrupt = 0
    for now, event in world.events():
        for command in control.handle(event, now):
            world.execute(command)
            if isinstance(command, m.Load) and command.interrupt and num_killed_in_interrupt < 2 and now > 5:
                world.kill(command.replica, now + 0.02)
                num_killed_in_interrupt += 1
        control.state.check()
        if isinstance(event, m.ReplicaReport):
            for outcome in event.finished:
                trajectory = control.state.trajectories.get(outcome.trajectory)
                if trajectory is not None and trajectory.state is TrajectoryState.FINISHED:
                    assert versions_of_tokens(trajectory) == world.versions[trajectory.id]
                    assert trajectory.version == min(world.versions[trajectory.id])
                    spans.append(len(trajectory.segments))
    assert world.outcome is not None
    assert not world.outcome.failed, world.outcome.cause
    assert control.state.ledger.dispatched == control.state.ledger.trained == NUM_STEPS * 32
    assert control.state.counters.num_trajectories_restarted == 0
    assert num_killed_in_interrupt == 2
    assert max(spans) >= 3


def versions_of_tokens(trajectory: Trajectory) -> list[int]:
    """As control's segments say."""
    ends = [*(segment.start for segment in trajectory.segments[1:]), trajectory.num_tokens]
    pairs = zip(trajectory.segments, ends, strict=True)
    return [segment.version for segment, end in pairs for _ in range(end - segment.start)]


@pytest.mark.parametrize(
    "schedule",
    [TrajectoryLevelSchedule(), SynchronousSchedule(), OneStepStaleSchedule(), StreamingSchedule()],
    ids=lambda s: s.kind,
)
def test_under_every_other_schedule_a_trajectory_has_one_version(schedule: ScheduleConfig):
    world, control = finish(schedule)
    assert all(len(set(versions)) == 1 for versions in world.versions.values())
    assert control.state.counters.num_interrupts == 0


def test_a_replica_that_comes_alone_leaves_the_others_their_share_of_the_room():
    """With eight replicas and a capacity of 16 groups each takes two, though one alone may hold four."""
    config = make_config(num_replicas=8, num_machines=4, interval_steps=None)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    world.run(control)
    sizes = [len({a.group for a in c.trajectories}) for _, c in world.commands if isinstance(c, m.Generate)]
    assert max(sizes) == 2
