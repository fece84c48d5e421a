"""Defines every event that enters the control plane and every command that leaves it.

An event is a fact, in the past tense; a command an order. Both carry ids and numbers, never payload or live objects,
so any run can be written down and replayed. Each command has an id, each trajectory an attempt number; the outcome or
failure of a command carries them back, so that late, lost and repeated messages are recognised by comparison.
"""

from typing import NewType

import msgspec

MachineId = NewType("MachineId", int)
ReplicaId = NewType("ReplicaId", int)
PromptId = NewType("PromptId", int)
GroupId = NewType("GroupId", int)
TrajectoryId = NewType("TrajectoryId", int)
CommandId = NewType("CommandId", int)


class DecodeCost(msgspec.Struct, frozen=True):
    """Seconds of one engine step: `floor_s + per_kv_token_s * KV tokens + per_running_s * trajectories running`."""

    floor_s: float
    per_kv_token_s: float
    per_running_s: float


class Progress(msgspec.Struct, frozen=True):
    """How far an unfinished trajectory is: response tokens so far, tool output included."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int
    waiting_for_tool: bool = False


class Finished(msgspec.Struct, frozen=True):
    """The whole response is there; `truncated` when the length limit ended it."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int
    truncated: bool


class Failed(msgspec.Struct, frozen=True):
    """A trajectory that could not go on (engine, environment or reward), and why."""

    trajectory: TrajectoryId
    attempt: int
    cause: str


class Score(msgspec.Struct, frozen=True):
    trajectory: TrajectoryId
    attempt: int
    score: float


# ---------------------------------------------------------------------------------------------------------- events


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A fact. The driver stamps it with the time it arrived."""


class RunStarted(Event, frozen=True):
    """The first event of every start: these machines are there, their relays and the trainer are coming up."""

    machines: tuple[MachineId, ...]


class Tick(Event, frozen=True):
    """Time passed: look at deadlines and for long tails."""


class ReplicaStarted(Event, frozen=True):
    """A rollout worker is up. It holds no weights yet."""

    replica: ReplicaId
    machine: MachineId
    kv_capacity_tokens: int
    decode_cost: DecodeCost


class ReplicaReport(Event, frozen=True):
    """What changed on a replica since its last report; also its heartbeat, so it may be empty."""

    replica: ReplicaId
    kv_utilization: float
    num_running: int
    num_waiting: int
    num_preemptions: int
    progress: tuple[Progress, ...] = ()
    finished: tuple[Finished, ...] = ()
    failed: tuple[Failed, ...] = ()


class Released(Event, frozen=True):
    """Answers Release: where the moved trajectories stopped. Those not in it have ended, as a report says."""

    command: CommandId
    replica: ReplicaId
    progress: tuple[Progress, ...] = ()


class Loaded(Event, frozen=True):
    """Answers Load: the checksum and the log-prob probe agreed with the publisher's."""

    command: CommandId
    replica: ReplicaId
    version: int
    load_s: float


class LoadFailed(Event, frozen=True):
    """Answers Load. `serves_on`: the relay could not give the version and the replica still has its old weights.

    Otherwise what arrived is not what was published, and the replica must not serve any more.
    """

    command: CommandId
    replica: ReplicaId
    version: int
    cause: str
    serves_on: bool


class ReplicaLost(Event, frozen=True):
    """The replica's process died (a hint that comes before its silence would tell)."""

    replica: ReplicaId
    cause: str


class ReplicaFailedToStart(Event, frozen=True):
    replica: ReplicaId
    cause: str


class Scored(Event, frozen=True):
    """Answers ScoreTrajectories."""

    command: CommandId
    scores: tuple[Score, ...] = ()
    failed: tuple[Failed, ...] = ()


class TrainerStarted(Event, frozen=True):
    """The trainer, all its ranks, holds the weights of `step` (0: the initial ones). attempt: see StartTrainer."""

    step: int
    attempt: int = 0


class MiniBatchTrained(Event, frozen=True):
    """Answers TrainMiniBatch: one optimizer update is done."""

    command: CommandId
    step: int
    index: int


class HandedOver(Event, frozen=True):
    """Answers Publish: the trainer copied its weights into host memory and goes on; the broadcast has begun."""

    command: CommandId
    version: int
    stall_s: float


class CheckpointCopied(Event, frozen=True):
    """Answers SaveCheckpoint, first: the trainer copied its state into host memory and goes on; it is being written."""

    command: CommandId
    step: int


class CheckpointSaved(Event, frozen=True):
    """Answers SaveCheckpoint, last: complete on disk."""

    command: CommandId
    step: int


class RewardFailedToStart(Event, frozen=True):
    """The reward function cannot be loaded, or its workers cannot be started."""

    cause: str


class TrainerLost(Event, frozen=True):
    """A rank's process died, or the trainer could not start. attempt: of which start, see StartTrainer."""

    cause: str
    attempt: int = 0


class RelayStarted(Event, frozen=True):
    machine: MachineId


class RelayFailedToStart(Event, frozen=True):
    machine: MachineId
    cause: str


class RelayReport(Event, frozen=True):
    """A relay's heartbeat: the version it is receiving (or none) and how much of it has come."""

    machine: MachineId
    incoming_version: int | None
    incoming_bytes: int


class VersionComplete(Event, frozen=True):
    """A version is complete and checksummed in the machine's relay; its replicas can load it from now on."""

    machine: MachineId
    version: int


class VersionEvicted(Event, frozen=True):
    machine: MachineId
    version: int


class RelayLost(Event, frozen=True):
    machine: MachineId
    cause: str


class CommandFailed(Event, frozen=True):
    """A command's execution raised and has no failure event of its own."""

    command: CommandId
    cause: str


class StopRequested(Event, frozen=True):
    """The user asked the run to end (Ctrl-C)."""

    cause: str


AnyEvent = (
    RunStarted
    | Tick
    | ReplicaStarted
    | ReplicaReport
    | Released
    | Loaded
    | LoadFailed
    | ReplicaLost
    | ReplicaFailedToStart
    | Scored
    | TrainerStarted
    | MiniBatchTrained
    | HandedOver
    | CheckpointCopied
    | CheckpointSaved
    | TrainerLost
    | RewardFailedToStart
    | RelayStarted
    | RelayFailedToStart
    | RelayReport
    | VersionComplete
    | VersionEvicted
    | RelayLost
    | CommandFailed
    | StopRequested
)

# -------------------------------------------------------------------------------------------------------- commands


class Assignment(msgspec.Struct, frozen=True):
    """One trajectory given to a replica. `num_tokens` response tokens exist already (0: from the prompt)."""

    trajectory: TrajectoryId
    attempt: int
    group: GroupId
    prompt: PromptId
    num_tokens: int = 0


class Command(msgspec.Struct, frozen=True, tag=True, tag_field="command_type"):
    """An order. Executing it starts work and returns; the outcome is a later event."""

    id: CommandId


class StartReplica(Command, frozen=True):
    replica: ReplicaId
    machine: MachineId


class StartRelay(Command, frozen=True):
    """Bring up a relay on a machine that lost its own; what is left of the old one is ended."""

    machine: MachineId
    cause: str


class StartTrainer(Command, frozen=True):
    """Bring the trainer up again from its newest complete checkpoint; what is left of the one before is ended.

    attempt: counts the starts of the trainer in this run of the program, from 0, the one that nobody has to order.
    """

    attempt: int
    cause: str


class StopReplica(Command, frozen=True):
    """End the replica's process, which may be hung or dead already."""

    replica: ReplicaId
    cause: str


class Load(Command, frozen=True):
    """Take a version from the machine's relay; the replica is empty."""

    replica: ReplicaId
    version: int


class Generate(Command, frozen=True):
    """Start a closed batch of fresh trajectories at the version the replica holds."""

    replica: ReplicaId
    version: int
    trajectories: tuple[Assignment, ...]
    evaluation: bool = False


class Resume(Command, frozen=True):
    """Go on with trajectories that began elsewhere, at the same version, from their tokens so far."""

    replica: ReplicaId
    version: int
    trajectories: tuple[Assignment, ...]
    evaluation: bool = False


class Release(Command, frozen=True):
    """Stop decoding these and hand back their tokens; they will be resumed elsewhere."""

    replica: ReplicaId
    trajectories: tuple[TrajectoryId, ...]


class ScoreTrajectories(Command, frozen=True):
    trajectories: tuple[Assignment, ...]
    evaluation: bool = False


class TrainMiniBatch(Command, frozen=True):
    """One optimizer update on whole prompt groups: `groups[i]` is the prompt group of `trajectories[i]`."""

    step: int
    index: int
    trajectories: tuple[TrajectoryId, ...]
    groups: tuple[GroupId, ...]


class Publish(Command, frozen=True):
    """Hand the trainer's weights to the master relay as a new version."""

    version: int
    step: int


class SaveCheckpoint(Command, frozen=True):
    step: int
    version: int


class SetChain(Command, frozen=True):
    """The relays' order from now on: the first is the master, each forwards to the next."""

    machines: tuple[MachineId, ...]


class RetainVersions(Command, frozen=True):
    """Versions that live trajectories need; every relay keeps them while its memory allows."""

    versions: tuple[int, ...]


class Forget(Command, frozen=True):
    """The payload of these trajectories is needed no more (trained for good, or dropped)."""

    trajectories: tuple[TrajectoryId, ...]


class EndRun(Command, frozen=True):
    """Nothing is left to do, or nothing can be done. `failed` decides the exit status."""

    failed: bool
    cause: str


AnyCommand = (
    StartReplica
    | StartRelay
    | StartTrainer
    | StopReplica
    | Load
    | Generate
    | Resume
    | Release
    | ScoreTrajectories
    | TrainMiniBatch
    | Publish
    | SaveCheckpoint
    | SetChain
    | RetainVersions
    | Forget
    | EndRun
)
