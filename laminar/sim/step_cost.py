"""Says how long a decode step and a prefill take, and how many steps fit into a time.

For a fixed number of running trajectories a step's time is linear in the KV tokens that it reads, so many steps sum up
in closed form. Both coefficients are tabulated by the number running.
"""

import math
from collections.abc import Sequence

import numpy as np

from laminar.config import CoefficientsDecode
from laminar.control.messages import DecodeCost
from laminar.sim.published import Kernels, Published


class StepCost:
    """base_s[n] and per_kv_token_s[n]: a step's time with n running, without KV tokens and for each of them.

    prefill_tokens, prefill_s: ascending measured points; linear between and beyond them, and through the origin.
    """

    def __init__(
        self,
        base_s: Sequence[float],
        per_kv_token_s: Sequence[float],
        prefill_tokens: Sequence[float],
        prefill_s: Sequence[float],
    ) -> None:
        assert len(base_s) == len(per_kv_token_s) > 1, "one coefficient for every number of running trajectories"
        self._base_s = list(base_s)
        self._per_kv_token_s = list(per_kv_token_s)
        self._prefill_points = list(zip(prefill_tokens, prefill_s, strict=True))

    def steps_s(self, num_steps: int, num_running: int, num_kv_tokens: int) -> float:
        """Seconds of so many steps. num_kv_tokens: what the first one reads; each adds one for every running one."""
        per_kv_s = self._per_kv_token_s[num_running]
        first_s = self._base_s[num_running] + per_kv_s * num_kv_tokens
        return num_steps * (first_s + per_kv_s * num_running * (num_steps - 1) / 2)

    def num_steps_in(self, seconds: float, num_running: int, num_kv_tokens: int) -> int:
        """How many whole steps fit: the largest number whose steps_s is at most that."""
        per_kv_s = self._per_kv_token_s[num_running]
        first_s = self._base_s[num_running] + per_kv_s * num_kv_tokens
        growth_s = per_kv_s * num_running / 2
        if growth_s > 0:
            b = first_s - growth_s
            num_steps = int((math.sqrt(b * b + 4 * growth_s * max(0.0, seconds)) - b) / (2 * growth_s))
        else:
            num_steps = int(seconds / first_s)
        # The root may land a rounding error on the wrong side of a whole number.
        while num_steps > 0 and self.steps_s(num_steps, num_running, num_kv_tokens) > seconds:
            num_steps -= 1
        while self.steps_s(num_steps + 1, num_running, num_kv_tokens) <= seconds:
            num_steps += 1
        return num_steps

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds that taking in so many tokens of one trajectory adds to a step."""
        before_tokens, before_s = 0.0, 0.0
        for tokens, seconds in self._prefill_points:
            if num_tokens <= tokens or (tokens, seconds) == self._prefill_points[-1]:
                return before_s + (seconds - before_s) * (num_tokens - before_tokens) / (tokens - before_tokens)
            before_tokens, before_s = tokens, seconds
        raise AssertionError("the last point always answers")

    def linear(self) -> DecodeCost:
        """What a replica reports of itself: the straight line through batch 1 and the batch of 256 (or the largest)."""
        last = min(256, len(self._base_s) - 1)
        per_running_s = (self._base_s[last] - self._base_s[1]) / max(1, last - 1)
        return DecodeCost(
            floor_s=self._base_s[1] - per_running_s,
            per_kv_token_s=self._per_kv_token_s[min(64, last)],
            per_running_s=per_running_s,
        )


class Overhead:
    """What an engine step takes beyond its kernels: launching them, and CPU work for every running trajectory."""

    def __init__(self, *, per_layer_s: float, per_running_s: float) -> None:
        self.per_layer_s = per_layer_s
        self.per_running_s = per_running_s


def from_coefficients(decode: CoefficientsDecode, *, num_running_max: int) -> StepCost:
    return StepCost(
        [decode.floor_s + decode.per_running_s * n for n in range(num_running_max + 1)],
        [decode.per_kv_token_s] * (num_running_max + 1),
        [1.0],
        [decode.prefill_s_per_token],
    )


def from_kernels(
    tables: Kernels,
    figures: Published,
    *,
    accelerator: str,
    size: str,
    tensor_parallel: int,
    num_layers: int,
    overhead: Overhead,
    num_running_max: int,
) -> StepCost:
    """From the measured tables. H800 has the H100's kernels and memory, and its own figure 4 where there is one.

    Raises ValueError where the model was not measured with this tensor parallelism.
    """
    measured_on = "h100" if accelerator == "h800" else accelerator
    name = f"{measured_on} {size} TP{tensor_parallel}"
    if name not in tables.decode_step_ms:
        known = sorted(n.rpartition("TP")[2] for n in tables.prefill_ms if n.startswith(f"{measured_on} {size} "))
        raise ValueError(
            f"no step times of this model with simulation.tensor_parallel={tensor_parallel} are on record; use one of "
            f"{', '.join(known)}, or give simulation.decode.kind=coefficients"
        )
    base_ms, per_kv_ms = _lines(tables, name)
    if accelerator == "h800":
        figure_4 = figures.decode_step_ms_at_4096.get(f"{size}_TP{tensor_parallel}")
        base_ms += _offset_ms(tables, name, figure_4) if figure_4 is not None else 0.0
    running = np.arange(num_running_max + 1)
    base_s = 1e-3 * _interpolated(running, tables.batches, base_ms)
    base_s += overhead.per_layer_s * num_layers + overhead.per_running_s * running
    per_kv_s = 1e-3 * np.interp(running, tables.batches, per_kv_ms)
    prefill_s = [1e-3 * ms for ms in tables.prefill_ms[name]]
    return StepCost(base_s.tolist(), per_kv_s.tolist(), tables.prefill_tokens, prefill_s)


def _lines(tables: Kernels, name: str) -> tuple[np.ndarray, np.ndarray]:
    """For every batch the least-squares line of step time over KV tokens: its value at none, and its slope, in ms.

    Measured times are that linear in context: the lines miss no point by more than 4 %.
    """
    rows = np.array([tables.decode_step_ms[name][context] for context in tables.contexts])
    slopes, values = np.polyfit(np.array(tables.contexts, dtype=float), rows, 1)
    return values, slopes / np.array(tables.batches)


def _offset_ms(tables: Kernels, name: str, figure_4: dict[int, float]) -> np.ndarray:
    """Figure 4 minus the table at its context, for every batch of the table; beyond the figure as at its end."""
    table = dict(zip(tables.batches, tables.decode_step_ms[name][4096], strict=True))
    offsets = {batch: ms - table[batch] for batch, ms in sorted(figure_4.items())}
    return np.interp(tables.batches, list(offsets), list(offsets.values()))


def _interpolated(at: np.ndarray, points: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Linear between points, and beyond the last with the slope of the last piece."""
    slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
    return np.interp(at, points, values) + np.maximum(0, at - points[-1]) * slope
