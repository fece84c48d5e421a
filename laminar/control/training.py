"""Leads the trainer through its steps: mini-batches, publish, checkpoint.

A checkpoint is copied, then written while training goes on; one at a time, so one that falls due meanwhile comes later.
"""

from collections.abc import Iterator

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
from laminar.control.staleness import note_trained
from laminar.control.state import Awaited, ClusterState, TrainerPhase, TrajectoryState


def take_in_start(state: ClusterState, config: Config, event: TrainerStarted, now: float) -> Iterator[AnyCommand]:
    """Fresh or restored, the weights it starts with are published first, under a new version.

    What was trained after the checkpoint that it restored is to be trained again.
    """
    recovery.roll_back(state, event.step)
    yield from groups.forget_trained(state, event.step)
    state.trainer.step = state.trainer.saved_step = state.trainer.saving_step = event.step
    yield _publish(state, config, now)


def take_in_trained(state: ClusterState, config: Config, now: float) -> Iterator[AnyCommand]:
    trainer = state.trainer
    trainer.index += 1
    if trainer.index < trainer.num_mini_batches:
        yield _train_mini_batch(state, config, now)
        return
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
    trainer.groups = []
    yield _publish(state, config, now)


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


def start_step(state: ClusterState, config: Config, now: float, *, more_will_come: bool) -> Iterator[AnyCommand]:
    """Start the next step if its groups are there; the last one takes what is left."""
    trainer = state.trainer
    if trainer.phase is not TrainerPhase.WAITING or state.stopping is not None or steps_done(state, config):
        return
    wanted = config.batch.num_prompts_per_step
    all_here = not more_will_come and state.num_groups_outstanding == len(state.buffer)
    if all_here and not state.buffer:
        # The filter dropped everything that was admitted for this step: nothing to train, so admit again.
        state.num_groups_refilled = 0
    if not state.buffer or (len(state.buffer) < wanted and not all_here):
        return
    state.counters.num_steps_short += len(state.buffer) < wanted
    state.num_groups_refilled = 0
    trainer.groups, state.buffer = state.buffer[:wanted], state.buffer[wanted:]
    trainer.num_mini_batches = min(config.batch.num_mini_batches, len(trainer.groups))
    trainer.index = 0
    trainer.phase = TrainerPhase.TRAINING
    for group in (state.groups[id] for id in trainer.groups):
        group.trained_at_version = trainer.version
        for trajectory in (state.trajectories[id] for id in group.trajectories):
            trajectory.state = TrajectoryState.IN_TRAINING
            note_trained(state, group, trajectory)
    yield _train_mini_batch(state, config, now)


def steps_done(state: ClusterState, config: Config) -> bool:
    return config.trainer.num_steps is not None and state.trainer.step >= config.trainer.num_steps


def _train_mini_batch(state: ClusterState, config: Config, now: float) -> TrainMiniBatch:
    trainer = state.trainer
    chosen = _share(trainer.groups, trainer.index, trainer.num_mini_batches)
    members = [(id, group) for group in chosen for id in state.groups[group].trajectories]
    return TrainMiniBatch(
        state.expect(Awaited.MINI_BATCH, now, config.trainer.work_deadline_s),
        step=trainer.step + 1,
        index=trainer.index,
        trajectories=tuple(id for id, _ in members),
        groups=tuple(group for _, group in members),
    )


def _share(items: list[GroupId], index: int, num_shares: int) -> list[GroupId]:
    """The index-th of num_shares consecutive shares whose sizes differ by one at most."""
    return items[index * len(items) // num_shares : (index + 1) * len(items) // num_shares]


def _publish(state: ClusterState, config: Config, now: float) -> Publish:
    state.trainer.phase = TrainerPhase.PUBLISHING
    state.trainer.published_at_s = now
    state.trainer.version_ordered = max(state.trainer.version, state.trainer.version_ordered) + 1
    id = state.expect(Awaited.HAND_OVER, now, config.trainer.work_deadline_s + config.relay.publish_deadline_s)
    return Publish(id, state.trainer.version_ordered, state.trainer.step)
