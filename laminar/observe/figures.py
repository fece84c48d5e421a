"""Draws a run as figures: each is the JSON that plotly.js takes, and one sentence that says what to look for.

Colours are names of the page's style sheet ("--generating"), which the page replaces for light or dark.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from laminar.observe.history import StepRecord
from laminar.observe.run_folder import RunFolder

Trace = dict[str, Any]
NUM_POINTS_MAX = 600
NUM_LENGTH_BINS = 48


class Figure(msgspec.Struct, frozen=True):
    """One figure. width: of a row, "half" or "full"; data and layout: as plotly.js defines them."""

    title: str
    caption: str
    width: str
    height_px: int
    data: list[Trace]
    layout: dict[str, Any]


def learning(run: RunFolder) -> list[Figure]:
    begin_s, steps = run.history.generating_since_s or 0.0, run.history.steps
    evaluations = run.summary.evaluations
    by_time = _learning_traces(
        steps,
        [step.ended_at_s - begin_s for step in steps],
        [record.handed_over_at_s - begin_s for record in evaluations],
        [record.mean_score for record in evaluations],
    )
    by_step = _learning_traces(
        steps,
        [step.step for step in steps],
        [record.step for record in evaluations],
        [record.mean_score for record in evaluations],
    )
    return [
        Figure(
            "Learning against time",
            "Both curves should rise together: a reward that climbs while held-out accuracy does not is memorised.",
            "half",
            340,
            by_time,
            _axes("seconds since the first trajectory was dispatched", "reward"),
        ),
        Figure(
            "Learning against steps",
            "The same by step, so that what a step teaches can be told from how long it takes.",
            "half",
            340,
            by_step,
            _axes("step", "reward"),
        ),
    ]


def staleness(run: RunFolder) -> list[Figure]:
    summary, steps = run.summary, run.history.steps
    by_step = [step.step for step in steps]
    means = [_mean(step.staleness) for step in steps]
    over_steps = [
        _line(by_step, [max(step.staleness, default=0) for step in steps], "largest", "--faint", shape="hv"),
        _line(
            by_step, [min(step.staleness, default=0) for step in steps], "smallest", "--faint", shape="hv", fill=True
        ),
        _line(by_step, means, "mean", "--second"),
    ]
    if lags := _by_step(run, "publish_lag/mean"):
        over_steps.append(_line(list(lags), list(lags.values()), "publish lag, mean", "--third", dash="dot"))
    return [
        Figure(
            "Staleness",
            "How many versions the trainer was ahead of a trajectory: at finish by generation alone, at train with its "
            "time in the buffer; nothing bounds it, so look for a short tail.",
            "half",
            320,
            [
                _bars(summary.staleness_at_finish, "at finish", "--first"),
                _bars(summary.staleness_at_train, "at train", "--second"),
            ],
            {**_axes("versions", "trajectories"), "barmode": "group"},
        ),
        Figure(
            "Staleness over steps",
            "It should level off: a mean that keeps rising says that replicas fall behind the trainer.",
            "half",
            320,
            over_steps,
            _axes("step", "versions", from_zero=True),
        ),
    ]


def lengths(run: RunFolder) -> list[Figure]:
    steps = run.history.steps
    by_step = [step.step for step in steps]
    percentiles = [
        _line(by_step, [step.lengths.max for step in steps], "longest", "--faint"),
        _line(by_step, [step.lengths.p99 for step in steps], "p99", "--third"),
        _line(by_step, [step.lengths.p90 for step in steps], "p90", "--second"),
        _line(by_step, [step.lengths.p50 for step in steps], "median", "--first"),
        _line(by_step, [step.lengths.p10 for step in steps], "p10", "--faint", dash="dot"),
    ]
    return [
        Figure(
            "Response lengths",
            "The long right tail is what a synchronous system waits for; a spike at the very right is responses cut at "
            "the limit.",
            "half",
            320,
            [_length_bars(run.history.lengths)],
            _axes("response tokens", "trajectories", legend=False),
        ),
        Figure(
            "Response lengths over steps",
            "Percentiles of what each step trained on: a median that collapses or a p99 that sticks at the limit is a "
            "policy going wrong.",
            "half",
            320,
            percentiles,
            _axes("step", "response tokens", from_zero=True),
        ),
    ]


def throughput(run: RunFolder) -> list[Figure]:
    history, begin_s = run.history, run.history.generating_since_s or 0.0
    duration_s = max(1.0, history.timeline.end_s - begin_s)
    width_s = max(1.0, duration_s / NUM_POINTS_MAX)
    starts = [begin_s + i * width_s for i in range(int(duration_s / width_s))]
    decoded = [history.tokens_per_s(start, start + width_s) for start in starts]
    trained = [s.lengths.num_tokens / max(1e-9, s.ended_at_s - s.started_at_s) for s in history.steps]
    return [
        Figure(
            "Throughput",
            "Tokens decoded should stay level, without gaps between steps; what is decoded and what is trained should "
            "agree over time.",
            "half",
            320,
            [
                _line([s - begin_s + width_s / 2 for s in starts], _smooth(decoded, 5), "decoded", "--first"),
                _line([s.ended_at_s - begin_s for s in history.steps], _smooth(trained, 5), "trained", "--second"),
            ],
            _axes("seconds since the first trajectory was dispatched", "response tokens / s", from_zero=True),
        ),
        Figure(
            "Trajectories trained, by weight version",
            "Which version each trained trajectory came from: gaps are versions that no replica took, since all "
            "were busy with their batches when they came.",
            "half",
            320,
            [_bars(run.summary.trained_by_version, "trajectories", "--first")],
            _axes("weight version", "trajectories", legend=False),
        ),
    ]


def policy(run: RunFolder) -> list[Figure]:
    """Small figures of the trainer's own metrics; one without values is left out."""
    wanted = (
        ("actor/entropy", "Entropy", "nats", "A fast fall to zero is a policy that no longer explores."),
        ("actor/grad_norm", "Gradient norm", "", "Single spikes are clipped; a rising trend is trouble."),
        ("actor/pg_clipfrac", "Clipped tokens", "share", "Grows with staleness; most tokens should not be clipped."),
        ("rollout_corr/k3_kl", "KL to the sampling policy", "nats", "How far training has moved from what sampled."),
    )
    figures: list[Figure] = []
    for name, title, unit, caption in wanted:
        values = _by_step(run, name)
        if values:
            trace = _line(list(values), list(values.values()), title, "--first")
            figures.append(Figure(title, caption, "quarter", 220, [trace], _axes("step", unit, legend=False)))
    return figures


def _by_step(run: RunFolder, name: str) -> dict[int, float]:
    """A metric's values; of a step that was done again after a rollback, the newest."""
    values = {row.step: value for row in run.metrics if (value := row.values.get(name)) is not None}
    return {step: values[step] for step in sorted(values) if step <= run.state.trainer.step}


def _learning_traces(
    steps: Sequence[StepRecord], at: Sequence[float], evaluated_at: Sequence[float], accuracies: Sequence[float]
) -> list[Trace]:
    rewards = [step.score_mean for step in steps]
    raw = _line(at, rewards, "one step", "--faint")
    held_out = _line(evaluated_at, accuracies, "held-out accuracy", "--second")
    held_out |= {"mode": "lines+markers", "marker": {"size": 8, "color": "--second"}}
    return [raw, _line(at, _smooth(rewards, 5), "mean of 5 steps", "--first"), held_out]


def _line(
    x: Sequence[float],
    y: Sequence[float],
    name: str,
    color: str,
    *,
    dash: str = "solid",
    shape: str = "linear",
    fill: bool = False,
) -> Trace:
    """fill: down from the trace before."""
    line = {"color": color, "dash": dash, "shape": shape, "width": 1.2 if color == "--faint" else 2.2}
    trace: Trace = {"type": "scatter", "mode": "lines", "x": _rounded(x), "y": _rounded(y), "name": name, "line": line}
    return trace | ({"fill": "tonexty", "fillcolor": "--wash"} if fill else {})


def _bars(histogram: dict[int, int], name: str, color: str) -> Trace:
    keys = sorted(histogram)
    return {
        "type": "bar",
        "x": keys,
        "y": [histogram[key] for key in keys],
        "name": name,
        "marker": {"color": color},
        "hovertemplate": "%{x}: %{y}<extra>" + name + "</extra>",
    }


def _length_bars(histogram: dict[int, int]) -> Trace:
    longest = max(histogram, default=1)
    width = max(1, -(-longest // NUM_LENGTH_BINS))
    bins: dict[int, int] = {}
    for length, count in histogram.items():
        bins[length // width] = bins.get(length // width, 0) + count
    keys = sorted(bins)
    return {
        "type": "bar",
        "x": [(key + 0.5) * width for key in keys],
        "y": [bins[key] for key in keys],
        "width": width * 0.92,
        "name": "trajectories",
        "marker": {"color": "--first"},
        "customdata": [[key * width, (key + 1) * width - 1] for key in keys],
        "hovertemplate": "%{customdata[0]} to %{customdata[1]} tokens: %{y}<extra></extra>",
    }


def _axes(x: str, y: str, *, from_zero: bool = False, legend: bool = True) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero" if from_zero else "normal"},
        "showlegend": legend,
    }


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, `window` together (fewer at the start)."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def _rounded(values: Sequence[float]) -> list[float]:
    """Six significant digits, which no screen resolves, halve the page."""
    return [float(f"{value:.6g}") for value in values]


def _mean(histogram: dict[int, int]) -> float:
    return sum(value * count for value, count in histogram.items()) / max(1, sum(histogram.values()))
