"""The rules of prompt groups: filter, refill, rewards that fail."""

from laminar.control import messages as m
from tests.control.fake_world import FakeWorld, make_config, make_plane


def test_groups_with_equal_rewards_stay_by_default():
    config = make_config()
    world, control = FakeWorld(config, seed=0), make_plane(config)
    world.score = lambda trajectory: 1.0
    world.run(control)
    assert control.state.trainer.step == 6
    assert control.state.ledger.dropped == {}


def test_with_the_filter_on_they_are_dropped_by_name_and_replaced():
    config = make_config(filter_equal_rewards=True, interval_steps=None)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    # Every other group is solved by all its members.
    world.score = lambda trajectory: 1.0 if trajectory // 4 % 2 else float(trajectory % 2)
    world.run(control)
    assert control.state.trainer.step == 6
    assert control.state.ledger.trained == 6 * 8 * 4
    assert control.state.ledger.dropped["equal_rewards"] >= 5 * 8 * 4


def test_refilling_stops_at_its_limit_and_the_step_trains_what_it_has():
    config = make_config(filter_equal_rewards=True, num_steps=2, interval_steps=None)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    # One group in eight can be learned from: 3 x 8 groups hold about 3.
    world.score = lambda trajectory: 1.0 if trajectory // 4 % 8 else float(trajectory % 2)
    world.run(control)
    assert world.outcome is not None
    assert not world.outcome.failed
    assert control.state.counters.num_steps_short == 2
    assert 0 < control.state.counters.num_groups_trained < 16


def test_a_run_whose_rewards_are_all_equal_ends_with_the_filter_on():
    config = make_config(filter_equal_rewards=True, num_steps=None, interval_steps=None)
    world, control = FakeWorld(config, seed=0), make_plane(config, num_prompts=60)
    world.score = lambda trajectory: 0.0
    world.run(control)
    assert world.outcome is not None
    assert world.outcome.cause == "end of data"
    assert control.state.trainer.step == 0
    assert control.state.ledger.dropped == {"equal_rewards": 60 * 4}


def test_a_reward_that_fails_twice_drops_its_trajectory_by_name_and_is_never_a_zero():
    config = make_config(num_steps=2, interval_steps=None)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    execute = world.execute

    def fail_some(command: m.AnyCommand) -> None:
        if not isinstance(command, m.ScoreTrajectories):
            execute(command)
            return
        failed = tuple(
            m.Failed(a.trajectory, a.attempt, "reward_timeout: scripted")
            for a in command.trajectories
            if a.trajectory == 9
        )
        scores = tuple(m.Score(a.trajectory, a.attempt, 1.0) for a in command.trajectories if a.trajectory != 9)
        world.send(0.05, m.Scored(command.id, scores, failed))

    world.run(control, fail_some)
    assert control.state.ledger.dropped == {"reward_timeout": 1}
    assert control.state.counters.num_trajectories_retried == 1
    assert control.state.ledger.trained == 2 * 8 * 4 - 1
