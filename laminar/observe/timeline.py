"""Records what every replica and the trainer did when, as intervals on one time axis."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from laminar.control.messages import MachineId, ReplicaId
from laminar.control.state import ClusterState, Phase, TrainerPhase


class Absence(StrEnum):
    """Why nothing is done at a replica's place; beside the phases that control knows."""

    LOST = "lost"
    """From the last that was heard of a lost replica until its replacement begins to start."""
    DOWN = "down"
    """The run itself was down: between its end and the start that resumed it."""


class ReplicaInterval(msgspec.Struct):
    """One phase of one replica at one weight version; the trajectories it held when it began and ended."""

    start_s: float
    end_s: float
    phase: Phase | Absence
    replica: ReplicaId
    version: int | None
    num_trajectories_first: int
    num_trajectories_last: int


class TrainerInterval(msgspec.Struct):
    """One phase of the trainer. step: the step in training; index: its mini-batch (0 outside training)."""

    start_s: float
    end_s: float
    phase: TrainerPhase | Absence
    step: int
    index: int


class Place(msgspec.Struct):
    """Where a replica serves. A replacement takes over the place of the replica that it replaces."""

    machine: MachineId
    replica: ReplicaId
    heard_at_s: float
    intervals: list[ReplicaInterval] = []


class Timeline:
    """Fed after every event; appends only where something changed. Reads the state, keeps none of it."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.trainer: list[TrainerInterval] = []
        self.end_s = 0.0
        self._num_replicas_seen = 0

    def observe(self, now: float, state: ClusterState) -> None:
        self.end_s = now
        for place in self.places:
            replica = state.replicas.get(place.replica)
            if replica is not None:
                place.heard_at_s = replica.heard_at_s
                _extend(place, now, replica.phase, replica.version, len(replica.trajectories))
            elif isinstance(place.intervals[-1].phase, Absence):
                place.intervals[-1].end_s = now
            else:
                _lose(place, now)
        if self._num_replicas_seen != state.next_replica:
            self._num_replicas_seen = state.next_replica
            self._take_places(now, state)
        self._extend_trainer(now, state.trainer.phase, state.trainer.step + 1, state.trainer.index)

    def resume(self, now: float) -> None:
        """A new start of the program goes on with the run: between the last event and now it was down."""
        self._num_replicas_seen = 0
        for place in self.places:
            _extend(place, self.end_s, Absence.DOWN, None, 0)
            place.intervals[-1].end_s = now
        if self.trainer:
            self._extend_trainer(self.end_s, Absence.DOWN, self.trainer[-1].step, 0)
            self.trainer[-1].end_s = now
        self.end_s = now

    def replicas_time_ratio(self, from_s: float, to_s: float) -> dict[Phase, float]:
        """Share of the replicas' time up (not starting, lost or down) that each phase took; none while none was up."""
        spent_s: dict[Phase, float] = {}
        for place in self.places:
            for interval in reversed(place.intervals):
                if interval.end_s <= from_s:
                    break
                if isinstance(interval.phase, Phase) and interval.phase is not Phase.STARTING:
                    overlap_s = max(0.0, min(interval.end_s, to_s) - max(interval.start_s, from_s))
                    spent_s[interval.phase] = spent_s.get(interval.phase, 0.0) + overlap_s
        up_s = sum(spent_s.values())
        return {phase: spent_s.get(phase, 0.0) / up_s for phase in Phase if phase is not Phase.STARTING} if up_s else {}

    def replicas_idle_ratio(self, from_s: float, to_s: float) -> float:
        """Share of the replicas' time up in which they had nothing to do."""
        return self.replicas_time_ratio(from_s, to_s).get(Phase.IDLE, 0.0)

    def trainer_s(self, phase: TrainerPhase, from_s: float, to_s: float) -> float:
        """Seconds that the trainer spent in a phase."""
        total_s = 0.0
        for interval in reversed(self.trainer):
            if interval.end_s <= from_s:
                break
            if interval.phase is phase:
                total_s += max(0.0, min(interval.end_s, to_s) - max(interval.start_s, from_s))
        return total_s

    def trainer_idle_ratio(self, from_s: float, to_s: float) -> float:
        """Share of the trainer's time up in which it waited for prompt groups."""
        up_s = sum(self.trainer_s(p, from_s, to_s) for p in TrainerPhase if p is not TrainerPhase.STARTING)
        return self.trainer_s(TrainerPhase.WAITING, from_s, to_s) / up_s if up_s else 0.0

    def _take_places(self, now: float, state: ClusterState) -> None:
        """Give each new replica the place of a lost one, of its machine if there is one, else a new place."""
        taken = {place.replica for place in self.places}
        for replica in state.replicas.values():
            if replica.id in taken:
                continue
            free = [p for p in self.places if isinstance(p.intervals[-1].phase, Absence)]
            if free:
                place = min(free, key=lambda p: p.machine != replica.machine)
                place.machine, place.replica = replica.machine, replica.id
            else:
                place = Place(replica.machine, replica.id, now)
                self.places.append(place)
            _extend(place, now, replica.phase, replica.version, len(replica.trajectories))

    def _extend_trainer(self, now: float, phase: TrainerPhase | Absence, step: int, index: int) -> None:
        index = index if phase is TrainerPhase.TRAINING else 0
        intervals = self.trainer
        if intervals:
            last = intervals[-1]
            last.end_s = now
            if last.phase is phase and last.step == step and last.index == index:
                return
            if last.start_s == now:
                intervals.pop()
        intervals.append(TrainerInterval(now, now, phase, step, index))


def _lose(place: Place, now: float) -> None:
    """It was already gone when it fell silent, so what control took it for since then is written over."""
    was_up = place.intervals[-1].phase is not Phase.STARTING
    silent_since_s = place.heard_at_s if was_up else now
    while place.intervals[-1].start_s >= silent_since_s and _follows_another_of_its_own(place):
        place.intervals.pop()
    silent_since_s = max(silent_since_s, place.intervals[-1].start_s)
    place.intervals[-1].end_s = silent_since_s
    place.intervals.append(ReplicaInterval(silent_since_s, now, Absence.LOST, place.replica, None, 0, 0))


def _follows_another_of_its_own(place: Place) -> bool:
    return len(place.intervals) > 1 and place.intervals[-2].replica == place.replica


def _extend(place: Place, now: float, phase: Phase | Absence, version: int | None, num_trajectories: int) -> None:
    """Go on with the last interval, or end it and begin another; what lasted no time at all is not kept."""
    intervals = place.intervals
    if intervals:
        last = intervals[-1]
        last.end_s = now
        if last.phase is phase and last.version == version and last.replica == place.replica:
            last.num_trajectories_last = num_trajectories
            return
        if last.start_s == now:
            intervals.pop()
    intervals.append(ReplicaInterval(now, now, phase, place.replica, version, num_trajectories, num_trajectories))


def drawn(intervals: Sequence[ReplicaInterval], shortest_s: float) -> list[ReplicaInterval]:
    """The intervals without what is too short to be seen: that is drawn as part of the one before it."""
    kept: list[ReplicaInterval] = []
    for interval in intervals:
        last = kept[-1] if kept else None
        same = last is not None and (last.phase, last.version, last.replica) == (
            interval.phase,
            interval.version,
            interval.replica,
        )
        if last is not None and (same or interval.end_s - interval.start_s < shortest_s):
            last.end_s = interval.end_s
            last.num_trajectories_last = interval.num_trajectories_last if same else last.num_trajectories_last
        else:
            kept.append(msgspec.structs.replace(interval))
    return kept
