"""Fits the simulator's constants to published runs anew: `python -m laminar.sim.calibrate`.

    engine    per layer, per running   a step at 270 running (Table 1, figure 16); one_step_stale on 512 GPUs
    trainer   fixed, per GPU           synchronous on 32 and on 512 GPUs
    its own   fixed, per GPU           partial_rollout on 32 and on 512 GPUs: another trainer (Megatron)

All on 32B. Nothing else is fitted to anything.
"""

from collections.abc import Callable

import msgspec

from laminar.sim.calibration import Calibration, calibration
from laminar.sim.outcome import Outcome, outcome
from laminar.sim.run import shape_of, simulate
from laminar.sim.series import Cell, calibration_of, cells, config_of

SERIES = "32B_math"
STEP_S = 0.060
"""A decode step at NUM_RUNNING: 4,262 tokens/s a replica, less what it spends on taking in what was preempted."""
NUM_RUNNING = 270
NUM_KV_TOKENS = 650_000
"""82.2 % of the KV capacity, which is 2,400 tokens for each that runs."""
NUM_LAYERS = 64
PER_LAYER_S = (0.5e-4, 3.0e-4)
"""Where the constant is looked for."""
NUM_ROUNDS = 4
TOLERANCE_S = 0.5
MTOKENS_PER_STEP = 8192 * 3420 / 1e6
"""Prompt and response tokens of a step."""


def main() -> None:
    fitted = calibration()
    # The floor is the trainer's only if that is slow, and it is not: two rounds settle both.
    for _ in range(2):
        fitted = fit_trainer(fit_engine(fitted))
    print(msgspec.json.format(msgspec.json.encode(fit_own_trainer(fitted)), indent=1).decode())


def fit_engine(start: Calibration) -> Calibration:
    """Both constants at once: each value per layer has its value per running that keeps the step at NUM_RUNNING."""
    cell = _cell("one_step_stale", 512)

    def miss_s(per_layer_s: float) -> float:
        ran = _simulated(cell, with_step(start, per_layer_s), num_steps=7)
        return ran.step_s - _published_step_s(cell, ran)

    return with_step(start, _root(miss_s, *PER_LAYER_S))


def with_step(start: Calibration, per_layer_s: float) -> Calibration:
    """With this constant per layer, and the one per running trajectory that gives STEP_S."""
    free = msgspec.structs.replace(start, engine_per_layer_s=0.0, engine_per_running_s=0.0)
    kernels_s = shape_of(config_of(_cell("trajectory_level", 128)), free).cost.steps_s(1, NUM_RUNNING, NUM_KV_TOKENS)
    per_running_s = (STEP_S - kernels_s - NUM_LAYERS * per_layer_s) / NUM_RUNNING
    return msgspec.structs.replace(start, engine_per_layer_s=per_layer_s, engine_per_running_s=per_running_s)


def fit_trainer(start: Calibration) -> Calibration:
    """Nothing overlaps in a synchronous step, so what is not generation is training."""
    seconds: dict[int, float] = {}
    for num_gpus in (32, 512):
        cell = _cell("synchronous", num_gpus)
        ran = _simulated(cell, start, num_steps=5)
        seconds[num_gpus] = _published_step_s(cell, ran) - ran.step_s * ran.trainer_idle
    fixed, gpu = _constants(seconds)
    return msgspec.structs.replace(start, train_fixed_s_per_mtoken=fixed, train_gpu_s_per_mtoken=gpu)


def fit_own_trainer(start: Calibration) -> Calibration:
    """AReaL's is the bottleneck in both cells, so what a step lacks, training lacks."""
    for _ in range(2):
        seconds: dict[int, float] = {}
        for num_gpus in (32, 512):
            cell = _cell("partial_rollout", num_gpus)
            ran = _simulated(cell, calibration_of(cell, start), num_steps=9)
            seconds[num_gpus // 2] = ran.step_s * ran.training + _published_step_s(cell, ran) - ran.step_s
        fixed, gpu = _constants(seconds)
        start = msgspec.structs.replace(start, own_train_fixed_s_per_mtoken=fixed, own_train_gpu_s_per_mtoken=gpu)
    return start


def _cell(schedule: str, num_gpus: int) -> Cell:
    return next(cell for cell in cells(SERIES) if (cell.schedule, cell.num_gpus) == (schedule, num_gpus))


def _simulated(cell: Cell, fitted: Calibration, *, num_steps: int) -> Outcome:
    config = config_of(cell, num_steps=num_steps, num_warmup_steps=num_steps // 3)
    return outcome(simulate(config, fitted=fitted))


def _published_step_s(cell: Cell, ran: Outcome) -> float:
    """On the tokens of the steps that were simulated."""
    return ran.tokens_per_s * ran.step_s / cell.published_tokens_per_s


def _constants(seconds: dict[int, float]) -> tuple[float, float]:
    """Fixed and GPU seconds for a million tokens, of training times of a step by GPUs."""
    (few, few_s), (many, many_s) = sorted(seconds.items())
    gpu_s = (few_s - many_s) / (1 / few - 1 / many)
    return (many_s - gpu_s / many) / MTOKENS_PER_STEP, gpu_s / MTOKENS_PER_STEP


def _root(miss: Callable[[float], float], low: float, high: float) -> float:
    """Of a function that is nearly a straight line: by false position."""
    miss_low, miss_high = miss(low), miss(high)
    middle = low
    for _ in range(NUM_ROUNDS):
        middle = low - miss_low * (high - low) / (miss_high - miss_low)
        miss_middle = miss(middle)
        if abs(miss_middle) < TOLERANCE_S:
            break
        if miss_middle < 0:
            low, miss_low = middle, miss_middle
        else:
            high, miss_high = middle, miss_middle
    return middle


if __name__ == "__main__":
    main()
