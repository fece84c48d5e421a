"""Sums a run up as summary.json: what came out, what it cost, and what the system did on the way."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from laminar.config import Config
from laminar.control.state import ClusterState
from laminar.control.trajectory_state import TrajectoryState
from laminar.observe.history import EvaluationRecord, History, StepRecord
from laminar.observe.metrics import MetricsRow

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
REWARD_REACHED = 0.8
NUM_STEPS_OF_MEAN = 5
FILTERED = "equal_rewards"
"""The cause under which control drops groups that the filter asked it to drop: nothing is lost with them."""


class IdleRatio(msgspec.Struct, frozen=True):
    replicas: float
    trainer: float


class ToolUse(msgspec.Struct, frozen=True):
    """Of the trajectories trained in the first and in the last step."""

    used_ratio_first: float
    used_ratio_last: float
    """Share of them in which a tool answered."""
    calls_per_trajectory_first: float
    calls_per_trajectory_last: float
    """Turns that a tool answered."""


class Summary(msgspec.Struct, frozen=True):
    """Seconds count from the first trajectory dispatched, so the start-up is left out. Histograms: value → count."""

    heldout_accuracy_first: float | None
    heldout_accuracy_last: float | None
    train_s: float
    """From the first trajectory dispatched to the end of the last step."""
    num_steps: int
    num_trajectories_trained: int
    num_trajectories_lost: int
    """Dropped for any cause but the filter."""
    num_refreshes: int
    num_repack_moves: int
    staleness_at_finish: dict[int, int]
    trajectory_spans_max: int | None
    """Most weight versions in one trajectory, as the trainer found them: 1."""
    tokens_per_s: float
    """Response tokens trained a second of train_s."""
    idle_ratio: IdleRatio
    replicas_time_ratio: dict[str, float]
    """Share of the replicas' time that each phase of the timeline took."""
    peak_pss_bytes: int | None
    """Largest sum over the run's process tree; none when nobody sampled it."""
    schedule: str
    paced: bool
    paced_profile: str | None
    seed: int
    failed: bool | None
    """Whether the run ended in failure; none: it has not ended, or was killed."""
    cause: str | None
    """Why it ended."""
    time_to_reward_0_8_s: float | None
    """When the mean reward of 5 steps first reached 0.8."""
    evaluations: list[EvaluationRecord]
    staleness_at_train: dict[int, int]
    trained_by_version: dict[int, int]
    dropped: dict[str, int]
    num_trajectories_rescued: int
    num_trajectories_restarted: int
    num_trajectories_retried: int
    num_replicas_lost: int
    num_relays_lost: int
    num_trainers_lost: int
    num_loads: int
    tool_use: ToolUse | None
    """None: no tool answered anybody."""
    report: str


def summarize(
    config: Config,
    history: History,
    state: ClusterState,
    metrics: Sequence[MetricsRow],
    *,
    peak_pss_bytes: int | None,
) -> Summary:
    """From what is known so far; a run need not have ended."""
    counters, paced = state.counters, config.paced
    begin_s = history.generating_since_s or 0.0
    end_s = history.steps[-1].ended_at_s if history.steps else begin_s
    train_s = end_s - begin_s
    num_tokens = sum(step.lengths.num_tokens for step in history.steps)
    evaluations = sorted(history.evaluations, key=lambda record: record.version)
    return Summary(
        heldout_accuracy_first=evaluations[0].mean_score if evaluations else None,
        heldout_accuracy_last=evaluations[-1].mean_score if evaluations else None,
        train_s=train_s,
        num_steps=state.trainer.step,
        num_trajectories_trained=state.ledger.trained + state.counts(evaluation=False)[TrajectoryState.TRAINED],
        num_trajectories_lost=sum(count for cause, count in state.ledger.dropped.items() if cause != FILTERED),
        num_refreshes=counters.num_refreshes,
        num_repack_moves=counters.num_repack_moves,
        staleness_at_finish=dict(sorted(state.staleness_at_finish.items())),
        trajectory_spans_max=_spans_max(metrics),
        tokens_per_s=num_tokens / train_s if train_s else 0.0,
        idle_ratio=IdleRatio(
            history.timeline.replicas_idle_ratio(begin_s, end_s), history.timeline.trainer_idle_ratio(begin_s, end_s)
        ),
        replicas_time_ratio={
            phase.value: ratio for phase, ratio in history.timeline.replicas_time_ratio(begin_s, end_s).items()
        },
        peak_pss_bytes=peak_pss_bytes,
        schedule=config.schedule.kind,
        paced=paced is not None,
        paced_profile=paced.accelerator if paced else None,
        seed=config.seed,
        failed=history.ended.failed if history.ended else None,
        cause=history.ended.cause if history.ended else None,
        time_to_reward_0_8_s=time_to_reward_s(history.steps, begin_s, REWARD_REACHED),
        evaluations=evaluations,
        staleness_at_train=dict(sorted(state.staleness_at_train.items())),
        trained_by_version=dict(sorted(state.trained_by_version.items())),
        dropped=dict(state.ledger.dropped),
        num_trajectories_rescued=counters.num_trajectories_rescued,
        num_trajectories_restarted=counters.num_trajectories_restarted,
        num_trajectories_retried=counters.num_trajectories_retried,
        num_replicas_lost=counters.num_replicas_lost,
        num_relays_lost=counters.num_relays_lost,
        num_trainers_lost=counters.num_trainers_lost,
        num_loads=counters.num_loads,
        tool_use=_tool_use(metrics),
        report=REPORT_FILE,
    )


def time_to_reward_s(steps: Sequence[StepRecord], begin_s: float, reward: float) -> float | None:
    """Seconds from begin_s until the mean reward of NUM_STEPS_OF_MEAN consecutive steps first reached `reward`."""
    for last in range(NUM_STEPS_OF_MEAN, len(steps) + 1):
        window = steps[last - NUM_STEPS_OF_MEAN : last]
        if sum(step.score_mean for step in window) / NUM_STEPS_OF_MEAN >= reward:
            return window[-1].ended_at_s - begin_s
    return None


def summary_text(summary: Summary) -> str:
    """What a run came to, in a few lines for a terminal."""
    idle, shown = summary.idle_ratio, _histogram
    rows = [
        ("schedule", f"{summary.schedule}{f', paced as {summary.paced_profile}' if summary.paced else ''}"),
        ("steps", f"{summary.num_steps} in {summary.train_s:.0f} s, {summary.tokens_per_s:,.0f} tokens/s trained"),
        ("trajectories", f"{summary.num_trajectories_trained} trained, {summary.num_trajectories_lost} lost"),
        (
            "staleness",
            f"at finish {shown(summary.staleness_at_finish)}; at training {shown(summary.staleness_at_train)}",
        ),
        ("versions", f"trained from {len(summary.trained_by_version)}: {shown(summary.trained_by_version, most=8)}"),
        ("replicas", f"{summary.num_refreshes} refreshes, {summary.num_repack_moves} repack moves"),
        ("idle", f"replicas {idle.replicas:.0%}, trainer {idle.trainer:.0%}"),
    ]
    if summary.num_replicas_lost or summary.num_relays_lost or summary.num_trainers_lost:
        lost = f"{summary.num_replicas_lost} replicas, {summary.num_relays_lost} relays"
        times = f", the trainer {summary.num_trainers_lost} times" if summary.num_trainers_lost else ""
        rows.append(("lost", f"{lost}{times}; {summary.num_trajectories_rescued} trajectories rescued"))
    if summary.heldout_accuracy_first is not None and summary.heldout_accuracy_last is not None:
        last = summary.evaluations[-1]
        passes = ", ".join(f"pass@{k} {share:.3f}" for k, share in last.pass_at.items())
        change = f"{summary.heldout_accuracy_first:.3f} -> {summary.heldout_accuracy_last:.3f}"
        rows.append(("held out", f"{change} on {last.num_prompts} prompts; {passes}"))
    if (tools := summary.tool_use) is not None:
        rows.append(
            (
                "tool",
                f"used by {tools.used_ratio_first:.0%} -> {tools.used_ratio_last:.0%} of trajectories, "
                f"{tools.calls_per_trajectory_first:.1f} -> {tools.calls_per_trajectory_last:.1f} calls each",
            )
        )
    if summary.peak_pss_bytes is not None:
        rows.append(("memory", f"{summary.peak_pss_bytes / 2**30:.1f} GiB at most (PSS of all processes)"))
    return "\n".join(f"{name:>13}  {value}" for name, value in rows)


def _histogram(counts: dict[int, int], most: int = 12) -> str:
    shown = [f"{value}: {count}" for value, count in sorted(counts.items())]
    return ", ".join(shown) if len(shown) <= most else ", ".join([*shown[: most - 1], "…", shown[-1]])


def write_summary(run_dir: Path, summary: Summary) -> Path:
    """Replaces the file at once, so that a reader never meets half of it."""
    path = run_dir / SUMMARY_FILE
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    unfinished.rename(path)
    return path


def read_summary(run_dir: Path) -> Summary | None:
    """None when the run wrote none yet."""
    path = run_dir / SUMMARY_FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no summary that this version of Laminar reads ({error}); move it away") from error


def _tool_use(metrics: Sequence[MetricsRow]) -> ToolUse | None:
    ratios = [v for row in metrics if (v := row.values.get("tool_call_counts/used_ratio")) is not None]
    calls = [v for row in metrics if (v := row.values.get("tool_call_counts/mean")) is not None]
    if not any(ratios):
        return None
    return ToolUse(ratios[0], ratios[-1], calls[0], calls[-1])


def _spans_max(metrics: Sequence[MetricsRow]) -> int | None:
    spans = [row.values.get("training/off_policy/trajectory_spans/max") for row in metrics]
    return max((int(value) for value in spans if value is not None), default=None)
