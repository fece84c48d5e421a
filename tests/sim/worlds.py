"""A small simulated cluster that runs in a moment, for tests to change."""

from typing import Any

from laminar.config import Config
from laminar.settings import parse_config
from laminar.sim.hunt import default_config

SCHEDULES = ("trajectory_level", "synchronous", "one_step_stale", "streaming", "partial_rollout")


def small(*, seed: int = 0, schedule: str = "trajectory_level", **simulation: Any) -> Config:
    """That of `laminar chaos`, undisturbed by evaluations and checkpoints, for eight steps."""
    values = default_config().model_dump(exclude_unset=True)
    del values["evaluation"], values["checkpoint"], values["data"]["val_files"]
    values["simulation"] |= {"num_steps": 8, **simulation}
    return parse_config(values | {"seed": seed, "schedule": {"kind": schedule}}, "small")
