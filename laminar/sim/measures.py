"""Measures the simulated cluster from inside: what no event tells, or only coarsely."""

import msgspec

from laminar.control.messages import TrajectoryId
from laminar.sim.engine import Sequence, Usage


class StepEnd(msgspec.Struct, frozen=True):
    """The end of a step's last update. usage: of all replicas ever, summed up to here."""

    at_s: float
    num_tokens: int
    """Prompt and response tokens trained in the step."""
    usage: Usage
    training_s: float
    """Seconds that the trainer computed so far."""


class Latency(msgspec.Struct, frozen=True):
    """A trajectory's time from its dispatch to its end."""

    finished_at_s: float
    seconds: float


class Wait(msgspec.Struct, frozen=True):
    """A replica's wait for weights, from when it could have used them to when it had them."""

    at_s: float
    seconds: float


class Measures:
    def __init__(self) -> None:
        self.begin = StepEnd(0.0, 0, Usage(), 0.0)
        """Before everything."""
        self.steps: list[StepEnd] = []
        self.latencies: list[Latency] = []
        self.waits: list[Wait] = []
        self.decoded: list[tuple[float, int]] = []
        """(seconds, tokens decoded until then), at every look at the replicas."""
        self._dispatched_at_s: dict[TrajectoryId, float] = {}

    def dispatched(self, trajectory: TrajectoryId, now: float) -> None:
        self._dispatched_at_s.setdefault(trajectory, now)

    def finished(self, sequence: Sequence) -> None:
        since_s = self._dispatched_at_s.pop(sequence.trajectory, None)
        if since_s is not None:
            self.latencies.append(Latency(sequence.finished_at_s, sequence.finished_at_s - since_s))


def total(usages: list[Usage]) -> Usage:
    return Usage(
        busy_s=sum(u.busy_s for u in usages),
        kv_token_s=sum(u.kv_token_s for u in usages),
        running_s=sum(u.running_s for u in usages),
        num_tokens=sum(u.num_tokens for u in usages),
        prefill_tokens=sum(u.prefill_tokens for u in usages),
        prefill_s=sum(u.prefill_s for u in usages),
        num_preemptions=sum(u.num_preemptions for u in usages),
    )
