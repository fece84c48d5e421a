"""Every wait ends: what never starts, never completes or always fails is named, and nothing loops for ever."""

from collections import Counter

import msgspec

from laminar.config import FaultsConfig, RelayConfig
from laminar.control import messages as m
from laminar.control.recovery import recover
from laminar.control.state import ClusterState
from laminar.control.trajectory_state import UNFINISHED
from tests.control.fake_world import FakeWorld, make_config, make_plane


def test_a_trainer_that_never_starts_ends_the_run_by_name():
    config = make_config().model_copy(update={"faults": FaultsConfig(start_deadline_s=5.0)})
    world, control = FakeWorld(config, seed=0), make_plane(config)
    for now, event in world.events():
        for command in control.handle(event, now) if not isinstance(event, m.TrainerStarted) else ():
            world.execute(command)
    assert world.outcome is not None
    assert world.outcome.failed
    assert world.outcome.cause == "the trainer was lost: did not start for 5 s"


def test_the_end_is_the_last_command_of_a_run_whatever_else_its_event_leads_to():
    config = make_config(num_replicas=4, num_replacements_max=0)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    for replica in range(4):
        world.hang(replica, 3.0)
    world.run(control)
    assert world.outcome is not None
    assert world.outcome.failed
    assert isinstance(world.commands[-1][1], m.EndRun)


def test_checkpoints_that_all_fail_end_the_run_by_name():
    config = make_config(num_steps=2)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    execute = world.execute

    def fail_every_save(command: m.AnyCommand) -> None:
        if isinstance(command, m.SaveCheckpoint):
            world.send(0.1, m.CommandFailed(command.id, "disk full"))
        else:
            execute(command)

    world.run(control, fail_every_save)
    assert world.outcome is not None
    assert world.outcome.failed
    assert world.outcome.cause == "the checkpoint of step 2 failed: disk full"


def test_rewards_that_all_fail_end_the_run_as_failed_by_name():
    config = make_config(num_steps=None, interval_steps=None)
    world, control = FakeWorld(config, seed=0), make_plane(config, num_prompts=20)
    execute = world.execute

    def fail_every_score(command: m.AnyCommand) -> None:
        if isinstance(command, m.ScoreTrajectories):
            cause = "reward_exception: KeyError"
            failed = tuple(m.Failed(a.trajectory, a.attempt, cause) for a in command.trajectories)
            world.send(0.05, m.Scored(command.id, (), failed))
        else:
            execute(command)

    world.run(control, fail_every_score)
    assert world.outcome is not None
    assert world.outcome.failed
    assert world.outcome.cause.startswith(
        "nothing was trained: 80 trajectories were dropped, most for reward_exception"
    )


def test_a_relay_that_reports_and_never_completes_a_version_is_replaced_and_only_it():
    config = make_config(num_steps=12).model_copy(update={"relay": RelayConfig(publish_deadline_s=2.0)})
    world, control = FakeWorld(config, seed=0), make_plane(config)
    world.stuck_relays = [1]
    world.run(control)
    started = Counter(c.machine for _, c in world.commands if isinstance(c, m.StartRelay))
    assert started == {1: 1}
    assert control.state.trainer.step == 12


def test_a_version_that_is_complete_before_its_hand_over_is_known_waits_for_it():
    config = make_config()
    world, control = FakeWorld(config, seed=0), make_plane(config)
    world.hand_over_s = 0.3
    world.run(control)
    assert control.state.trainer.step == 6
    assert control.state.trainer.is_everywhere


def test_after_a_resume_unfinished_trajectories_are_spread_over_the_replicas():
    config = make_config(num_steps=None)
    first, control = FakeWorld(config, seed=0), make_plane(config, num_prompts=64)
    for now, event in first.events():
        decoding = [t for t in control.state.trajectories.values() if t.state in UNFINISHED and not t.evaluation]
        if control.state.trainer.saved_step and len(decoding) > 16:
            break
        for command in control.handle(event, now):
            first.execute(command)
    state = msgspec.json.decode(msgspec.json.encode(control.state), type=ClusterState)
    recover(state, step=state.trainer.saved_step)
    num_homeless = len(state.homeless)
    second = FakeWorld(config, seed=1, step=state.trainer.saved_step)
    second.run(make_plane(config, num_prompts=64, state=state))
    taken = [len(c.trajectories) for _, c in second.commands if isinstance(c, m.Resume)]
    assert num_homeless > 8
    assert sum(taken) >= num_homeless
    assert max(taken) <= -(-num_homeless // 4) + 4, "one replica got more than its share"
