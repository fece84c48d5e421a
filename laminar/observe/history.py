"""Gathers what a run did, event by event: steps, evaluations, lengths, incidents, and the timeline.

Fed live and by replay alike, so a summary or a report is the same from either.
"""

from collections.abc import Sequence

import msgspec

from laminar.control.messages import (
    AnyCommand,
    AnyEvent,
    CommandFailed,
    EndRun,
    Forget,
    Generate,
    LoadFailed,
    Released,
    ReplicaReport,
    Scored,
    StartRelay,
    StartTrainer,
    StopReplica,
    StopRequested,
    TrajectoryId,
)
from laminar.control.state import ClusterState, Counters
from laminar.control.trajectory_state import UNFINISHED
from laminar.observe.pass_at_k import num_prompts_scored, pass_at_k
from laminar.observe.timeline import Timeline


class Lengths(msgspec.Struct, frozen=True):
    """Response tokens of the trajectories of one step: their sum, and how they spread."""

    num_trajectories: int
    num_tokens: int
    min: int
    p10: int
    p50: int
    p90: int
    p99: int
    max: int


class StepRecord(msgspec.Struct, frozen=True):
    """One step of the trainer, recorded as its last mini-batch ended."""

    step: int
    started_at_s: float
    ended_at_s: float
    num_groups: int
    score_mean: float
    staleness: dict[int, int]
    """Trainer's version minus the trajectory's, over the trajectories trained."""
    staleness_at_finish: dict[int, int]
    """The same over those that finished since the step before."""
    lengths: Lengths
    num_truncated: int
    num_refreshes: int
    """In this step, as are the counts below."""
    num_repack_moves: int
    num_preemptions: int


class EvaluationRecord(msgspec.Struct, frozen=True):
    """One held-out measurement. handed_over_at_s: when its version came to be."""

    step: int
    version: int
    handed_over_at_s: float
    ended_at_s: float
    mean_score: float
    """avg@k, over all responses."""
    num_scored: int
    num_prompts: int
    """Held-out prompts with a scored response at least."""
    pass_at: dict[int, float]
    """pass@k by k: 1, 2, 4, … and the responses a prompt."""


class Incident(msgspec.Struct):
    """Something out of the ordinary; the same again within one step only raises `count`."""

    at_s: float
    step: int
    kind: str
    cause: str
    count: int


class History:
    """Fed after every event with the commands that it led to and the state that it left. Keeps no state."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.incidents: list[Incident] = []
        self.lengths: dict[int, int] = {}
        """Training trajectories that finished, by their response tokens."""
        self.tokens_by_second: dict[int, int] = {}
        """Response tokens reported, held-out ones included, by the second in which the report came."""
        self.handed_over_at_s: dict[int, float] = {}
        """When each weight version came to be."""
        self.generating_since_s: float | None = None
        """When the first trajectory was dispatched: the start-up is over."""
        self.ended: EndRun | None = None
        self._num_tokens: dict[TrajectoryId, int] = {}
        self._counters = Counters()
        self._dropped: dict[str, int] = {}
        self._step = 0
        self._staleness_at_finish: dict[int, int] = {}
        self._counters_at_step = Counters()
        self._preemptions_at_step = 0

    def resume(self, now: float, state: ClusterState) -> None:
        """A new start goes on from the state that control recovered; steps that it rolled back did not happen."""
        self.timeline.resume(now)
        num_steps_undone = self._undo_steps(state.trainer.step)
        cause = "steps since the newest checkpoint are done again" if num_steps_undone else "nothing is done again"
        self.incidents.append(Incident(now, state.trainer.step, "resumed", cause, max(1, num_steps_undone)))
        known = {evaluation.version for evaluation in state.evaluations}
        self.evaluations = [record for record in self.evaluations if record.version in known]
        self.ended = None
        self._num_tokens = {t.id: t.num_tokens for t in state.trajectories.values() if t.state in UNFINISHED}
        self._counters = msgspec.structs.replace(state.counters)
        self._dropped = dict(state.ledger.dropped)
        self._step = state.trainer.step
        self._staleness_at_finish = dict(state.staleness_at_finish)
        self._counters_at_step = msgspec.structs.replace(state.counters)

    def observe(self, now: float, event: AnyEvent, commands: Sequence[AnyCommand], state: ClusterState) -> None:
        self.timeline.observe(now, state)
        if isinstance(event, ReplicaReport | Released):
            self._count_tokens(now, event, state)
        self._note_commands(now, commands, state)
        self._note_event(now, event, state)
        if state.counters != self._counters:
            self._note_counters(now, state)
        if state.ledger.dropped != self._dropped:
            self._note_dropped(now, state)
        if state.trainer.version not in self.handed_over_at_s and state.trainer.version >= 0:
            self.handed_over_at_s[state.trainer.version] = now
        if state.trainer.step > self._step:
            self.steps.append(self._step_record(now, state))
            self._begin_step(state)
        elif state.trainer.step < self._step:
            num_undone = self._undo_steps(state.trainer.step)
            self._note(
                now, state, "steps undone", "trained after the newest checkpoint; they are done again", num_undone
            )
            self._begin_step(state)
        if len(state.evaluations) > len(self.evaluations):
            self._note_evaluations(now, state)

    def tokens_per_s(self, from_s: float, to_s: float) -> float:
        """Response tokens decoded a second; a second that is only partly asked for counts with that part."""
        if to_s <= from_s:
            return 0.0
        num_tokens = 0.0
        for second in range(int(from_s), int(to_s) + 1):
            part = min(to_s, second + 1) - max(from_s, second)
            num_tokens += self.tokens_by_second.get(second, 0) * part
        return num_tokens / (to_s - from_s)

    def _undo_steps(self, step: int) -> int:
        """The trainer is back at `step`: what came after did not happen. Returns how many steps that were."""
        num_steps = len(self.steps)
        self.steps = [record for record in self.steps if record.step <= step]
        self.evaluations = [record for record in self.evaluations if record.step <= step]
        return num_steps - len(self.steps)

    def _count_tokens(self, now: float, event: ReplicaReport | Released, state: ClusterState) -> None:
        finished = event.finished if isinstance(event, ReplicaReport) else ()
        num_new = 0
        for outcome in (*event.progress, *finished):
            before = self._num_tokens.get(outcome.trajectory)
            if before is None:
                continue
            # A retried trajectory starts again from nothing, and a late report may be behind a newer one.
            num_new += max(0, outcome.num_tokens - before)
            trajectory = state.trajectories.get(outcome.trajectory)
            if trajectory is not None and trajectory.state in UNFINISHED:
                self._num_tokens[outcome.trajectory] = trajectory.num_tokens
        for outcome in finished:
            trajectory = state.trajectories.get(outcome.trajectory)
            if trajectory is None or trajectory.state in UNFINISHED:
                continue  # late: of a former attempt
            if self._num_tokens.pop(outcome.trajectory, None) is not None and not trajectory.evaluation:
                self.lengths[outcome.num_tokens] = self.lengths.get(outcome.num_tokens, 0) + 1
        if num_new:
            self.tokens_by_second[int(now)] = self.tokens_by_second.get(int(now), 0) + num_new

    def _note_commands(self, now: float, commands: Sequence[AnyCommand], state: ClusterState) -> None:
        for command in commands:
            match command:
                case Generate():
                    self._num_tokens.update((a.trajectory, 0) for a in command.trajectories)
                    if self.generating_since_s is None:
                        self.generating_since_s = now
                case Forget():
                    for id in command.trajectories:
                        self._num_tokens.pop(id, None)
                case StopReplica():
                    self._note(now, state, "replica lost", f"replica {command.replica} {command.cause}")
                case StartRelay():
                    self._note(now, state, "relay lost", f"relay of machine {command.machine} {command.cause}")
                case StartTrainer():
                    self._note(now, state, "trainer lost", command.cause)
                case EndRun():
                    self.ended = command
                    if command.failed:
                        self._note(now, state, "run failed", command.cause)
                case _:
                    pass

    def _note_event(self, now: float, event: AnyEvent, state: ClusterState) -> None:
        match event:
            case CommandFailed():
                self._note(now, state, "command failed", event.cause)
            case LoadFailed():
                self._note(
                    now, state, "load failed", f"version {event.version} on replica {event.replica}: {event.cause}"
                )
            case ReplicaReport() | Scored():
                for failure in event.failed:
                    self._note(now, state, "trajectory failed", failure.cause)
            case StopRequested():
                self._note(now, state, "stop requested", event.cause)
            case _:
                pass

    def _note_counters(self, now: float, state: ClusterState) -> None:
        for field, (kind, cause) in _INCIDENTS.items():
            more = _count(state.counters, field) - _count(self._counters, field)
            if more > 0:
                self._note(now, state, kind, cause, more)
        self._counters = msgspec.structs.replace(state.counters)

    def _note_dropped(self, now: float, state: ClusterState) -> None:
        for cause, count in state.ledger.dropped.items():
            more = count - self._dropped.get(cause, 0)
            if more > 0:
                self._note(now, state, "trajectories dropped", cause, more)
        self._dropped = dict(state.ledger.dropped)

    def _note(self, now: float, state: ClusterState, kind: str, cause: str, count: int = 1) -> None:
        step = state.trainer.step
        for incident in reversed(self.incidents):
            if incident.step != step:
                break
            if (incident.kind, incident.cause) == (kind, cause):
                incident.count += count
                return
        self.incidents.append(Incident(now, step, kind, cause, count))

    def _step_record(self, now: float, state: ClusterState) -> StepRecord:
        trainer = state.trainer
        trained = [state.groups[id] for id in state.trained if state.groups[id].trained_step == trainer.step]
        members = [state.trajectories[id] for group in trained for id in group.trajectories]
        staleness: dict[int, int] = {}
        for member in members:
            assert member.version is not None, f"{member} was trained without ever having a version"
            behind = trainer.version - member.version
            staleness[behind] = staleness.get(behind, 0) + 1
        started_at_s = self.steps[-1].ended_at_s if self.steps else self.generating_since_s
        return StepRecord(
            step=trainer.step,
            started_at_s=now if started_at_s is None else started_at_s,
            ended_at_s=now,
            num_groups=len(trained),
            score_mean=sum(m.score or 0.0 for m in members) / max(1, len(members)),
            staleness=dict(sorted(staleness.items())),
            staleness_at_finish=_difference(state.staleness_at_finish, self._staleness_at_finish),
            lengths=_lengths([m.num_tokens for m in members]),
            num_truncated=sum(m.truncated for m in members),
            num_refreshes=state.counters.num_refreshes - self._counters_at_step.num_refreshes,
            num_repack_moves=state.counters.num_repack_moves - self._counters_at_step.num_repack_moves,
            num_preemptions=max(0, _num_preemptions(state) - self._preemptions_at_step),
        )

    def _begin_step(self, state: ClusterState) -> None:
        self._step = state.trainer.step
        self._staleness_at_finish = dict(state.staleness_at_finish)
        self._counters_at_step = msgspec.structs.replace(state.counters)
        self._preemptions_at_step = _num_preemptions(state)

    def _note_evaluations(self, now: float, state: ClusterState) -> None:
        """They may end out of order, so each is looked at until it has ended."""
        known = {record.version for record in self.evaluations}
        for evaluation in state.evaluations:
            # One whose responses were all dropped measured nothing.
            if evaluation.ended and evaluation.num_scored and evaluation.version not in known:
                self.evaluations.append(
                    EvaluationRecord(
                        evaluation.step,
                        evaluation.version,
                        self.handed_over_at_s.get(evaluation.version, now),
                        now,
                        evaluation.mean_score,
                        evaluation.num_scored,
                        num_prompts_scored(evaluation.num_prompts),
                        pass_at_k(evaluation.num_prompts),
                    )
                )


_INCIDENTS = {
    "num_trajectories_rescued": ("trajectories rescued", "from a lost replica, with their tokens so far"),
    "num_trajectories_restarted": ("trajectories restarted", "no relay held their weight version any more"),
    "num_trajectories_retried": ("trajectories retried", "after a failure"),
    "num_groups_mixed": ("prompt groups mixed", "a member restarted at a newer version"),
    "num_steps_short": ("short step", "fewer prompt groups than a whole step"),
    "num_checkpoints_failed": ("checkpoint failed", "the one before it stays"),
    "num_controller_stalls": ("controller stalled", "all deadlines started again"),
}


def _lengths(num_tokens: list[int]) -> Lengths:
    ascending = sorted(num_tokens) or [0]
    p10, p50, p90, p99 = (ascending[int(share * (len(ascending) - 1))] for share in (0.1, 0.5, 0.9, 0.99))
    return Lengths(len(num_tokens), sum(ascending), ascending[0], p10, p50, p90, p99, ascending[-1])


def _count(counters: Counters, field: str) -> int:
    return msgspec.structs.asdict(counters)[field]


def _difference(now: dict[int, int], before: dict[int, int]) -> dict[int, int]:
    more = {key: count - before.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in sorted(more.items()) if count > 0}


def _num_preemptions(state: ClusterState) -> int:
    return sum(replica.num_preemptions for replica in state.replicas.values())
