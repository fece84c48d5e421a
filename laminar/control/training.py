"""Leads the trainer through its steps: mini-batches, publish, checkpoint.

A checkpoint is copied, then written while training goes on; one at a time, so one that falls due meanwhile comes later.
"""

from collections.abc import Iterator, Sequence

from laminar.config import Config
from laminar.control import groups, recovery
from laminar.control.messages import (
    AnyCommand,
    CheckpointCopied,
    CheckpointSaved,
    GroupId,
    HandedOver,
    Publish,
    SaveCheckpoint,
    TrainerStarted,
    TrainMiniBatch,
)
from laminar.control.schedules.schedule import Schedule
from laminar.control.staleness import note_trained
from laminar.control.state import Awaited, ClusterState, TrainerPhase
from laminar.control.trajectory_state import TrajectoryState


def take_in_start(state: ClusterState, config: Config, event: TrainerStarted, now: float) -> Iterator[AnyCommand]:
    """Fresh or restored, the weights it starts with are published first, under a new version.

    What was trained after the checkpoint that it restored is to be trained again.
    """
    recovery.roll_back(state, event.step)
    yield from groups.forget_trained(state, event.step)
    state.trainer.step = state.trainer.saved_step = state.trainer.saving_step = event.step
    yield _publish(state, config, now)


def take_in_trained(state: ClusterState, config: Config, now: float) -> Iterator[AnyCommand]:
    """Go on with the step's next mini-batch, end the step after its last, or wait for more groups."""
    trainer = state.trainer
    trainer.index += 1
    if trainer.index * config.batch.num_prompts_per_mini_batch < len(trainer.groups):
        yield _train_mini_batch(state, config, now)
    elif trainer.has_whole_step:
        yield _end_step(state, config, now)
    else:
        trainer.phase = TrainerPhase.WAITING


def take_in_hand_over(state: ClusterState, config: Config, event: HandedOver, now: float) -> Iterator[AnyCommand]:
    trainer = state.trainer
    trainer.version = event.version
    trainer.handed_over_at_s = now
    trainer.is_everywhere = False
    trainer.phase = TrainerPhase.WAITING
    interval = config.checkpoint.interval_steps
    if trainer.step // interval > trainer.saving_step // interval and not is_saving(state):
        yield save(state, config, now)


def take_in_copied(state: ClusterState, event: CheckpointCopied) -> None:
    if event.command in state.pending and state.trainer.phase is TrainerPhase.SAVING:
        state.trainer.phase = TrainerPhase.WAITING


def take_in_checkpoint(state: ClusterState, event: CheckpointSaved) -> Iterator[AnyCommand]:
    if state.trainer.phase is TrainerPhase.SAVING:
        state.trainer.phase = TrainerPhase.WAITING
    state.trainer.saved_step = event.step
    state.trainer.num_failed_saves = 0
    yield from groups.forget_trained(state, event.step)


def is_saving(state: ClusterState) -> bool:
    """Whether a checkpoint is being copied or written."""
    return any(pending.awaited is Awaited.CHECKPOINT for pending in state.pending.values())


def save(state: ClusterState, config: Config, now: float) -> SaveCheckpoint:
    state.trainer.phase = TrainerPhase.SAVING
    state.trainer.saving_step = state.trainer.step
    id = state.expect(Awaited.CHECKPOINT, now, config.trainer.work_deadline_s)
    return SaveCheckpoint(id, state.trainer.step, state.trainer.version)


def go_on(
    state: ClusterState, config: Config, schedule: Schedule, now: float, *, more_will_come: bool
) -> Iterator[AnyCommand]:
    """Give a waiting trainer what the schedule says: a step's groups, or a mini-batch's as they complete.

    A step ends with fewer groups if no more will come, or if the run is to stop in the middle of it.
    """
    trainer = state.trainer
    if trainer.phase is not TrainerPhase.WAITING or steps_done(state, config):
        return
    if state.stopping is not None:
        if trainer.groups:
            yield _end_step(state, config, now)
        return
    num_here = len(state.buffer) + len(trainer.groups)
    all_here = not more_will_come and state.num_groups_outstanding == num_here
    if chosen := schedule.groups_to_train(state, all_here=all_here):
        _take(state, config, chosen, all_here=all_here)
        yield _train_mini_batch(state, config, now)
    elif all_here and trainer.groups:
        yield _end_step(state, config, now)
    elif all_here:
        # The filter dropped everything that was admitted for this step: nothing to train, so admit again.
        state.num_groups_refilled = 0


def steps_done(state: ClusterState, config: Config) -> bool:
    return config.trainer.num_steps is not None and state.trainer.step >= config.trainer.num_steps


def _take(state: ClusterState, config: Config, chosen: Sequence[GroupId], *, all_here: bool) -> None:
    """Move these from the buffer into the step."""
    trainer = state.trainer
    if not trainer.groups:
        trainer.index = 0
    taken = dict.fromkeys(chosen)
    state.buffer = [id for id in state.buffer if id not in taken]
    trainer.groups = [*trainer.groups, *chosen]
    trainer.has_whole_step = len(trainer.groups) >= config.batch.num_prompts_per_step or (all_here and not state.buffer)
    trainer.phase = TrainerPhase.TRAINING
    if trainer.has_whole_step:
        state.num_groups_refilled = 0
    for group in (state.groups[id] for id in chosen):
        group.trained_at_version = trainer.version
        for trajectory in (state.trajectories[id] for id in group.trajectories):
            trajectory.state = TrajectoryState.IN_TRAINING
            note_trained(state, group, trajectory)


def _train_mini_batch(state: ClusterState, config: Config, now: float) -> TrainMiniBatch:
    """All mini-batches are of one size but the last of a step that has fewer groups."""
    trainer, size = state.trainer, config.batch.num_prompts_per_mini_batch
    chosen = trainer.groups[trainer.index * size : (trainer.index + 1) * size]
    members = [(id, group) for group in chosen for id in state.groups[group].trajectories]
    return TrainMiniBatch(
        state.expect(Awaited.MINI_BATCH, now, config.trainer.work_deadline_s),
        step=trainer.step + 1,
        index=trainer.index,
        trajectories=tuple(id for id, _ in members),
        groups=tuple(group for _, group in members),
    )


def _end_step(state: ClusterState, config: Config, now: float) -> Publish:
    trainer = state.trainer
    trainer.step += 1
    trainer.num_losses = 0
    for id in trainer.groups:
        group = state.groups[id]
        group.trained_step = trainer.step
        for trajectory in group.trajectories:
            state.trajectories[trajectory].state = TrajectoryState.TRAINED
    state.trained += trainer.groups
    state.num_groups_outstanding -= len(trainer.groups)
    state.counters.num_groups_trained += len(trainer.groups)
    state.counters.num_steps_short += len(trainer.groups) < config.batch.num_prompts_per_step
    trainer.groups, trainer.has_whole_step = [], False
    return _publish(state, config, now)


def _publish(state: ClusterState, config: Config, now: float) -> Publish:
    state.trainer.phase = TrainerPhase.PUBLISHING
    state.trainer.published_at_s = now
    state.trainer.version_ordered = max(state.trainer.version, state.trainer.version_ordered) + 1
    id = state.expect(Awaited.HAND_OVER, now, config.trainer.work_deadline_s + config.relay.publish_deadline_s)
    return Publish(id, state.trainer.version_ordered, state.trainer.step)
