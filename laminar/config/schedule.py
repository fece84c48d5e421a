"""Settings of the schedules: each has its kind, and only the fields of that kind."""

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Section


class TrajectoryLevelSchedule(Section):
    """Each replica takes the newest weights when its own batch ends (Laminar)."""

    kind: Literal["trajectory_level"] = "trajectory_level"
    """Nobody waits: a replica whose batch has ended goes on with the newest weights."""


class SynchronousSchedule(Section):
    """All replicas generate the step's batch, all stop, all load (verl)."""

    kind: Literal["synchronous"] = "synchronous"
    """Everybody waits: generation, training and loading take turns."""


class OneStepStaleSchedule(Section):
    """All replicas generate the next step's batch while one is trained, and switch together (one-step pipelines)."""

    kind: Literal["one_step_stale"] = "one_step_stale"
    """Generation is one step ahead of training; both wait for each other's end."""


class StreamingSchedule(Section):
    """As one_step_stale, but the trainer takes mini-batch by mini-batch as prompt groups complete."""

    kind: Literal["streaming"] = "streaming"
    """Training of a step overlaps with the generation of its own tail."""


class PartialRolloutSchedule(Section):
    """Replicas never stop: at a publish they interrupt, load, and go on with the same trajectories (AReaL)."""

    kind: Literal["partial_rollout"] = "partial_rollout"
    """A trajectory may have tokens of several versions; admission bounds how old its oldest are."""
    staleness_max: Annotated[int, Field(ge=0)] | None = 4
    """Steps between the version of a trajectory's oldest tokens and the one it is trained at (eta); none: unbounded."""


ScheduleConfig = Annotated[
    TrajectoryLevelSchedule | SynchronousSchedule | OneStepStaleSchedule | StreamingSchedule | PartialRolloutSchedule,
    Field(discriminator="kind"),
]
