"""Answers `laminar sim CONFIG`: simulates a configuration under several schedules and sets them side by side."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console

from laminar.config import Config, ScheduleConfig
from laminar.observe.event_log import EVENTS_FOLDER
from laminar.observe.report import write_report
from laminar.settings import CONFIG_FILE, parse_config
from laminar.sim.outcome import Outcome, outcome
from laminar.sim.progress import progress
from laminar.sim.run import shape_of, simulate
from laminar.sim.table import comparison

SCHEDULES = tuple(str(kind.model_fields["kind"].default) for kind in get_args(get_args(ScheduleConfig)[0]))
"""Every kind of schedule."""
TABLE_WIDTH = 120
"""Columns of text that the table takes also where there is no terminal, or a narrow one."""


def compare(config: Config, schedules: Sequence[str], *, as_json: bool, out: Path | None) -> int:
    """Print a column for each schedule, or a JSON object a line; the exit status.

    out: a folder for one folder a schedule, like that of a live run: event log, summary, report.
    """
    configs = [with_schedule(config, kind) for kind in schedules]
    for chosen in configs:
        shape_of(chosen)  # what does not fit shows before anything is simulated
    if out is not None:
        refuse_used(out, schedules)
    outcomes: list[Outcome] = []
    for chosen in configs:
        folder = out / chosen.schedule.kind if out is not None else None
        with progress(chosen.schedule.kind, chosen.simulation.num_steps) as step_done:
            outcomes.append(outcome(simulate(chosen, record_in=folder, step_done=step_done)))
        if folder is not None:
            (folder / CONFIG_FILE).write_text(chosen.model_dump_json(indent=2) + "\n")
            print(write_report(folder), file=sys.stderr)
        if as_json:
            print(msgspec.json.encode(outcomes[-1]).decode(), flush=True)
    if not as_json:
        console = Console()
        console.width = max(console.width, TABLE_WIDTH)
        console.print(comparison(outcomes))
    return 0


def refuse_used(out: Path, schedules: Sequence[str]) -> None:
    """Raise ValueError if a run was written there already."""
    for kind in schedules:
        if (out / kind / EVENTS_FOLDER).exists():
            raise ValueError(f"--out {out} holds a simulated run of {kind} already; name another folder, or remove it")


def parse_schedules(names: str | None) -> Sequence[str]:
    """Of a comma-separated list; none: all. Raises ValueError for one that does not exist."""
    chosen = SCHEDULES if names is None else tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in SCHEDULES:
            raise ValueError(f"--schedules {name!r} is no schedule; choose from {', '.join(SCHEDULES)}")
    return chosen


def with_schedule(config: Config, kind: str) -> Config:
    """The same under another schedule, with that one's defaults. Raises ValueError where they do not fit together."""
    if config.schedule.kind == kind:
        return config
    return parse_config(config.model_dump() | {"schedule": {"kind": kind}}, f"with schedule.kind={kind}")
