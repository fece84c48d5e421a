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


ScheduleConfig = Annotated[TrajectoryLevelSchedule | SynchronousSchedule, Field(discriminator="kind")]
