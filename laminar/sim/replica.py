"""Pretends to be a rollout worker: an engine with a weight version, what it owes control, and its health."""

import math

from laminar.control.messages import (
    Assignment,
    CommandId,
    Finished,
    MachineId,
    Progress,
    Released,
    ReplicaId,
    ReplicaReport,
    TrajectoryId,
)
from laminar.sim.engine import Sequence, SimulatedEngine
from laminar.sim.workload import Workload


class SimulatedReplica:
    def __init__(
        self, id: ReplicaId, machine: MachineId, engine: SimulatedEngine, workload: Workload, prompt_tokens: int
    ) -> None:
        self.id = id
        self.machine = machine
        self.engine = engine
        self.version: int | None = None
        self.silent_until_s = 0.0
        """It stands still until then; infinity: it hangs for good."""
        self.emptied_at_s = 0.0
        self.wake = 0
        """Number of its newest wake-up in the clock; older ones are stale."""
        self._told_at_s = 0.0
        self._workload = workload
        self._prompt_tokens = prompt_tokens

    def is_silent(self, now: float) -> bool:
        return now < self.silent_until_s

    def is_due(self, now: float, interval_s: float) -> bool:
        """Whether it has been silent for so long."""
        return now - self._told_at_s >= interval_s

    def take(self, assignments: tuple[Assignment, ...], now: float) -> None:
        self.engine.submit([self._sequence(assignment) for assignment in assignments], now)

    def release(self, command: CommandId, trajectories: tuple[TrajectoryId, ...], now: float) -> Released:
        """Those that ended meanwhile are not in it; the next report has them."""
        released = self.engine.release(trajectories, now)
        return Released(command, self.id, tuple(self._progress(sequence) for sequence in released))

    def report(self, now: float, *, with_progress: bool) -> ReplicaReport:
        """What finished; and, where it matters, how far the others are: that is most of what a report costs."""
        engine = self.engine
        self._told_at_s = now
        progress = tuple(self._progress(sequence) for sequence in engine.sequences()) if with_progress else ()
        finished = tuple(
            Finished(s.trajectory, s.attempt, s.response.num_tokens, s.response.truncated)
            for s in engine.take_finished()
        )
        return ReplicaReport(
            self.id,
            engine.kv_utilization,
            len(engine.running),
            len(engine.waiting),
            engine.usage.num_preemptions,
            progress,
            finished,
        )

    def pause(self, now: float, seconds: float) -> None:
        """Stand still for so long; infinity: for good."""
        self.silent_until_s = now + seconds
        if math.isfinite(seconds):
            self.engine.pause(seconds)

    def _sequence(self, assignment: Assignment) -> Sequence:
        response, num_tokens = self._workload.response(assignment.trajectory), assignment.num_tokens
        num_calls_made = sum(call.at_token <= num_tokens for call in response.calls)
        return Sequence(
            assignment.trajectory, assignment.attempt, self._prompt_tokens, response, num_tokens, num_calls_made
        )

    def _progress(self, sequence: Sequence) -> Progress:
        return Progress(sequence.trajectory, sequence.attempt, self.engine.tokens_of(sequence), sequence.at_tool)
