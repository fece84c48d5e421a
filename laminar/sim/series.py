"""Sets up the published experiments: for each cell of figure 11 the configuration that simulates it.

One rule for all of them: DESIGN's buffer of `buffer.capacity_steps`, and at most so many trajectories a replica as the
systems allowed. Nothing here was chosen by its outcome.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from laminar.config import Config
from laminar.settings import parse_config
from laminar.sim.calibration import Calibration
from laminar.sim.published import published

PROMPT_TOKENS = 90
"""Prompts of DAPO-Math-17k: 3,420 tokens trained a trajectory (figure 15) minus the mean response."""
NUM_GROUPS_PER_REPLICA_MAX = 64
"""1,024 trajectories a replica (appendix A.2)."""
SERIES = ("7B_math", "32B_math", "72B_math")
MODELS = {"7B_math": "qwen2.5-7b", "32B_math": "qwen2.5-32b", "72B_math": "qwen2.5-72b"}


class Cell(msgspec.Struct, frozen=True):
    """One bar of figure 11. fitted: some constant was fitted to it."""

    series: str
    schedule: str
    num_gpus: int
    published_tokens_per_s: float
    fitted: bool


FITTED = {
    ("32B_math", "synchronous", 32): "the trainer's two constants",
    ("32B_math", "synchronous", 512): "the trainer's two constants",
    ("32B_math", "one_step_stale", 512): "the engine's floor",
    ("32B_math", "partial_rollout", 32): "its own trainer's two constants",
    ("32B_math", "partial_rollout", 512): "its own trainer's two constants",
}
"""The cells that a constant was fitted to (laminar/sim/calibrate.py), and which."""


def cells(series: str) -> Iterator[Cell]:
    for num_gpus, by_schedule in published().throughput_tokens_per_s[series].items():
        for schedule, tokens_per_s in by_schedule.items():
            yield Cell(series, schedule, num_gpus, tokens_per_s, (series, schedule, num_gpus) in FITTED)


def calibration_of(cell: Cell, fitted: Calibration) -> Calibration:
    """The constants of the trainer that the system was run with."""
    if cell.schedule != "partial_rollout":
        return fitted
    return msgspec.structs.replace(
        fitted,
        train_fixed_s_per_mtoken=fitted.own_train_fixed_s_per_mtoken,
        train_gpu_s_per_mtoken=fitted.own_train_gpu_s_per_mtoken,
    )


def config_of(cell: Cell, **simulation: Any) -> Config:
    """The cell as it was run. simulation: settings of that section to differ in."""
    size = cell.series.removesuffix("_math")
    split = published().splits_train_rollout_gpus.get(cell.schedule, {}).get(size, {}).get(cell.num_gpus)
    schedule: dict[str, Any] = {"kind": cell.schedule}
    if cell.schedule == "partial_rollout":
        schedule["staleness_max"] = None  # "infinity" in the throughput runs
    values: dict[str, Any] = {
        "model": {"path": MODELS[cell.series]},
        "data": {"train_files": ["dapo-math-17k.parquet"], "prompt_tokens_max": 2048, "response_tokens_max": 16384},
        "batch": {"num_prompts_per_step": 512, "group_size": 16, "num_mini_batches": 16},
        "rollout": {"num_groups_per_replica_max": NUM_GROUPS_PER_REPLICA_MAX},
        "schedule": schedule,
        "simulation": {
            "num_gpus": cell.num_gpus,
            "num_train_gpus": split[0] if split is not None else None,
            "tensor_parallel": _tensor_parallel(size, cell.schedule),
            "model": {"kind": "known", "name": MODELS[cell.series]},
            "lengths": {"kind": "published", "name": cell.series},
            "prompt_tokens": PROMPT_TOKENS,
            **simulation,
        },
    }
    return parse_config(values, f"{cell.series} on {cell.num_gpus} GPUs")


def _tensor_parallel(size: str, schedule: str) -> int:
    """Appendix A.2: 4 for 32B, 8 for 72B; for 7B as each system was run."""
    if size == "7B":
        return 1 if schedule in ("partial_rollout", "trajectory_level") else 2
    return {"32B": 4, "72B": 8}[size]
