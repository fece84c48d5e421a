"""Measures the live loop on one core: events a second, and how soon a mini-batch leaves once its data is there.

The events of a recorded run go, as fast as they can, through everything that the driver does with them: the tokens into
the pools and the journal, the event log, the control plane, the observer, the payload of each command. Only the Ray
calls themselves are left out, and the tokens are stand-ins as many as the run had.
"""

import argparse
import asyncio
import io
import pickle
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from laminar.bench.output import show
from laminar.cluster.payload import Payload
from laminar.config import Config
from laminar.control import messages as m
from laminar.control.plane import ControlPlane
from laminar.control.state import ClusterState
from laminar.data.records import TokenDelta, WorkerReport
from laminar.observe.event_log import EventLogWriter, segments
from laminar.observe.observer import Observer
from laminar.run import JOURNAL_FILE, load_data, loop


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laminar bench loop", description=__doc__)
    parser.add_argument("run_dir", type=Path, nargs="?", default=Path("runs/quickstart"), help="whose events to use")
    parser.add_argument("--json", action="store_true", help="one JSON object a measurement")
    arguments = parser.parse_args(argv)
    result = measure(arguments.run_dir)
    show(result, as_json=arguments.json)
    return 0


def measure(run_dir: Path) -> dict[str, float | int | str]:
    """Events a second, and the latency of mini-batches in ms. Raises ValueError for a folder without a log."""
    first = next(segments(run_dir))
    with tempfile.TemporaryDirectory() as folder:
        config = Config.model_validate(first.header.config).model_copy(update={"run_dir": Path(folder)})
        prompts, heldout = load_data(config)
        payload = Payload(config.run_dir / JOURNAL_FILE, prompts, heldout, config.seed)
        events = [(r.now, r.event) for segment in segments(run_dir) for r in segment.records]
        cluster = RecordedCluster(events, payload)
        control = ControlPlane(
            config,
            num_prompts=first.header.num_prompts,
            num_evaluation_prompts=first.header.num_evaluation_prompts,
            state=ClusterState(),
        )
        log = EventLogWriter(
            config.run_dir,
            config=config,
            num_prompts=first.header.num_prompts,
            num_evaluation_prompts=first.header.num_evaluation_prompts,
            state=control.state,
        )
        observer = Observer(config, num_steps=None, output=io.StringIO())
        began_s = time.perf_counter()
        asyncio.run(loop(cluster, control, log, observer))
        duration_s = time.perf_counter() - began_s
        log.close()
        payload.close()
        observer.stop()
    latencies = sorted(cluster.mini_batch_latencies_s)
    return {
        "run_dir": str(run_dir),
        "num_events": cluster.num_events,
        "events_per_s": round(cluster.num_events / duration_s),
        "num_mini_batches": len(latencies),
        "mini_batch_latency_ms_p50": round(1e3 * statistics.median(latencies), 3),
        "mini_batch_latency_ms_p99": round(1e3 * latencies[int(0.99 * (len(latencies) - 1))], 3),
    }


class RecordedCluster:
    """Gives the events of a run that is over, and does with commands all that a cluster does short of calling."""

    def __init__(self, events: list[tuple[float, m.AnyEvent]], payload: Payload) -> None:
        self.num_events = 0
        self.mini_batch_latencies_s: list[float] = []
        self._events = events
        self._payload = payload
        self._num_tokens: dict[m.TrajectoryId, tuple[int, int]] = {}
        self._version: dict[m.ReplicaId, int] = {}
        self._asked: dict[m.CommandId, m.ScoreTrajectories] = {}
        self._came_s = 0.0

    async def events(self) -> AsyncIterator[tuple[float, m.AnyEvent]]:
        for now, event in self._events:
            self.num_events += 1
            self._came_s = time.perf_counter()
            if isinstance(event, m.ReplicaReport):
                self._payload.store(WorkerReport(event, self._tokens(event)))
            elif isinstance(event, m.Scored):
                self._payload.store_scores(self._asked.pop(event.command), event)
            elif isinstance(event, m.Loaded):
                self._version[event.replica] = event.version
            yield now, event

    def execute(self, command: m.AnyCommand) -> None:
        match command:
            case m.Generate() | m.Resume():
                for assignment in command.trajectories:
                    self._num_tokens[assignment.trajectory] = (assignment.attempt, assignment.num_tokens)
                pickle.dumps(self._payload.tasks(command.trajectories, evaluation=command.evaluation))
            case m.ScoreTrajectories():
                self._asked[command.id] = command
                pickle.dumps(self._payload.scoring_tasks(command.trajectories, evaluation=command.evaluation))
            case m.TrainMiniBatch():
                pickle.dumps(self._payload.experiences(command))
                self.mini_batch_latencies_s.append(time.perf_counter() - self._came_s)
            case m.Forget():
                self._payload.forget(command.trajectories)
            case _:
                pass

    def _tokens(self, report: m.ReplicaReport) -> tuple[TokenDelta, ...]:
        """As many tokens as the report speaks of."""
        deltas: list[TokenDelta] = []
        for outcome in (*report.progress, *report.finished):
            attempt, num_held = self._num_tokens.get(outcome.trajectory, (0, 0))
            num_new = outcome.num_tokens - num_held
            if attempt == outcome.attempt and num_new > 0:
                self._num_tokens[outcome.trajectory] = (attempt, outcome.num_tokens)
                version = self._version[report.replica]
                ids, ones = (7,) * num_new, (1,) * num_new
                logprobs = (-0.5,) * num_new
                deltas.append(TokenDelta(outcome.trajectory, attempt, num_held, ids, logprobs, ones, version))
        return tuple(deltas)
