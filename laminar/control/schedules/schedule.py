"""Defines a schedule: one object that owns the whole asynchrony contract of a run."""

from typing import Protocol

from laminar.config import Config, ScheduleConfig, SynchronousSchedule, TrajectoryLevelSchedule
from laminar.control.state import ClusterState


class Schedule(Protocol):
    may_repack: bool
    """Whether tails may be moved between replicas."""
    newest_only: bool
    """Whether every batch starts at the trainer's version, however long that takes to arrive."""

    def num_groups_wanted(self, state: ClusterState, config: Config, num_empty: int) -> int:
        """Prompt groups that one of `num_empty` empty replicas should take for its next closed batch; 0: it waits."""
        ...


def build_schedule(config: ScheduleConfig) -> Schedule:
    match config:
        case TrajectoryLevelSchedule():
            from laminar.control.schedules.trajectory_level import TrajectoryLevel

            return TrajectoryLevel()
        case SynchronousSchedule():
            from laminar.control.schedules.synchronous import Synchronous

            return Synchronous()


def room_in_buffer(state: ClusterState, config: Config) -> int:
    """Prompt groups that may be dispatched now: up to the capacity, and never more than the run will train."""
    capacity = int(config.buffer.capacity_steps * config.batch.num_prompts_per_step)
    room = capacity - state.num_groups_outstanding
    if config.trainer.num_steps is not None:
        num_steps_left = config.trainer.num_steps - state.trainer.step
        room = min(room, num_steps_left * config.batch.num_prompts_per_step - state.num_groups_outstanding)
    return max(0, room)
