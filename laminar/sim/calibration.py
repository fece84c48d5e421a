"""Holds the constants that were fitted to published runs; `python -m laminar.sim.calibrate` fits them anew."""

import functools
from importlib.resources import files

import msgspec

FITTED_ON_PARAMETERS = 32.76e9
"""The training times were fitted on Qwen2.5-32B; those of other models are scaled by their parameters."""


class Calibration(msgspec.Struct, frozen=True):
    engine_per_layer_s: float
    """What an engine step takes beyond its kernels, for each layer of the model: launches, in eager mode."""
    engine_per_running_s: float
    """The same for each running trajectory: scheduling, sampling, bookkeeping on the CPU."""
    train_fixed_s_per_mtoken: float
    """Training seconds for a million tokens that more GPUs do not make shorter, at FITTED_ON_PARAMETERS."""
    train_gpu_s_per_mtoken: float
    """GPU seconds for a million tokens, at FITTED_ON_PARAMETERS."""
    own_train_fixed_s_per_mtoken: float
    """As above, for the published cells of partial_rollout alone: AReaL has a trainer of its own."""
    own_train_gpu_s_per_mtoken: float


@functools.cache
def calibration() -> Calibration:
    data = (files("laminar.sim") / "data" / "calibration.json").read_bytes()
    return msgspec.json.decode(data, type=Calibration)
