"""Defines a schedule: one object that owns the whole asynchrony contract of a run."""

from collections.abc import Sequence
from typing import Protocol

from laminar.config import (
    Config,
    OneStepStaleSchedule,
    PartialRolloutSchedule,
    StreamingSchedule,
    SynchronousSchedule,
    TrajectoryLevelSchedule,
)
from laminar.control.messages import GroupId
from laminar.control.state import ClusterState, Replica


class Schedule(Protocol):
    """Who waits for whom. It reads the state and keeps none of its own, so that a log replays."""

    may_repack: bool
    """Whether tails may be moved between replicas."""
    interrupts: bool
    """Whether a replica that decodes takes newer weights at once and goes on with its trajectories under them."""
    refresh_wait_max_s: float
    """How long a replica that is to start a batch waits for a version that is on its way."""

    def takers(self, state: ClusterState) -> Sequence[Replica]:
        """Replicas that may take prompt groups now, in the order in which they are served; none without room."""
        ...

    def num_groups_wanted(self, state: ClusterState, replica: Replica, version: int, num_takers: int) -> int:
        """Prompt groups for this replica, one of `num_takers` takers, to be sampled from `version`; 0: it waits."""
        ...

    def groups_to_train(self, state: ClusterState, *, all_here: bool) -> Sequence[GroupId]:
        """What a waiting trainer takes from the buffer now, in mini-batch order; nothing: it goes on waiting.

        A step ends when it has taken `batch.num_prompts_per_step` groups. all_here: no group will come to the buffer
        any more before the next step.
        """
        ...


def build_schedule(config: Config) -> Schedule:
    match config.schedule:
        case TrajectoryLevelSchedule():
            from laminar.control.schedules.trajectory_level import TrajectoryLevel

            return TrajectoryLevel(config)
        case SynchronousSchedule():
            from laminar.control.schedules.synchronous import Synchronous

            return Synchronous(config)
        case OneStepStaleSchedule():
            from laminar.control.schedules.one_step_stale import OneStepStale

            return OneStepStale(config)
        case StreamingSchedule():
            from laminar.control.schedules.streaming import Streaming

            return Streaming(config)
        case PartialRolloutSchedule(staleness_max=staleness_max):
            from laminar.control.schedules.partial_rollout import PartialRollout

            return PartialRollout(config, staleness_max)


def room_in_buffer(state: ClusterState, config: Config) -> int:
    """Prompt groups that may be dispatched now: up to the capacity, and never more than the run will train."""
    capacity = int(config.buffer.capacity_steps * config.batch.num_prompts_per_step)
    room = capacity - state.num_groups_outstanding
    if config.trainer.num_steps is not None:
        num_steps_left = config.trainer.num_steps - state.trainer.step
        room = min(room, num_steps_left * config.batch.num_prompts_per_step - state.num_groups_outstanding)
    return max(0, room)


def num_groups_lacking(state: ClusterState, config: Config, num_steps: int) -> int:
    """Prompt groups not yet dispatched of the batches of the next `num_steps` steps, as far as there is room."""
    lacking = num_steps * config.batch.num_prompts_per_step - state.num_groups_outstanding
    return min(lacking, room_in_buffer(state, config))


def equal_share(state: ClusterState, config: Config, num_groups: int) -> int:
    """A replica's share of a step's batch, of which `num_groups` are left, however many replicas are empty now."""
    num_serving = sum(not r.evaluating for r in state.replicas.values())
    return max(0, min(num_groups, -(-config.batch.num_prompts_per_step // max(1, num_serving))))


def whole_step(state: ClusterState, config: Config, *, all_here: bool) -> Sequence[GroupId]:
    """The oldest groups of the buffer once they are a step's; at the end of the data what is left."""
    step_size = config.batch.num_prompts_per_step
    return state.buffer[:step_size] if len(state.buffer) >= step_size or all_here else ()
