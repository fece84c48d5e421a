"""What the control plane knows of a trajectory and of its prompt group."""

from enum import StrEnum

import msgspec

from laminar.control.messages import GroupId, PromptId, ReplicaId, TrajectoryId


class TrajectoryState(StrEnum):
    QUEUED = "queued"
    """Given to a replica (or waiting for one) and not yet decoding."""
    DECODING = "decoding"
    WAITING_FOR_TOOL = "waiting_for_tool"
    MOVING = "moving"
    """Being released by one replica to be resumed on another, or rescued and without a home yet."""
    FINISHED = "finished"
    SCORED = "scored"
    BUFFERED = "buffered"
    """Its group is complete and waits for the trainer."""
    IN_TRAINING = "in_training"
    TRAINED = "trained"
    """Final only at the checkpoint that covers it; until then a lost trainer returns it to the buffer."""


ON_REPLICA = (TrajectoryState.QUEUED, TrajectoryState.DECODING, TrajectoryState.WAITING_FOR_TOOL)
UNFINISHED = (*ON_REPLICA, TrajectoryState.MOVING)


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A response's tokens from `start` on, up to the next segment, are sampled from this version."""

    start: int
    version: int


class Trajectory(msgspec.Struct):
    id: TrajectoryId
    group: GroupId
    prompt: PromptId
    evaluation: bool
    state: TrajectoryState
    replica: ReplicaId | None
    """Where it decodes; none while it has no home."""
    target: ReplicaId | None
    """Where it goes on once its replica has released it."""
    dispatched_at_s: float
    segments: list[Segment] = []
    """Oldest first, one but under partial_rollout; none until it has a home."""
    attempt: int = 0
    num_tokens: int = 0
    num_failures: int = 0
    truncated: bool = False
    score: float | None = None

    @property
    def version(self) -> int | None:
        """That of its oldest tokens; none until it has a home."""
        return self.segments[0].version if self.segments else None

    @property
    def newest_version(self) -> int | None:
        """That of its tokens to come."""
        return self.segments[-1].version if self.segments else None

    def sample_from(self, version: int) -> None:
        """Its tokens to come are of this version; a segment that got no token is none."""
        self.drop_empty_segments()
        if self.newest_version != version:
            self.segments.append(Segment(self.num_tokens, version))

    def drop_empty_segments(self) -> None:
        while self.segments and self.segments[-1].start >= self.num_tokens:
            self.segments.pop()


class Group(msgspec.Struct):
    """A prompt group: `trajectories` are those of its members that were not dropped."""

    id: GroupId
    prompt: PromptId
    evaluation: bool
    trajectories: list[TrajectoryId]
    version: int
    """No token of its trajectories is older."""
    mixed: bool = False
    """A member restarted at a newer version than the others."""
    trained_step: int | None = None
    trained_at_version: int | None = None
    """The version that the trainer held when its step began."""
