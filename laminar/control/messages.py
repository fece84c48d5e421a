"""Defines every event that enters the control plane and every command that leaves it.

An event is a fact, in the past tense; a command an order. Both carry ids and numbers, never payload or live objects,
so any run can be written down and replayed. Each command has an id, each trajectory an attempt number; the outcome or
failure of a command carries them back, so that late, lost and repeated messages are recognised by comparison.
"""

import msgspec

from laminar.control.parts import (
    Assignment,
    CommandId,
    DecodeCost,
    Failed,
    Finished,
    GroupId,
    MachineId,
    Progress,
    ReplicaId,
    Score,
    TrajectoryId,
)
from laminar.control.parts import PromptId as PromptId  # Part of what others import from here.

# ---------------------------------------------------------------------------------------------------------- events


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """A fact. The driver stamps it with the time it arrived."""


class RunStarted(Event, frozen=True):
    """The first event of every start: the machines, and how many replicas each gets; all else is coming up."""

    machines: dict[MachineId, int]


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
    num_waiting_without_kv: int = 0
    """Trajectories that wait for a tool and whose KV is gone, so that `kv_utilization` says nothing of them."""


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
    """Answers Load. `serves_on`: the relay lacks the version, the old weights serve on; else wrong weights arrived."""

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


class ServiceFailedToStart(Event, frozen=True):
    """What trajectories cannot do without cannot be had: a reward worker, or a sandbox."""

    cause: str


class TrainerLost(Event, frozen=True):
    cause: str
    attempt: int = 0


class RelayStarted(Event, frozen=True):
    machine: MachineId


class RelayFailedToStart(Event, frozen=True):
    machine: MachineId
    cause: str


class RelayReport(Event, frozen=True):
    """A relay's heartbeat: the version it is receiving, the one it is sending on (or none), and how much of each.

    `next_is_lost`: it cannot reach the next relay of the chain, and keeps trying.
    """

    machine: MachineId
    incoming_version: int | None
    incoming_bytes: int
    sending_version: int | None = None
    sending_bytes: int = 0
    next_is_lost: bool = False


class SenderReport(Event, frozen=True):
    """How far the trainer's hand-over is on its way to the master relay; told while one is being sent."""

    version: int | None
    num_bytes: int
    master_is_lost: bool


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
    | ServiceFailedToStart
    | RelayStarted
    | RelayFailedToStart
    | RelayReport
    | SenderReport
    | VersionComplete
    | VersionEvicted
    | RelayLost
    | CommandFailed
    | StopRequested
)

# -------------------------------------------------------------------------------------------------------- commands


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
    """Bring the trainer up again from its newest complete checkpoint. attempt: counts its starts, from 0."""

    attempt: int
    cause: str


class StopReplica(Command, frozen=True):
    """End the replica's process, which may be hung or dead already."""

    replica: ReplicaId
    cause: str


class Load(Command, frozen=True):
    """Take a version from the machine's relay.

    The replica is empty, or with `interrupt` its trajectories stop where they are (a report says where, before the
    outcome), and go on from their tokens: under the new version, or under the old one if the relay could not give it.
    """

    replica: ReplicaId
    version: int
    interrupt: bool = False


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


class Fetch(Command, frozen=True):
    """Have the source's relay send an older version to this machine's relay. Answered by VersionComplete."""

    machine: MachineId
    version: int
    source: MachineId


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
    | Fetch
    | RetainVersions
    | Forget
    | EndRun
)
