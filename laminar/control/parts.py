"""Defines what messages are made of: the ids, and the records that several events or commands carry.

The records hold numbers and text only, so no garbage collector needs to look at them (`gc=False`): thousands come and
go every second.
"""

from typing import NewType

import msgspec

MachineId = NewType("MachineId", int)
ReplicaId = NewType("ReplicaId", int)
PromptId = NewType("PromptId", int)
GroupId = NewType("GroupId", int)
TrajectoryId = NewType("TrajectoryId", int)
CommandId = NewType("CommandId", int)


class DecodeCost(msgspec.Struct, frozen=True, gc=False):
    """Seconds of one engine step: `floor_s + per_kv_token_s * KV tokens + per_running_s * trajectories running`."""

    floor_s: float
    per_kv_token_s: float
    per_running_s: float


class Progress(msgspec.Struct, frozen=True, gc=False):
    """How far an unfinished trajectory is: response tokens so far, tool output included."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int
    waiting_for_tool: bool = False


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The whole response is there; `truncated` when the length limit ended it."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int
    truncated: bool


class Failed(msgspec.Struct, frozen=True, gc=False):
    """A trajectory that could not go on (engine, environment or reward), and why."""

    trajectory: TrajectoryId
    attempt: int
    cause: str


class Score(msgspec.Struct, frozen=True, gc=False):
    trajectory: TrajectoryId
    attempt: int
    score: float


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """One trajectory given to a replica. `num_tokens` response tokens exist already (0: from the prompt)."""

    trajectory: TrajectoryId
    attempt: int
    group: GroupId
    prompt: PromptId
    num_tokens: int = 0
