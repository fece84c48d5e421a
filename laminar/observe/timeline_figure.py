"""Draws the timeline: a row for every replica and one for the trainer on one time axis, so that one sees who waits."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from laminar.config import (
    OneStepStaleSchedule,
    PartialRolloutSchedule,
    StreamingSchedule,
    SynchronousSchedule,
    TrajectoryLevelSchedule,
)
from laminar.control.state import Phase, TrainerPhase
from laminar.observe.figures import Figure, Trace
from laminar.observe.run_folder import RunFolder
from laminar.observe.timeline import Absence, Place, TrainerInterval, drawn

NUM_BARS_MAX = 6000
NUM_STEPS_CLOSE_UP = 8
TRAINER_ROW = "trainer"

# In the legend's order; each has the colour `--<name>` in the page's style sheet.
REPLICA_PHASES = (*(p for p in Phase if p is not Phase.IDLE), Phase.IDLE, Absence.LOST, Absence.DOWN)
TRAINER_PHASES = (TrainerPhase.TRAINING, TrainerPhase.PUBLISHING, TrainerPhase.SAVING, TrainerPhase.WAITING)


class Bar(msgspec.Struct, frozen=True):
    """One interval as it is drawn; label: what stands in it where there is room."""

    row: str
    phase: str
    start_s: float
    end_s: float
    label: str
    hover: str


def timeline(run: RunFolder) -> list[Figure]:
    """The whole run, and some steps of its middle from near, where versions can be read."""
    end_s, begin_s = run.history.timeline.end_s, run.history.generating_since_s or 0.0
    shortest_s = end_s / 4000
    while len(bars := _all_bars(run, shortest_s)) > NUM_BARS_MAX:
        shortest_s *= 2
    rows = [*(_row_name(place) for place in _ordered(run)), TRAINER_ROW]
    row_px = max(14, min(34, 1000 // len(rows)))
    whole = Figure(
        "Who did what when",
        f"{_what_to_see(run)} Drag to zoom, double-click to return; what lasted less than {shortest_s:.2g} s is drawn "
        "as part of its neighbour.",
        "full",
        130 + row_px * len(rows),
        [*_traces(bars, begin_s, labelled=False), *_losses(run, begin_s)],
        _layout(rows, (0 - begin_s, end_s - begin_s)),
    )
    return [whole, *_close_up(run, rows, begin_s)]


def _what_to_see(run: RunFolder) -> str:
    match run.config.schedule:
        case TrajectoryLevelSchedule():
            return (
                "Each replica goes from batch to batch on its own, and so does the trainer from step to step; grey is "
                "time without work. Where grey lines up in all rows, they waited for one another."
            )
        case SynchronousSchedule():
            return (
                "All replicas begin together and wait (grey) for the slowest one's tail, then all wait for the "
                "trainer, which has waited for them."
            )
        case OneStepStaleSchedule():
            return (
                "While the trainer trains one batch all replicas generate the next; they switch together, so the "
                "slowest tail, or the trainer, makes everybody else wait (grey)."
            )
        case StreamingSchedule():
            return (
                "The trainer takes mini-batches as prompt groups complete and waits between them (grey) for the tail "
                "of its batch; the replicas switch together when that has ended."
            )
        case PartialRolloutSchedule():
            return (
                "Replicas always decode; at every publish all of them stop to load and go on with the same "
                "trajectories. They are without work (grey) when the staleness bound admits nothing more."
            )


def _close_up(run: RunFolder, rows: Sequence[str], begin_s: float) -> Iterator[Figure]:
    steps = run.history.steps
    if len(steps) < 2:
        return
    middle = len(steps) // 2
    shown = steps[max(0, middle - NUM_STEPS_CLOSE_UP // 2) : middle + NUM_STEPS_CLOSE_UP // 2]
    from_s, to_s = shown[0].started_at_s, shown[-1].ended_at_s
    inside = [bar for bar in _all_bars(run, (to_s - from_s) / 4000) if bar.end_s > from_s and bar.start_s < to_s]
    layout = _layout(rows, (from_s - begin_s, to_s - begin_s))
    hand_overs = [(version, at_s) for version, at_s in run.history.handed_over_at_s.items() if from_s < at_s < to_s]
    layout["shapes"] = [
        {
            "type": "line",
            "x0": at_s - begin_s,
            "x1": at_s - begin_s,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": "--text", "width": 1, "dash": "dot"},
        }
        for _, at_s in hand_overs
    ]
    layout["annotations"] = [
        {"x": at_s - begin_s, "y": 1, "yref": "paper", "yanchor": "bottom", "text": f"v{version}", "showarrow": False}
        for version, at_s in hand_overs
    ]
    yield Figure(
        f"From near: steps {shown[0].step} to {shown[-1].step}",
        "A dotted line is a new weight version; the number in a bar is the version that the replica decodes with (in "
        "the trainer's row, the step). Look down any moment: do all replicas hold the same version, and who waits?",
        "full",
        140 + max(16, min(40, 1200 // len(rows))) * len(rows),
        [*_traces(inside, begin_s, labelled=True), *_losses(run, begin_s)],
        layout,
    )


def _all_bars(run: RunFolder, shortest_s: float) -> list[Bar]:
    bars: list[Bar] = []
    for place in _ordered(run):
        row = _row_name(place)
        for interval in drawn(place.intervals, shortest_s):
            version = "" if interval.version is None else f"v{interval.version}"
            decoding = interval.phase in (Phase.GENERATING, Phase.TAIL, Phase.EVALUATING)
            held = f"<br>trajectories: {interval.num_trajectories_first} → {interval.num_trajectories_last}"
            hover = f"replica {interval.replica}: {interval.phase}{f' with {version}' if version else ''}{held}"
            label = version if decoding else ""
            bars.append(Bar(row, interval.phase, interval.start_s, interval.end_s, label, hover))
    bars += [
        Bar(
            TRAINER_ROW, i.phase, i.start_s, i.end_s, str(i.step) * (i.phase == "training"), f"step {i.step}: {i.phase}"
        )
        for i in _whole_phases(run.history.timeline.trainer, shortest_s)
    ]
    return bars


def _whole_phases(intervals: Sequence[TrainerInterval], shortest_s: float) -> list[TrainerInterval]:
    """A step's mini-batches as one interval; what is too short to be seen belongs to the one before it."""
    kept: list[TrainerInterval] = []
    for interval in intervals:
        same = bool(kept) and (kept[-1].phase, kept[-1].step) == (interval.phase, interval.step)
        if kept and (same or interval.end_s - interval.start_s < shortest_s):
            kept[-1].end_s = interval.end_s
        else:
            kept.append(msgspec.structs.replace(interval))
    return kept


def _traces(bars: Sequence[Bar], begin_s: float, *, labelled: bool) -> Iterator[Trace]:
    """One trace a phase, so that the legend can show and hide it."""
    for phase in (*REPLICA_PHASES, *TRAINER_PHASES):
        chosen = [bar for bar in bars if bar.phase == phase]
        if not chosen:
            continue
        trace: Trace = {
            "type": "bar",
            "orientation": "h",
            "name": str(phase),
            "y": [bar.row for bar in chosen],
            "base": [round(bar.start_s - begin_s, 3) for bar in chosen],
            "x": [round(bar.end_s - bar.start_s, 3) for bar in chosen],
            "marker": {"color": f"--{phase}", "line": {"width": 0}},
            "customdata": [[bar.hover, round(bar.end_s - bar.start_s, 3)] for bar in chosen],
            "hovertemplate": "%{customdata[0]}<br>%{customdata[1]} s from %{base} s on<extra></extra>",
            "legendgroup": "trainer" if phase in TRAINER_PHASES else "replicas",
        }
        if labelled:
            trace |= {
                "text": [bar.label for bar in chosen],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "constraintext": "both",
                "textfont": {"color": "--on-tail" if phase == Phase.TAIL else "--on-bar", "size": 12},
            }
        yield trace


def _losses(run: RunFolder, begin_s: float) -> Iterator[Trace]:
    lost = [
        (_row_name(place), interval)
        for place in _ordered(run)
        for interval in place.intervals
        if interval.phase is Absence.LOST
    ]
    if lost:
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": "replica lost",
            "showlegend": False,
            "x": [round(interval.start_s - begin_s, 3) for _, interval in lost],
            "y": [row for row, _ in lost],
            "marker": {"symbol": "x", "size": 11, "color": "--lost", "line": {"width": 1.5, "color": "--page"}},
            "hovertemplate": "nothing more was heard at %{x} s<extra></extra>",
        }


def _layout(rows: Sequence[str], shown_s: tuple[float, float]) -> dict[str, Any]:
    return {
        "barmode": "overlay",
        "bargap": 0.22,
        "xaxis": {"title": {"text": "seconds since the first trajectory was dispatched"}, "range": shown_s},
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": list(reversed(rows)),
            "fixedrange": True,
            "showgrid": False,
        },
        "showlegend": True,
        "hovermode": "closest",
        "uniformtext": {"minsize": 9, "mode": "hide"},
    }


def _ordered(run: RunFolder) -> list[Place]:
    return sorted(run.history.timeline.places, key=lambda place: (place.machine, place.intervals[0].replica))


def _row_name(place: Place) -> str:
    """Under the name of the first replica that served there; its replacements are named where they hover."""
    return f"machine {place.machine} · replica {place.intervals[0].replica}"
