"""Answers `laminar sim --published SERIES`: simulates the published experiments and says how far off it is."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from laminar.sim.calibration import calibration
from laminar.sim.outcome import outcome
from laminar.sim.progress import progress
from laminar.sim.run import simulate
from laminar.sim.series import SERIES, Cell, calibration_of, cells, config_of

DIFFERENT = 0.05
"""Systems that were published closer together than this are in no order."""
FAR, TOO_FAR = 0.15, 0.25


class Reproduced(msgspec.Struct, frozen=True):
    """A published throughput beside ours. error: ours / published - 1. fitted: a constant was fitted to it."""

    series: str
    schedule: str
    num_gpus: int
    ours_tokens_per_s: float
    published_tokens_per_s: float
    error: float
    fitted: bool


def reproduce(series: str, *, as_json: bool) -> int:
    """Print a row for each cell, or a JSON object a line; the exit status. Raises ValueError for no such series."""
    if series not in SERIES:
        raise ValueError(f"--published {series!r} is no series; choose from {', '.join(SERIES)}")
    chosen, found = list(cells(series)), list[Reproduced]()
    with progress(series, len(chosen)) as cell_done:
        for cell in chosen:
            found.append(reproduce_cell(cell))
            cell_done(len(found))
            if as_json:
                print(msgspec.json.encode(found[-1]).decode(), flush=True)
    if not as_json:
        console = Console()
        console.print(_table(found))
        console.print("\n".join(verdict(found)), highlight=False)
    return 0


def reproduce_cell(cell: Cell) -> Reproduced:
    ours = outcome(simulate(config_of(cell), fitted=calibration_of(cell, calibration()))).tokens_per_s
    published = cell.published_tokens_per_s
    return Reproduced(cell.series, cell.schedule, cell.num_gpus, ours, published, ours / published - 1, cell.fitted)


def verdict(found: Sequence[Reproduced]) -> Iterator[str]:
    """How good that is, in sentences."""
    errors = [abs(one.error) for one in found if not one.fitted]
    far, too_far = (sum(error > limit for error in errors) for limit in (FAR, TOO_FAR))
    yield (
        f"cells that nothing was fitted to: mean absolute error {sum(errors) / len(errors):.1%} over {len(errors)}; "
        f"{far} beyond {FAR:.0%}, {too_far} beyond {TOO_FAR:.0%}"
    )
    right, wrong = order(found)
    yield f"order of the systems, where more than {DIFFERENT:.0%} apart: {right} pairs right, {len(wrong)} wrong"
    for one, other in wrong:
        yield f"  wrong on {one.num_gpus} GPUs: {one.schedule} above {other.schedule}"
    for schedule, (ours, published) in efficiencies(found).items():
        yield f"strong-scaling efficiency of {schedule}: {ours:.1%}, published {published:.1%}"


def order(found: Sequence[Reproduced]) -> tuple[int, list[tuple[Reproduced, Reproduced]]]:
    """Pairs on as many GPUs whose order is right: how many; and those whose order is wrong, ours in front first."""
    right, wrong = 0, list[tuple[Reproduced, Reproduced]]()
    for one, other in combinations(found, 2):
        if one.num_gpus != other.num_gpus:
            continue
        ahead, behind = sorted((one, other), key=lambda r: -r.ours_tokens_per_s)
        low, high = sorted((one.published_tokens_per_s, other.published_tokens_per_s))
        if high / low - 1 <= DIFFERENT:
            continue
        if ahead.published_tokens_per_s > behind.published_tokens_per_s:
            right += 1
        else:
            wrong.append((ahead, behind))
    return right, wrong


def efficiencies(found: Sequence[Reproduced]) -> dict[str, tuple[float, float]]:
    """By schedule: how much of the GPUs' growth, from fewest to most, throughput kept up with; ours and published."""
    by_schedule: dict[str, list[Reproduced]] = {}
    for one in sorted(found, key=lambda r: r.num_gpus):
        by_schedule.setdefault(one.schedule, []).append(one)
    shares: dict[str, tuple[float, float]] = {}
    for schedule, ascending in by_schedule.items():
        few, many = ascending[0], ascending[-1]
        growth = many.num_gpus / few.num_gpus
        shares[schedule] = (
            many.ours_tokens_per_s / few.ours_tokens_per_s / growth,
            many.published_tokens_per_s / few.published_tokens_per_s / growth,
        )
    return shares


def _table(found: Sequence[Reproduced]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"{found[0].series}: tokens/s trained")
    for name in ("GPUs", "schedule", "ours", "published", "error", ""):
        table.add_column(name, justify="left" if name in ("schedule", "") else "right")
    for one in found:
        table.add_row(
            str(one.num_gpus),
            one.schedule,
            f"{one.ours_tokens_per_s:,.0f}",
            f"{one.published_tokens_per_s:,.0f}",
            f"{one.error:+.1%}",
            "fitted" if one.fitted else "",
        )
    return table
