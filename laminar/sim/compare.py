"""Answers `laminar sim CONFIG`: simulates a configuration under several schedules and sets them side by side."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import get_args

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from laminar.config import Config, ScheduleConfig
from laminar.settings import parse_config
from laminar.sim.outcome import Outcome, outcome
from laminar.sim.run import shape_of, simulate
from laminar.sim.table import comparison

SCHEDULES = tuple(str(kind.model_fields["kind"].default) for kind in get_args(get_args(ScheduleConfig)[0]))
"""Every kind of schedule."""
TABLE_WIDTH = 120
"""Columns of text that the table takes also where there is no terminal, or a narrow one."""


def compare(config: Config, schedules: Sequence[str], *, as_json: bool) -> int:
    """Print a column for each schedule, or a JSON object a line; the exit status."""
    configs = [with_schedule(config, kind) for kind in schedules]
    for chosen in configs:
        shape_of(chosen)  # what does not fit shows before anything is simulated
    outcomes: list[Outcome] = []
    for chosen in configs:
        with progress(chosen.schedule.kind, chosen.simulation.num_steps) as step_done:
            outcomes.append(outcome(simulate(chosen, step_done=step_done)))
        if as_json:
            print(msgspec.json.encode(outcomes[-1]).decode(), flush=True)
    if not as_json:
        console = Console()
        console.width = max(console.width, TABLE_WIDTH)
        console.print(comparison(outcomes))
    return 0


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


@contextmanager
def progress(what: str, num_steps: int) -> Generator[Callable[[int], None]]:
    """A bar on stderr, gone when its run is done; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=num_steps)
        yield lambda step: bars.update(task, completed=step)
