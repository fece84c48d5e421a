"""Leads the trainer through its steps: mini-batches, publish, checkpoint."""

from collections.abc import Iterator

from laminar.config import Config
from laminar.control import groups
from laminar.control.messages import (
    AnyCommand,
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
    """Fresh or restored, the weights it starts with are published first, under a new version."""
    state.trainer.step = state.trainer.saved_step = event.step
    yield _publish(state, config, now)


def take_in_trained(state: ClusterState, config: Config, now: float) -> Iterator[AnyCommand]:
    trainer = state.trainer
    trainer.index += 1
    if trainer.index < trainer.num_mini_batches:
        yield _train_mini_batch(state, config, now)
        return
    trainer.step += 1
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
    if trainer.step > trainer.saved_step and trainer.step % config.checkpoint.interval_steps == 0:
        yield save(state, config, now)


def take_in_checkpoint(state: ClusterState, event: CheckpointSaved) -> Iterator[AnyCommand]:
    state.trainer.phase = TrainerPhase.WAITING
    state.trainer.saved_step = event.step
    state.trainer.num_failed_saves = 0
    yield from groups.forget_trained(state)


def save(state: ClusterState, config: Config, now: float) -> SaveCheckpoint:
    state.trainer.phase = TrainerPhase.SAVING
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
    id = state.expect(Awaited.HAND_OVER, now, config.trainer.work_deadline_s + config.relay.publish_deadline_s)
    return Publish(id, state.trainer.version + 1, state.trainer.step)
