"""A lost trainer goes back to its newest checkpoint while replicas go on; a checkpoint is written beside training."""

from collections import Counter
from itertools import pairwise

import pytest

from laminar.config import FaultsConfig, ScheduleConfig, TrainerConfig
from laminar.control import messages as m
from laminar.control.plane import ControlPlane
from tests.control.fake_world import FakeWorld, make_config, make_plane
from tests.control.test_plane import SCHEDULES, prompts_dispatched

NUM_PROMPTS = 44


def run_with_losses(config, seed, at_s, **world_settings) -> tuple[FakeWorld, ControlPlane]:
    world, control = FakeWorld(config, seed, num_prompts=NUM_PROMPTS), make_plane(config, num_prompts=NUM_PROMPTS)
    for name, value in world_settings.items():
        setattr(world, name, value)
    for moment in at_s:
        world.kill_trainer(moment)
    world.run(control)
    return world, control


def groups_by_step(world: FakeWorld) -> dict[int, list[int]]:
    """The prompt groups that each step trained, in the history that survived: a step done again replaces the former."""
    steps: dict[int, list[int]] = {}
    for _, command in world.commands:
        if isinstance(command, m.TrainMiniBatch):
            if command.index == 0:
                steps[command.step] = []
            steps[command.step] += dict.fromkeys(command.groups)
    return steps


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
@pytest.mark.parametrize("seed", range(6))
def test_every_prompt_is_trained_exactly_once_though_the_trainer_is_lost_now_and_then(
    schedule: ScheduleConfig, seed: int
):
    config = make_config(schedule=schedule, num_steps=None)
    at_s = [2.2 + 0.37 * seed, 6.1 + 0.21 * seed, 9.3 - 0.11 * seed]
    world, control = run_with_losses(config, seed, at_s)
    assert world.outcome is not None
    assert world.outcome.cause == "end of data"
    assert control.state.counters.num_trainers_lost >= 2
    assert control.state.ledger.dispatched == control.state.ledger.trained == NUM_PROMPTS * 4
    assert prompts_dispatched(world) == Counter(dict.fromkeys(range(NUM_PROMPTS), 1))
    trained = [group for groups in groups_by_step(world).values() for group in groups]
    assert sorted(trained) == sorted(set(trained))
    assert len(trained) == NUM_PROMPTS


def test_versions_go_up_and_steps_go_back_to_the_checkpoint():
    world, control = run_with_losses(make_config(num_steps=6), 0, [6.0])
    published = [(c.version, c.step) for _, c in world.commands if isinstance(c, m.Publish)]
    versions, steps = zip(*published, strict=True)
    assert list(versions) == list(range(len(versions)))
    (back,) = [i for i in range(1, len(steps)) if steps[i] < steps[i - 1] or steps[i] == steps[i - 1]]
    assert steps[back] % 2 == 0, "a checkpoint is made every second step"
    assert steps[back:] == tuple(range(steps[back], 7))
    assert control.state.counters.num_trainers_lost == 1


def test_replicas_generate_while_the_trainer_is_away():
    config = make_config(num_steps=6)
    world, control = run_with_losses(config, 1, [4.0], trainer_start_s=3.0)
    away = [at_s for at_s, c in world.commands if isinstance(c, m.StartTrainer)]
    back = next(at_s for at_s, c in world.commands if isinstance(c, m.Publish) and at_s > away[0])
    assert back - away[0] == pytest.approx(3.0, abs=0.1)
    assert any(isinstance(c, m.ScoreTrajectories) for at_s, c in world.commands if away[0] < at_s < back)
    assert control.state.counters.num_replicas_lost == control.state.counters.num_relays_lost == 0


def test_a_checkpoint_that_is_there_though_nobody_heard_of_it_counts():
    """It is complete 0.6 s after its copy and heard of 0.1 s later: the trainer dies in between."""
    config = make_config(num_steps=6)
    probe = FakeWorld(config, 0, num_prompts=NUM_PROMPTS)
    probe.run(make_plane(config, num_prompts=NUM_PROMPTS))
    saved_at_s = next(at_s for at_s, c in probe.commands if isinstance(c, m.SaveCheckpoint) and c.step == 2)
    world, control = run_with_losses(config, 0, [saved_at_s + 0.65])
    after = [c for at_s, c in world.commands if isinstance(c, m.TrainMiniBatch) and at_s > saved_at_s + 1]
    assert after[0].step == 3
    assert not [c for _, c in world.commands if isinstance(c, m.SaveCheckpoint) and c.step == 1]
    assert control.state.ledger.trained == NUM_PROMPTS * 4
    assert control.state.trainer.saved_step == 6


def test_a_hung_trainer_is_given_up_and_its_late_answer_changes_nothing():
    config = make_config(num_steps=4).model_copy(update={"trainer": TrainerConfig(num_steps=4, work_deadline_s=2.0)})
    world, control = FakeWorld(config, seed=0), make_plane(config)
    execute, hung = world.execute, []

    def hang_once(command: m.AnyCommand) -> None:
        if isinstance(command, m.TrainMiniBatch) and command.step == 2 and not hung:
            hung.append(command)
            world.send(2.5, m.MiniBatchTrained(command.id, command.step, command.index))
            world.send(2.6, m.TrainerLost("killed at last", 0))
        else:
            execute(command)

    world.run(control, hang_once)
    (restarted,) = [c for _, c in world.commands if isinstance(c, m.StartTrainer)]
    assert restarted.cause == "mini-batch: no outcome of mini-batch within 2 s"
    assert control.state.counters.num_trainers_lost == 1
    assert control.state.counters.num_late_messages >= 2
    assert control.state.ledger.trained == 4 * 8 * 4


def test_a_trainer_that_fails_again_and_again_ends_the_run_by_name():
    config = make_config()
    world, control = FakeWorld(config, seed=0), make_plane(config)
    execute = world.execute

    def fail_every_mini_batch(command: m.AnyCommand) -> None:
        if isinstance(command, m.TrainMiniBatch):
            world.send(0.1, m.CommandFailed(command.id, "rank 0: ValueError: shapes"))
        else:
            execute(command)

    world.run(control, fail_every_mini_batch)
    assert world.outcome is not None
    assert world.outcome.failed
    assert world.outcome.cause == "the trainer was lost: mini-batch: rank 0: ValueError: shapes"
    assert sum(isinstance(c, m.StartTrainer) for _, c in world.commands) == 3


def test_without_replacements_left_its_loss_ends_the_run_by_name():
    config = make_config().model_copy(update={"faults": FaultsConfig(report_deadline_s=2.0, num_replacements_max=0)})
    world, _ = run_with_losses(config, 0, [4.0])
    assert world.outcome is not None
    assert world.outcome.failed
    assert "the trainer was lost: rank 1: killed, and faults.num_replacements_max=0" in world.outcome.cause


def test_a_trainer_that_comes_up_with_less_than_was_saved_ends_the_run_by_name():
    config = make_config()
    world, control = FakeWorld(config, seed=0), make_plane(config)
    execute = world.execute

    def forget_the_checkpoint(command: m.AnyCommand) -> None:
        if isinstance(command, m.StartTrainer):
            world.send(0.5, m.TrainerStarted(0, command.attempt))
        else:
            execute(command)

    world.kill_trainer(6.0)
    world.run(control, forget_the_checkpoint)
    assert world.outcome is not None
    assert world.outcome.failed
    assert "came up with step 0, but step" in world.outcome.cause


# ------------------------------------------------------------------------------------------------------- checkpoints


def test_training_goes_on_while_a_checkpoint_is_written_and_what_it_does_not_cover_is_kept():
    config = make_config(num_steps=6)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    world.write_s = 3.0
    num_beyond: list[int] = []
    for now, event in world.events():
        is_saved = isinstance(event, m.CheckpointSaved) and event.command in control.state.pending
        for command in control.handle(event, now):
            world.execute(command)
        control.state.check()
        if isinstance(event, m.CheckpointSaved) and is_saved:
            num_beyond.append(control.state.trainer.step - event.step)
            kept = [control.state.groups[id].trained_step for id in control.state.trained]
            assert kept == [step for step in range(event.step + 1, control.state.trainer.step + 1) for _ in range(8)]
    assert max(num_beyond) >= 1, "nothing was trained meanwhile"
    assert control.state.trainer.saved_step == 6
    assert control.state.ledger.trained == 6 * 8 * 4
    saved = [(at_s, c.step) for at_s, c in world.commands if isinstance(c, m.SaveCheckpoint)]
    assert all(later - earlier >= 3.0 for (earlier, _), (later, _) in pairwise(saved))


def test_one_that_falls_due_while_another_is_written_comes_at_the_next_step():
    config = make_config(num_steps=None, interval_steps=None)
    world, control = FakeWorld(config, seed=0, num_prompts=80), make_plane(config, num_prompts=80)
    world.write_s = 3.0
    world.run(control)
    steps = [c.step for _, c in world.commands if isinstance(c, m.SaveCheckpoint)]
    assert steps == [2, 5, 8, 10], "that of step 4 waited for that of step 2"


def test_a_checkpoint_that_fails_after_its_copy_costs_training_nothing():
    config = make_config(num_steps=6)
    world, control = FakeWorld(config, seed=0), make_plane(config)
    execute, failed = world.execute, []

    def fail_the_first(command: m.AnyCommand) -> None:
        if isinstance(command, m.SaveCheckpoint) and not failed:
            failed.append(command)
            world.send(0.05, m.CheckpointCopied(command.id, command.step))
            world.send(0.4, m.CommandFailed(command.id, "rank 1: OSError: No space left on device"))
        else:
            execute(command)

    world.run(control, fail_the_first)
    assert world.outcome is not None
    assert not world.outcome.failed
    assert [c.step for _, c in world.commands if isinstance(c, m.SaveCheckpoint)] == [4, 6]
    assert control.state.counters.num_checkpoints_failed == 1
    assert control.state.ledger.trained == 6 * 8 * 4
