"""Shows on a terminal how far a simulation is."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(what: str, num_parts: int) -> Generator[Callable[[int], None]]:
    """A bar on stderr, gone at the end; nothing where stderr is no terminal. Call it with the parts that are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=num_parts)
        yield lambda num_done: bars.update(task, completed=num_done)
