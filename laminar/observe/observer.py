"""Watches a live run: gathers its history, writes metrics, shows it, and sums it up at the end."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from laminar.config import Config
from laminar.control.messages import AnyCommand, AnyEvent, TrainerStarted
from laminar.control.state import ClusterState
from laminar.observe.display import open_display
from laminar.observe.history import History
from laminar.observe.metrics import MetricsWriter, control_metrics, evaluation_metrics, merge_mini_batches, read_metrics
from laminar.observe.report import write_report
from laminar.observe.resources import MemorySampler
from laminar.observe.run_folder import read_run
from laminar.observe.summary import summarize, summary_text, write_summary
from laminar.observe.weights_and_biases import WandbRun


class Observer:
    """Fed after every event. Decides nothing, and nothing waits for it.

    output: where it shows the run; none: stdout.
    """

    def __init__(self, config: Config, *, num_steps: int | None, output: TextIO | None = None) -> None:
        self._config = config
        self._output = output
        self._num_steps = num_steps
        self._history = History()
        project = config.observe.wandb_project
        wandb = WandbRun(project, config.run_dir, config.model_dump(mode="json")) if project is not None else None
        self._metrics = MetricsWriter(config.run_dir, tensorboard=config.observe.tensorboard, wandb=wandb)
        self._display = open_display(config, self._history, num_steps=num_steps, output=output)
        self._memory = MemorySampler([os.getpid()])
        self._mini_batches: dict[int, list[dict[str, float]]] = {}
        self._reward_extras: dict[str, list[float]] = {}
        self._num_steps_written = 0
        self._num_evaluations_written = 0

    def resume(self, now: float, state: ClusterState) -> None:
        """Go on with the history that the run's folder tells of the earlier starts."""
        self._display.close()
        self._history = read_run(self._config.run_dir).history
        self._history.resume(now, state)
        self._metrics.undo(state.trainer.step)
        self._num_steps_written = len(self._history.steps)
        self._num_evaluations_written = len(self._history.evaluations)
        self._display = open_display(self._config, self._history, num_steps=self._num_steps, output=self._output)

    def mini_batch(self, step: int, metrics: dict[str, float]) -> None:
        """What the trainer measured; it comes before the event that the mini-batch was trained."""
        self._mini_batches.setdefault(step, []).append(metrics)

    def reward_extras(self, extras: Mapping[str, Sequence[Any]]) -> None:
        """What the reward function gave besides the score; its numbers become metrics of the step."""
        for name, values in extras.items():
            numbers = [float(value) for value in values if isinstance(value, int | float)]
            if numbers:
                self._reward_extras.setdefault(name, []).extend(numbers)

    def observe(self, now: float, event: AnyEvent, commands: Sequence[AnyCommand], state: ClusterState) -> None:
        history = self._history
        history.observe(now, event, commands, state)
        if isinstance(event, TrainerStarted):
            self._go_back(state)
        for step in history.steps[self._num_steps_written :]:
            values = merge_mini_batches(self._mini_batches.pop(step.step, []))
            values |= {f"reward/{name}": sum(v) / len(v) for name, v in self._reward_extras.items()}
            self._reward_extras = {}
            self._metrics.write(step.step, now, values | control_metrics(step, history, state))
        self._num_steps_written = len(history.steps)
        for record in history.evaluations[self._num_evaluations_written :]:
            num_responses = self._config.evaluation.num_responses_per_prompt
            self._metrics.write(record.step, now, evaluation_metrics(record, num_responses))
        self._num_evaluations_written = len(history.evaluations)
        self._display.update(now, state)

    def _go_back(self, state: ClusterState) -> None:
        """A trainer that was lost came up again: what was measured since its checkpoint will be measured again."""
        self._mini_batches.clear()
        if len(self._history.steps) < self._num_steps_written:
            self._metrics.undo(state.trainer.step)
            self._num_steps_written = len(self._history.steps)
            self._num_evaluations_written = len(self._history.evaluations)

    def stop(self) -> int:
        """End the display and the files; returns the peak of the summed PSS, in bytes."""
        self._display.close()
        self._metrics.close()
        return self._memory.stop()

    def close(self, state: ClusterState) -> None:
        """Write summary and report. The processes of the run must still be there, or the peak is an old one."""
        run_dir = self._config.run_dir
        peak_pss_bytes = self.stop()
        summary = summarize(self._config, self._history, state, read_metrics(run_dir), peak_pss_bytes=peak_pss_bytes)
        write_summary(run_dir, summary)
        print(summary_text(summary), file=self._output)
        print(f"report: {write_report(run_dir)}", file=self._output)
