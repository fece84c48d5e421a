"""Holds what the control plane knows, and check(), the invariants that hold after every event.

Written by plane.py and its helpers only. Plain data throughout: a snapshot of it opens every event log. Ordered
collections are lists and dicts (a dict whose values are None is an ordered set), since control iterates no set.
"""

from enum import StrEnum
from typing import assert_never

import msgspec

from laminar.control.index import Index, index_of
from laminar.control.messages import CommandId, GroupId, MachineId, ReplicaId, TrajectoryId
from laminar.control.relay_state import Relay, Sender
from laminar.control.replica_state import Phase as Phase  # Part of what others import from here.
from laminar.control.replica_state import Replica
from laminar.control.trajectory_state import Group, Trajectory, TrajectoryState


class TrainerPhase(StrEnum):
    STARTING = "starting"
    WAITING = "waiting"
    """Idle: the next groups are not there yet, those of the next step or (streaming) of its next mini-batch."""
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving"


class Trainer(msgspec.Struct):
    phase: TrainerPhase = TrainerPhase.STARTING
    attempt: int = 0
    """Which of its starts this is; news of another is late."""
    ordered_at_s: float = 0.0
    """When that start was ordered."""
    num_losses: int = 0
    """Since the last step that it finished."""
    step: int = 0
    """Steps done; the step in training is `step + 1`."""
    version: int = -1
    """Newest version handed over."""
    version_ordered: int = -1
    """Newest version number used up: if the hand-over was never heard of, a relay may have it all the same."""
    groups: list[GroupId] = []
    """Prompt groups that the step in training has taken so far, in mini-batch order; none between two steps."""
    has_whole_step: bool = False
    """Whether that step takes no more groups."""
    index: int = 0
    """The mini-batch in training, or the one to come."""
    published_at_s: float = 0.0
    """When the newest version was ordered; it is on its way from then on."""
    handed_over_at_s: float = 0.0
    is_everywhere: bool = False
    """Whether every relay has the newest version."""
    broadcast_s: float = 0.0
    """How long the last version took from hand-over to the last machine."""
    num_failed_saves: int = 0
    """Since the newest complete checkpoint."""
    saving_step: int = 0
    """Newest step whose checkpoint was ordered."""
    saved_step: int = 0
    """Newest step that a complete checkpoint covers."""
    sender: Sender = msgspec.field(default_factory=Sender)


class Awaited(StrEnum):
    """What the control plane waits for, as its deadline names it."""

    LOAD = "load"
    RELEASE = "release"
    SCORES = "scores"
    MINI_BATCH = "mini-batch"
    HAND_OVER = "hand-over"
    CHECKPOINT = "checkpoint"
    FETCH = "fetch"


class Pending(msgspec.Struct):
    """A command whose outcome is awaited until `sent_at_s + deadline_s`."""

    awaited: Awaited
    sent_at_s: float
    deadline_s: float
    replica: ReplicaId | None = None
    trajectories: tuple[TrajectoryId, ...] = ()
    version: int | None = None
    machine: MachineId | None = None


class Outcomes(msgspec.Struct):
    """What has come so far of the responses to one held-out prompt."""

    num_scored: int = 0
    num_passed: int = 0


class Evaluation(msgspec.Struct):
    """One held-out measurement, pinned to one version, on one replica at a time."""

    version: int
    step: int
    groups: dict[GroupId, Outcomes] = {}
    """Those not yet ended; empty also while no replica has taken it."""
    num_prompts: dict[int, dict[int, int]] = {}
    """Prompts that have ended: responses scored → responses passed → how many. Enough for pass@k of every k."""
    dispatched: bool = False
    score_sum: float = 0.0
    num_scored: int = 0
    ended: bool = False

    @property
    def mean_score(self) -> float:
        return self.score_sum / self.num_scored if self.num_scored else 0.0


class Ledger(msgspec.Struct):
    """Final counts; with the live states they add up to what was dispatched, at every instant."""

    dispatched: int = 0
    trained: int = 0
    evaluated: int = 0
    dropped: dict[str, int] = {}


class Counters(msgspec.Struct):
    num_refreshes: int = 0
    num_interrupts: int = 0
    num_loads: int = 0
    num_loads_failed: int = 0
    num_repack_plans: int = 0
    num_repack_moves: int = 0
    num_trajectories_moved: int = 0
    num_trajectories_rescued: int = 0
    num_trajectories_restarted: int = 0
    num_trajectories_retried: int = 0
    num_groups_mixed: int = 0
    num_groups_trained: int = 0
    num_steps_short: int = 0
    num_replicas_lost: int = 0
    num_relays_lost: int = 0
    num_trainers_lost: int = 0
    num_relays_passed_by: int = 0
    num_versions_fetched: int = 0
    num_replacements: int = 0
    num_checkpoints_failed: int = 0
    num_evaluations_skipped: int = 0
    num_late_messages: int = 0
    num_controller_stalls: int = 0


class ClusterState(msgspec.Struct):
    replicas: dict[ReplicaId, Replica] = {}
    relays: dict[MachineId, Relay] = {}
    trainer: Trainer = msgspec.field(default_factory=Trainer)
    trajectories: dict[TrajectoryId, Trajectory] = {}
    groups: dict[GroupId, Group] = {}
    homeless: dict[TrajectoryId, None] = {}
    """Trajectories that wait for a replica: rescued, restarted or retried ones, oldest first."""
    buffer: list[GroupId] = []
    trained: list[GroupId] = []
    """Prompt groups trained since the newest complete checkpoint."""
    evaluations: list[Evaluation] = []
    pending: dict[CommandId, Pending] = {}
    num_scores_awaited: int = 0
    """Trajectories that the pending commands for scores name."""
    chain: list[MachineId] = []
    """The relays' order: the first is the master, each forwards to the next."""
    retained: tuple[int, ...] = ()
    fetch_again_at_s: float = 0.0
    """After a fetch that failed, none is ordered before this."""
    num_groups_outstanding: int = 0
    """Training groups dispatched and not yet trained."""
    epoch: int = 0
    position: int = 0
    """Prompts of this epoch already dispatched."""
    num_groups_refilled: int = 0
    """Groups dropped by the filter since the last step, and replaced."""
    next_replica: int = 0
    next_group: int = 0
    next_trajectory: int = 0
    next_command: int = 0
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    evaluation_ledger: Ledger = msgspec.field(default_factory=Ledger)
    counters: Counters = msgspec.field(default_factory=Counters)
    staleness_at_finish: dict[int, int] = {}
    staleness_at_train: dict[int, int] = {}
    trained_by_version: dict[int, int] = {}
    started_at_s: float = 0.0
    """When this start of the run began."""
    ticked_at_s: float | None = None
    checked_at_s: float = 0.0
    stopping: str | None = None
    """Why the run is to end before its work is done."""
    ended: bool = False
    index: Index = msgspec.field(default_factory=Index)
    """Follows from the replicas."""

    def __post_init__(self) -> None:
        self.index = index_of(self.replicas.values())

    def new_command(self) -> CommandId:
        self.next_command += 1
        return CommandId(self.next_command)

    def expect(
        self,
        awaited: Awaited,
        now: float,
        deadline_s: float,
        *,
        replica: ReplicaId | None = None,
        trajectories: tuple[TrajectoryId, ...] = (),
        version: int | None = None,
        machine: MachineId | None = None,
    ) -> CommandId:
        """A new command whose outcome must come within `deadline_s`."""
        id = self.new_command()
        self.pending[id] = Pending(awaited, now, deadline_s, replica, trajectories, version, machine)
        return id

    def versions_complete(self, machine: MachineId) -> list[int]:
        """What the machine's relay can serve, ascending.

        A version may be complete before its hand-over is known here (two replies, on two ways); until then it is not
        offered.
        """
        relay = self.relays.get(machine)
        return [v for v in relay.complete if v <= self.trainer.version] if relay is not None else []

    def empty_replicas(self) -> list[Replica]:
        """Those whose batch has ended and to which nothing is on its way, by id."""
        return [self.replicas[id] for id in sorted(self.index.empty)]

    def newest_complete(self, machine: MachineId) -> int | None:
        """The newest version that the machine's relay can serve."""
        relay = self.relays.get(machine)
        for version in reversed(relay.complete if relay is not None else ()):
            if version <= self.trainer.version:
                return version
        return None

    def counts(self, *, evaluation: bool) -> dict[str, int]:
        """Live trajectories by state."""
        live = dict.fromkeys((str(s) for s in TrajectoryState), 0)
        for trajectory in self.trajectories.values():
            if trajectory.evaluation == evaluation:
                live[trajectory.state] += 1
        return live

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken; tests call it after every event."""
        self._check_conservation()
        self._check_homes()
        self._check_versions()
        self._check_groups()
        self._check_chain()
        awaited = sum(len(p.trajectories) for p in self.pending.values() if p.awaited is Awaited.SCORES)
        assert awaited == self.num_scores_awaited, "the scores awaited were miscounted"
        assert self.index == index_of(self.replicas.values()), f"{self.index} is not of the replicas that there are"

    def _check_conservation(self) -> None:
        for ledger, evaluation in ((self.ledger, False), (self.evaluation_ledger, True)):
            live = sum(self.counts(evaluation=evaluation).values())
            ended = ledger.trained + ledger.evaluated + sum(ledger.dropped.values())
            assert ledger.dispatched == live + ended, f"law 2: {ledger} does not add up with {live} live trajectories"

    def _check_homes(self) -> None:
        held = [t for r in self.replicas.values() for t in r.trajectories]
        assert len(held) == len(set(held)), "a trajectory is on two replicas"
        for trajectory in self.trajectories.values():
            home = self.replicas.get(trajectory.replica) if trajectory.replica is not None else None
            on_home = home is not None and trajectory.id in home.trajectories
            match trajectory.state:
                case TrajectoryState.QUEUED | TrajectoryState.DECODING | TrajectoryState.WAITING_FOR_TOOL:
                    assert on_home or trajectory.id in self.homeless, f"{trajectory} is lost"
                case TrajectoryState.MOVING:
                    assert on_home or trajectory.id in self.homeless, f"{trajectory} is lost"
                case (
                    TrajectoryState.FINISHED
                    | TrajectoryState.SCORED
                    | TrajectoryState.BUFFERED
                    | TrajectoryState.IN_TRAINING
                    | TrajectoryState.TRAINED
                ):
                    assert trajectory.replica is None, f"{trajectory} has finished and still holds a place"
                    assert trajectory.id not in self.homeless, f"{trajectory} has finished and waits for a replica"
                case _:
                    assert_never(trajectory.state)

    def _check_versions(self) -> None:
        for replica in self.replicas.values():
            if replica.version is not None:
                assert replica.version <= self.trainer.version, f"{replica} is ahead of the trainer"
            for id in (*replica.trajectories, *replica.inbound):
                trajectory = self.trajectories[id]
                assert trajectory.newest_version == replica.version, f"law 1: {trajectory} on {replica}"
                assert trajectory.evaluation == replica.evaluating, f"{trajectory} mixes with {replica}"

    def _check_groups(self) -> None:
        placed = [*self.buffer, *self.trainer.groups, *self.trained]
        assert len(placed) == len(set(placed)), "a group is in two places"
        for group in self.groups.values():
            for member in (self.trajectories[id] for id in group.trajectories):
                assert member.group == group.id, f"{group} names a trajectory that is not its own"
                assert member.version is None or member.version >= group.version, f"{member} is older than its group"
        outstanding = sum(not g.evaluation and g.trained_step is None for g in self.groups.values())
        assert outstanding == self.num_groups_outstanding, "the groups outstanding were miscounted"
        members = sum(len(g.trajectories) for g in self.groups.values())
        assert members == len(self.trajectories), "a trajectory has no group"

    def _check_chain(self) -> None:
        started = sorted(machine for machine, relay in self.relays.items() if relay.started)
        assert sorted(self.chain) == started, f"the chain {self.chain} is not of the relays that are up, {started}"
