"""Whole runs of the control plane in a seeded world: the laws hold after every event, whatever is lost."""

from collections import Counter

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
from laminar.control.state import ClusterState
from tests.control.fake_world import FakeWorld, make_config, make_plane

SCHEDULES = [
    TrajectoryLevelSchedule(),
    SynchronousSchedule(),
    OneStepStaleSchedule(),
    StreamingSchedule(),
    PartialRolloutSchedule(),
]


def prompts_dispatched(world: FakeWorld) -> Counter[int]:
    """How often each training prompt was dispatched as a new group."""
    prompt_of: dict[int, int] = {}
    for _, command in world.commands:
        if isinstance(command, m.Generate | m.Resume) and not command.evaluation:
            prompt_of |= {a.group: a.prompt for a in command.trajectories}
    return Counter(prompt_of.values())


def groups_trained(world: FakeWorld) -> list[int]:
    """Groups in the order in which they were trained, each as often as it was."""
    trained: list[int] = []
    for _, command in world.commands:
        if isinstance(command, m.TrainMiniBatch):
            trained += dict.fromkeys(command.groups)
    return trained


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
@pytest.mark.parametrize("seed", range(6))
def test_an_undisturbed_run_trains_all_it_dispatches(schedule: ScheduleConfig, seed: int):
    world, control = FakeWorld(make_config(schedule=schedule), seed), make_plane(make_config(schedule=schedule))
    world.run(control)
    assert world.outcome is not None
    assert not world.outcome.failed
    assert control.state.trainer.step == 6
    assert control.state.ledger.dispatched == control.state.ledger.trained == 6 * 8 * 4
    assert control.state.counters.num_late_messages == 0
    assert not control.state.trajectories, "something was left over"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
@pytest.mark.parametrize("seed", range(30))
def test_a_disturbed_run_loses_nothing(schedule: ScheduleConfig, seed: int):
    config = make_config(schedule=schedule)
    world, control = FakeWorld(config, seed), make_plane(config)
    world.repeat_share, world.late_share = 0.1, 0.2
    disturb = world.random
    world.kill(disturb.randrange(4), disturb.uniform(0.5, 8))
    world.hang(disturb.randrange(4), disturb.uniform(0.5, 8))
    world.kill(disturb.randrange(6), disturb.uniform(4, 12))
    world.kill_relay(disturb.randrange(2), disturb.uniform(1, 8))
    world.run(control)
    assert world.outcome is not None
    assert not world.outcome.failed, world.outcome.cause
    assert control.state.ledger.dispatched == control.state.ledger.trained
    assert Counter(groups_trained(world)).most_common(1)[0][1] == 1, "a group was trained twice"


def test_synchronous_staleness_is_zero_and_trajectory_level_s_is_not():
    stale: dict[str, ClusterState] = {}
    for schedule in SCHEDULES:
        config = make_config(schedule=schedule)
        world, control = FakeWorld(config, seed=1), make_plane(config)
        world.run(control)
        stale[schedule.kind] = control.state
    assert set(stale["synchronous"].staleness_at_train) == {0}
    assert max(stale["trajectory_level"].staleness_at_train) >= 1


def test_trajectory_level_is_faster_than_synchronous():
    seconds = []
    for schedule in SCHEDULES:
        config = make_config(schedule=schedule)
        world = FakeWorld(config, seed=1)
        world.run(make_plane(config))
        seconds.append(world.now)
    assert seconds[0] < 0.75 * seconds[1]


def test_repack_happens_and_shortens_runs_that_wait_for_generation():
    """Over several seeds: what one run gains or loses by chance is as large as what repack gains."""
    seconds, moves = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for repack in (True, False):
        config = make_config(repack=repack, num_steps=12, interval_steps=None)
        for seed in range(24):
            world, control = FakeWorld(config, seed), make_plane(config)
            world.train_s = 0.05
            world.run(control)
            seconds[repack] += world.now
            moves[repack] += control.state.counters.num_repack_moves
    assert moves[True] > 48
    assert moves[False] == 0
    assert seconds[True] < 0.99 * seconds[False]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
@pytest.mark.parametrize("num_prompts", [1, 7, 20])
def test_every_prompt_is_trained_once_an_epoch_and_the_last_step_is_smaller(schedule: ScheduleConfig, num_prompts: int):
    config = make_config(schedule=schedule, num_steps=None, num_epochs=2)
    world = FakeWorld(config, seed=0)
    control = make_plane(config, num_prompts=num_prompts)
    world.run(control)
    assert world.outcome is not None
    assert world.outcome.cause == "end of data"
    assert prompts_dispatched(world) == Counter(dict.fromkeys(range(num_prompts), 2))
    assert len(groups_trained(world)) == 2 * num_prompts
    assert control.state.trainer.step == -(-2 * num_prompts // 8)
    assert control.state.counters.num_steps_short == (2 * num_prompts % 8 != 0)


def test_the_same_events_give_the_same_commands():
    config = make_config()
    world, control = FakeWorld(config, seed=5), make_plane(config)
    world.hang(1, 2.0)
    events, commands = [], []
    for now, event in world.events():
        events.append((now, event))
        decided = control.handle(event, now)
        commands.append(decided)
        for command in decided:
            world.execute(command)
    again = make_plane(config)
    assert [again.handle(event, now) for now, event in events] == commands
    assert again.state == control.state


def test_an_evaluation_is_pinned_to_its_version_and_holds_nobody_up():
    config = make_config(interval_steps=2)
    world, control = FakeWorld(config, seed=2), make_plane(config)
    world.run(control)
    assert [e.step for e in control.state.evaluations] == [0, 2, 4, 6]
    for evaluation in control.state.evaluations:
        assert evaluation.ended
        assert evaluation.num_scored == 12
    batches = [c for _, c in world.commands if isinstance(c, m.Generate) and c.evaluation]
    assert [b.version for b in batches] == [e.version for e in control.state.evaluations]


def test_an_evaluation_counts_the_passing_responses_of_each_prompt():
    config = make_config(interval_steps=2)
    asked = config.evaluation.model_copy(update={"num_responses_per_prompt": 3, "pass_score_min": 0.5})
    config = config.model_copy(update={"evaluation": asked})
    world, control = FakeWorld(config, seed=2), make_plane(config)
    world.score = lambda trajectory: 0.5 if trajectory % 3 == 0 else 0.4  # one of the three of every prompt
    world.run(control)
    assert len(control.state.evaluations) == 4
    for evaluation in control.state.evaluations:
        assert evaluation.num_scored == 36
        assert evaluation.mean_score == pytest.approx(1.3 / 3)
        assert evaluation.num_prompts == {3: {1: 12}}


def test_room_bounds_what_is_dispatched_and_not_trained():
    config = make_config()
    world, control = FakeWorld(config, seed=4), make_plane(config)
    world.train_s = 3.0
    most = 0
    for now, event in world.events():
        for command in control.handle(event, now):
            world.execute(command)
        most = max(most, control.state.num_groups_outstanding)
    assert most == 2 * 8, "buffer.capacity_steps=2 of 8 prompt groups"


def test_ctrl_c_ends_the_step_saves_it_and_fails_the_run_by_name():
    config = make_config(num_steps=50)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    world.send(4.05, m.StopRequested("stopped by SIGINT"))
    world.run(control)
    assert world.outcome is not None
    assert world.outcome.failed
    assert world.outcome.cause == "stopped by SIGINT"
    assert control.state.trainer.step == control.state.trainer.saved_step > 0
