"""Writes metrics to metrics.jsonl and elsewhere, and computes those that the control plane's state tells."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from laminar.control.staleness import publish_lags
from laminar.control.state import ClusterState, TrainerPhase
from laminar.control.trajectory_state import UNFINISHED, TrajectoryState
from laminar.observe.history import EvaluationRecord, History, StepRecord
from laminar.observe.metric_names import is_listed
from laminar.observe.tensorboard import ScalarFile
from laminar.observe.weights_and_biases import WandbRun

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsRow(msgspec.Struct, frozen=True):
    """One line of metrics.jsonl. A value that was not a finite number is null."""

    step: int
    now: float
    values: dict[str, float | None]


class MetricsWriter:
    """Appends to the run's metrics; a line is whole on disk when write() returns."""

    def __init__(self, run_dir: Path, *, tensorboard: bool, wandb: WandbRun | None = None) -> None:
        self._run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / METRICS_FILE).open("ab", buffering=0)
        self._others: list[ScalarFile | WandbRun] = [ScalarFile(run_dir / TENSORBOARD_FOLDER)] if tensorboard else []
        self._others += [wandb] if wandb is not None else []

    def write(self, step: int, now: float, values: Mapping[str, float]) -> None:
        """Raises ValueError for a name that is not in the list, so that the list stays complete."""
        unknown = sorted(name for name in values if not is_listed(name))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no such metric; add it to laminar/observe/metric_names.py")
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(msgspec.json.encode(MetricsRow(step, now, finite)) + b"\n")
        for other in self._others:
            other.write(step, {name: value for name, value in finite.items() if value is not None})

    def undo(self, step: int) -> None:
        """Take back the lines of later steps than this one: the trainer went back to it, and they come again."""
        kept = [row for row in read_metrics(self._run_dir) if row.step <= step]
        self._file.close()
        path = self._run_dir / METRICS_FILE
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in kept))
        unfinished.rename(path)
        self._file = path.open("ab", buffering=0)
        for other in self._others:
            other.undo(step)

    def close(self) -> None:
        self._file.close()
        for other in self._others:
            other.close()


def read_metrics(run_dir: Path) -> list[MetricsRow]:
    """Every whole line; none when the run wrote none. A half-written last line is left out."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rows: list[MetricsRow] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(msgspec.json.decode(line, type=MetricsRow))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: not a line of metrics ({error})") from error
    return rows


def merge_mini_batches(mini_batches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A step's metrics from its mini-batches': largest of `max`, smallest of `min`, sum of `num_`, mean of the rest.

    A metric that only some mini-batches have is merged over those.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for values in mini_batches for name in values):
        values = [values[name] for values in mini_batches if name in values]
        end = name.rpartition("/")[2]
        if end == "max" or end.endswith("_max"):
            merged[name] = max(values)
        elif end == "min" or end.endswith("_min"):
            merged[name] = min(values)
        elif end.startswith("num_"):
            merged[name] = sum(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged


def control_metrics(step: StepRecord, history: History, state: ClusterState) -> dict[str, float]:
    """What control knows at a step's end: call it when `history.steps` has grown by `step`, before the next event."""
    return {
        **_progress(step, state),
        **_histogram_metrics("training/off_policy/trajectory_staleness", step.staleness),
        **_histogram_metrics("training/off_policy/trajectory_staleness_at_finish", step.staleness_at_finish),
        **_replica_metrics(step, history, state),
        **_pool_metrics(state),
        **_relay_metrics(state),
        **_time_metrics(step, history),
    }


def evaluation_metrics(record: EvaluationRecord, num_responses_per_prompt: int) -> dict[str, float]:
    """What a held-out measurement found; it is written under the step of its version, not of the time it ended."""
    return {
        f"val-core/heldout/reward/mean@{num_responses_per_prompt}": record.mean_score,
        "val-core/heldout/num_prompts": record.num_prompts,
        **{f"val-core/heldout/pass@{k}": share for k, share in record.pass_at.items()},
    }


def _progress(step: StepRecord, state: ClusterState) -> dict[str, float]:
    return {
        "training/global_step": step.step,
        "training/epoch": state.epoch,
        "training/version": state.trainer.version,
    }


def _histogram_metrics(name: str, histogram: dict[int, int]) -> dict[str, float]:
    if not histogram:
        return {}
    mean = sum(value * count for value, count in histogram.items()) / sum(histogram.values())
    return {f"{name}/mean": mean, f"{name}/max": max(histogram), f"{name}/min": min(histogram)}


def _replica_metrics(step: StepRecord, history: History, state: ClusterState) -> dict[str, float]:
    up = [replica for replica in state.replicas.values() if replica.started]
    lags = publish_lags(state)
    values: dict[str, float] = {
        "rollout/num_replicas": len(up),
        "rollout/num_running": sum(r.num_running for r in up),
        "rollout/num_waiting": sum(r.num_waiting for r in up),
        "rollout/num_waiting_for_tool": state.counts(evaluation=False)[TrajectoryState.WAITING_FOR_TOOL],
        "rollout/num_preemptions": step.num_preemptions,
        "rollout/num_refreshes": step.num_refreshes,
        "rollout/num_repack_moves": step.num_repack_moves,
        "rollout/idle_ratio": history.timeline.replicas_idle_ratio(step.started_at_s, step.ended_at_s),
        "rollout/tokens_per_s": history.tokens_per_s(step.started_at_s, step.ended_at_s),
    }
    if up:
        values["rollout/kv_utilization"] = sum(r.kv_utilization for r in up) / len(up)
    if lags:
        values["publish_lag/mean"], values["publish_lag/max"] = sum(lags) / len(lags), max(lags)
    return values


def _pool_metrics(state: ClusterState) -> dict[str, float]:
    counts = state.counts(evaluation=False)
    return {
        "pool/in_flight": sum(counts[s] for s in UNFINISHED),
        "pool/buffered": counts[TrajectoryState.BUFFERED],
        "pool/recovered": state.counters.num_trajectories_rescued,
        "pool/restarted": state.counters.num_trajectories_restarted,
        "pool/dropped": sum(state.ledger.dropped.values()),
    }


def _relay_metrics(state: ClusterState) -> dict[str, float]:
    values: dict[str, float] = {
        "relay/broadcast_s": state.trainer.broadcast_s,
        "relay/num_lost": state.counters.num_relays_lost,
    }
    newest = [relay.complete[-1] for relay in state.relays.values() if relay.complete]
    if newest:
        values["relay/version"] = min(newest)
    return values


def _time_metrics(step: StepRecord, history: History) -> dict[str, float]:
    begin, end, timeline = step.started_at_s, step.ended_at_s, history.timeline
    duration_s = end - begin
    return {
        "perf/throughput": step.lengths.num_tokens / duration_s if duration_s else math.nan,
        "perf/total_num_tokens": step.lengths.num_tokens,
        "perf/time_per_step": duration_s,
        "timing_s/step": duration_s,
        "timing_s/wait_for_batch": timeline.trainer_s(TrainerPhase.WAITING, begin, end),
        "timing_s/update_actor": timeline.trainer_s(TrainerPhase.TRAINING, begin, end),
        "timing_s/publish_stall": timeline.trainer_s(TrainerPhase.PUBLISHING, begin, end),
        "timing_s/save_checkpoint": timeline.trainer_s(TrainerPhase.SAVING, begin, end),
        "fully_async/trainer/idle_ratio": timeline.trainer_idle_ratio(begin, end),
    }
