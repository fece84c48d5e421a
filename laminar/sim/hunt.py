"""Answers `laminar chaos`: examines seeds until one fails, on every core, and shows the smallest trouble that fails."""

import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.resources import as_file, files
from multiprocessing import get_context
from pathlib import Path

import msgspec

from laminar.config import Config
from laminar.settings import load_config
from laminar.sim.chaos import Examined, Scenario, draw, examine, shrink
from laminar.sim.compare import progress


def hunt(config: Config, seeds: range, *, as_json: bool) -> int:
    """Print what was found; 1 if a seed failed."""
    examined: list[Examined] = []
    with progress("seeds", len(seeds)) as done:
        for one in _examine_all(config, seeds):
            examined.append(one)
            done(len(examined))
            if one.cause is not None:
                break
    return _tell(config, examined, as_json=as_json)


def rerun(config: Config, file: Path, *, as_json: bool) -> int:
    """Examine the scenario in a file. Raises ValueError if there is none in it."""
    try:
        scenario = msgspec.json.decode(file.read_bytes(), type=Scenario)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"--scenario {file}: {error}") from error
    return _tell(config, [examine(config, scenario)], as_json=as_json)


def default_config() -> Config:
    """The cluster that comes with Laminar for this purpose."""
    with as_file(files("laminar.sim").joinpath("data", "chaos.yaml")) as path:
        return load_config(path, ())


def _examine_all(config: Config, seeds: Iterable[int]) -> Iterator[Examined]:
    """In the seeds' order."""
    workers = os.cpu_count() or 1
    if workers == 1:
        yield from (_examine_seed(config, seed) for seed in seeds)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(partial(_examine_seed, config), seeds)
        finally:
            pool.shutdown(cancel_futures=True)


def _examine_seed(config: Config, seed: int) -> Examined:
    return examine(config, draw(config, seed))


def _tell(config: Config, examined: list[Examined], *, as_json: bool) -> int:
    failed = examined[-1] if examined and examined[-1].cause is not None else None
    if as_json:
        for one in examined:
            print(msgspec.json.encode(one).decode())
    else:
        num_faults, num_lost = (sum(numbers) for numbers in zip(*map(_struck, examined), strict=True))
        print(
            f"{len(examined)} seeds, {num_faults} faults, {num_lost} losses, at least "
            f"{min(one.num_trajectories for one in examined)} trajectories each: "
            + ("every law held, every run made its steps" if failed is None else f"seed {failed.scenario.seed} FAILED")
        )
    if failed is None:
        return 0
    print("shrinking ...", file=sys.stderr)
    smallest = shrink(config, failed)
    print(f"{smallest.cause}\nat {smallest.at_s:.1f} s of this scenario (laminar chaos --scenario FILE runs it again):")
    print(msgspec.json.format(msgspec.json.encode(smallest.scenario), indent=2).decode())
    return 1


def _struck(examined: Examined) -> tuple[int, int]:
    return len(examined.scenario.faults), examined.num_lost
