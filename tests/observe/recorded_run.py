"""Makes run folders for the tests: a fake world under the true control plane, recorded as a live run records itself."""

import random
from pathlib import Path

from laminar.config import Config
from laminar.control.plane import ControlPlane
from laminar.control.state import ClusterState
from laminar.observe.event_log import EventLogWriter
from laminar.observe.history import History
from laminar.observe.metrics import MetricsWriter, control_metrics, evaluation_metrics
from laminar.observe.summary import summarize, write_summary
from tests.control.fake_world import FakeWorld, make_config, make_plane

NUM_PROMPTS = 4000


def small_config(*, num_steps: int = 6, snapshot_interval_events: int = 200) -> Config:
    config = make_config(num_steps=num_steps)
    observe = config.observe.model_copy(update={"snapshot_interval_events": snapshot_interval_events})
    return config.model_copy(update={"observe": observe})


class RecordedRun:
    """A run that goes on until it ends, or until some event or step: then as if killed, with nothing closed."""

    def __init__(self, run_dir: Path, config: Config, *, seed: int = 0, resumed: ClusterState | None = None) -> None:
        self.run_dir = run_dir
        self.world = FakeWorld(config, seed, num_prompts=NUM_PROMPTS, step=resumed.trainer.step if resumed else 0)
        self.plane: ControlPlane = make_plane(config, num_prompts=NUM_PROMPTS, state=resumed)
        self.history = History()
        self._config = config
        self._resumed = resumed is not None
        if resumed is not None:
            self.history.resume(0.0, resumed)
        self._random = random.Random(seed)
        self.world.score = self._score

    def go(self, *, stop_after: int | None = None, until_step: int | None = None) -> None:
        log = EventLogWriter(
            self.run_dir,
            config=self._config,
            num_prompts=NUM_PROMPTS,
            num_evaluation_prompts=12,
            state=self.plane.state,
            resumed=self._resumed,
        )
        metrics = MetricsWriter(self.run_dir, tensorboard=False)
        for number, (now, event) in enumerate(self.world.events(), start=1):
            log.append(now, event)
            commands = self.plane.handle(event, now)
            log.handled(commands, self.plane.state)
            for command in commands:
                self.world.execute(command)
            num_steps, num_evaluations = len(self.history.steps), len(self.history.evaluations)
            self.history.observe(now, event, commands, self.plane.state)
            if len(self.history.steps) > num_steps:
                self._write_metrics(metrics, now)
            for record in self.history.evaluations[num_evaluations:]:
                metrics.write(record.step, now, evaluation_metrics(record, 1))
            if number == stop_after or self.plane.state.trainer.step == until_step:
                return
        log.close()
        metrics.close()
        peak = 3 * 2**30
        write_summary(self.run_dir, summarize(self._config, self.history, self.plane.state, [], peak_pss_bytes=peak))

    def _score(self, trajectory: int) -> float:
        """Rewards rise with the version that a trajectory comes from, as if it learned."""
        version = self.plane.state.trajectories[trajectory].version or 0  # pyright: ignore[reportArgumentType]
        return float(self._random.random() < 0.95 - 0.53 * 0.93**version)

    def _write_metrics(self, metrics: MetricsWriter, now: float) -> None:
        step = self.history.steps[-1]
        trainer = {
            "actor/entropy": 0.5 * 0.97**step.step + self._random.uniform(0, 0.03),
            "actor/grad_norm": self._random.lognormvariate(-1, 0.4),
            "actor/pg_clipfrac": self._random.uniform(0, 0.03),
            "rollout_corr/k3_kl": self._random.uniform(0, 0.01),
            "training/off_policy/trajectory_spans/max": 1.0,
        }
        metrics.write(step.step, now, trainer | control_metrics(step, self.history, self.plane.state))
