"""Holds what the control plane knows of a replica: part of its state."""

from enum import StrEnum

import msgspec

from laminar.control.parts import CommandId, DecodeCost, MachineId, ReplicaId, TrajectoryId


class Phase(StrEnum):
    """What a replica is doing, as the timeline shows it."""

    STARTING = "starting"
    LOADING = "loading"
    GENERATING = "generating"
    TAIL = "tail"
    """No work waits and KV utilization has begun to fall."""
    REPACKED = "repacked"
    """Its trajectories are being moved away."""
    EVALUATING = "evaluating"
    IDLE = "idle"


class Replica(msgspec.Struct):
    id: ReplicaId
    machine: MachineId
    heard_at_s: float
    started: bool = False
    version: int | None = None
    kv_capacity_tokens: int = 0
    decode_batch_max: int = 1
    decode_cost: DecodeCost | None = None
    kv_utilization: float = 0.0
    kv_utilization_at_check: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    num_waiting_without_kv: int = 0
    """Trajectories here that wait for a tool and whose KV is gone."""
    in_tail: bool = False
    evaluating: bool = False
    trajectories: dict[TrajectoryId, None] = {}
    inbound: dict[TrajectoryId, None] = {}
    """Trajectories on their way here by repack; they pin the version."""
    loading: CommandId | None = None
    releasing: CommandId | None = None

    @property
    def phase(self) -> Phase:
        if not self.started:
            return Phase.STARTING
        if self.loading is not None:
            return Phase.LOADING
        if self.releasing is not None:
            return Phase.REPACKED
        if self.evaluating:
            return Phase.EVALUATING
        if not self.trajectories and not self.inbound:
            return Phase.IDLE
        return Phase.TAIL if self.in_tail else Phase.GENERATING

    @property
    def empty(self) -> bool:
        """Whether its batch has ended and nothing is on its way: it may load or take a new batch."""
        return (
            self.started
            and self.loading is None
            and self.releasing is None
            and not self.trajectories
            and not self.inbound
        )
