"""Reads a run's folder back into what happened in it, whether the run ended, goes on, or was killed."""

from pathlib import Path

import msgspec

from laminar.config import Config
from laminar.control.state import ClusterState
from laminar.observe.event_log import Segment, code_version, segments
from laminar.observe.history import History
from laminar.observe.metrics import MetricsRow, read_metrics
from laminar.observe.replay import config_of, plane_of
from laminar.observe.summary import Summary, read_summary, summarize

SIMULATED = (
    "A simulation: control decided as in a live run, and replicas, trainer and relays were models of such. Rewards are "
    "chance, and the run was cut off after its last step."
)


class RunFolder(msgspec.Struct, frozen=True):
    """A run as its folder tells it. notes: what a reader of its figures must know, in sentences."""

    path: Path
    config: Config
    history: History
    state: ClusterState
    metrics: list[MetricsRow]
    summary: Summary
    notes: list[str]


def read_run(run_dir: Path) -> RunFolder:
    """Replay the run's events. Raises ValueError for a folder that no run wrote, or whose log is damaged."""
    history, notes = History(), list[str]()
    config: Config | None = None
    state, simulated = ClusterState(), False
    shift_s = 0.0
    for segment in segments(run_dir):
        config, simulated = config_of(segment.header), segment.header.simulated
        if segment.records:
            begin_s = segment.records[0].now
            if segment.header.resumed:
                # A clock that began anew is carried on from where the run had come to.
                shift_s = max(0.0, history.timeline.end_s - begin_s)
                history.resume(begin_s + shift_s, segment.header.state)
        state = _follow(segment, history, shift_s, notes)
    assert config is not None, "segments() yields at least one"
    metrics = read_metrics(run_dir)
    written = read_summary(run_dir)
    peak_pss_bytes = written.peak_pss_bytes if written else None
    summary = summarize(config, history, state, metrics, peak_pss_bytes=peak_pss_bytes)
    if simulated:
        notes.append(SIMULATED)
    elif history.ended is None:
        notes.append("The run has not ended, or was killed: this page shows it up to its last event.")
    return RunFolder(run_dir, config, history, state, metrics, summary, notes)


def _follow(segment: Segment, history: History, shift_s: float, notes: list[str]) -> ClusterState:
    plane = plane_of(segment.header)
    if segment.header.code_version != code_version():
        notes.append(
            f"{segment.path.name} was decided by other code ({segment.header.code_version}) than reads it now."
        )
    if segment.torn:
        notes.append(f"The last line of {segment.path.name} was cut off by a kill and is left out.")
    for record in segment.records:
        try:
            commands = plane.handle(record.event, record.now)
        except Exception as error:  # noqa: BLE001 - a report is wanted most of all of the run that its own control plane ended
            notes.append(
                f"{segment.path.name}, line {record.line}: control cannot take this event in "
                f"({type(error).__name__}: {error}); what follows it in this file is not shown."
            )
            break
        history.observe(record.now + shift_s, record.event, commands, plane.state)
    return plane.state
