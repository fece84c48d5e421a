"""Shows a run while it runs: a live table on a terminal, a line a step anywhere else."""

import sys
from typing import Protocol, TextIO

import msgspec

from laminar.config import Config
from laminar.control.state import ClusterState
from laminar.observe.history import History, StepRecord


class Display(Protocol):
    def update(self, now: float, state: ClusterState, /) -> None:
        """Call it after every event, once the history knows the event; it shows what is worth showing."""
        ...

    def close(self) -> None: ...


def open_display(config: Config, history: History, *, num_steps: int | None, output: TextIO | None = None) -> Display:
    """num_steps: how many the run will make, if known. A display never raises: one that fails says so and is quiet."""
    shown_on: TextIO = output if output is not None else sys.stdout
    if shown_on.isatty():
        from laminar.observe.live_display import LiveDisplay  # heavy, so only where there is a terminal

        return LiveDisplay(config, history, num_steps=num_steps, output=shown_on)
    return PlainDisplay(history, num_steps=num_steps, output=shown_on)


class PlainDisplay:
    """One line for each step, evaluation and incident."""

    def __init__(self, history: History, *, num_steps: int | None, output: TextIO) -> None:
        self._history = history
        self._num_steps = num_steps
        self._output: TextIO | None = output
        # What an earlier start has shown is not shown again.
        self._num_shown = (len(history.steps), len(history.evaluations), len(history.incidents))

    def update(self, _now: float, _state: ClusterState, /) -> None:
        history = self._history
        num_known = (len(history.steps), len(history.evaluations), len(history.incidents))
        if num_known == self._num_shown:
            return
        steps, evaluations, incidents = self._num_shown
        self._num_shown = num_known
        for incident in history.incidents[incidents:]:
            count = f"{incident.count} " if incident.count > 1 else ""
            self._print(f"         {count}{incident.kind}: {incident.cause}")
        for record in history.evaluations[evaluations:]:
            self._print(f"         held-out accuracy {record.mean_score:.3f} at step {record.step}")
        for step in history.steps[steps:]:
            self._print(_step_line(step, history, self._num_steps))

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        if self._output is None:
            return
        try:
            self._output.write(f"{line}\n")
            self._output.flush()
        except OSError:  # whoever read our output went away; the run goes on
            self._output = None


class Recent(msgspec.Struct, frozen=True):
    """What the last few steps trained on."""

    reward: float
    staleness_mean: float
    staleness_max: int

    @staticmethod
    def of(steps: list[StepRecord]) -> "Recent":
        counts = [(value, count) for step in steps for value, count in step.staleness.items()]
        num_trajectories = sum(count for _, count in counts)
        return Recent(
            sum(step.score_mean for step in steps) / max(1, len(steps)),
            sum(value * count for value, count in counts) / max(1, num_trajectories),
            max((value for value, _ in counts), default=0),
        )


def _step_line(step: StepRecord, history: History, num_steps: int | None) -> str:
    number = f"step {step.step}" + (f"/{num_steps}" if num_steps else "")
    duration_s = step.ended_at_s - step.started_at_s
    recent = Recent.of([step])
    idle = history.timeline.replicas_idle_ratio(step.started_at_s, step.ended_at_s)
    waited = history.timeline.trainer_idle_ratio(step.started_at_s, step.ended_at_s)
    return (
        f"{number}  {step.ended_at_s - (history.generating_since_s or 0.0):7.1f} s  reward {step.score_mean:.3f}  "
        f"staleness {recent.staleness_mean:.2f} (at most {recent.staleness_max})  "
        f"{step.lengths.num_tokens / max(1e-9, duration_s):,.0f} tokens/s  "
        f"idle: replicas {idle:.0%}, trainer {waited:.0%}"
    )
