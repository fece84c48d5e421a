"""Says how long weights take from the trainer to the machines, and what a global broadcast would take instead."""

import math
from collections.abc import Mapping
from itertools import pairwise

from laminar.sim.published import Published

BYTES_OF_FIGURE = {"32B": 65.5e9, "72B": 145.4e9}
"""bf16 weights of the models whose broadcast was published."""


def published_broadcast_s(figures: Published, weight_bytes: float, num_machines: int) -> float:
    """From the hand-over until the last of so many relays has it all: figure 18, linear in the machines' logarithm.

    The curve of the model nearest in size, scaled by bytes; both grow by the same share with each doubling.
    """
    name = min(BYTES_OF_FIGURE, key=lambda model: abs(math.log(BYTES_OF_FIGURE[model] / weight_bytes)))
    return _by_logarithm(figures.broadcast_s[name], num_machines) * weight_bytes / BYTES_OF_FIGURE[name]


def formula_broadcast_s(num_machines: int, *, weight_bytes: float, startup_s: float, bytes_per_s: float) -> float:
    """T*(p) of a chain with the best number of chunks (Laminar, appendix D); p counts the sender too."""
    num_hops_between = num_machines - 1
    whole_s = weight_bytes / bytes_per_s
    return whole_s + num_hops_between * startup_s + 2 * math.sqrt(num_hops_between * whole_s * startup_s)


def global_broadcast_s(figures: Published, weight_bytes: float, num_gpus: int) -> float:
    """The baseline: trainer and all replicas stop until a GPU-direct broadcast has reached everybody (figure 14)."""
    name = min(BYTES_OF_FIGURE, key=lambda model: abs(math.log(BYTES_OF_FIGURE[model] / weight_bytes)))
    curve = figures.wait_for_weights_s[name].gpu_sync
    return _by_logarithm(curve, num_gpus) * weight_bytes / BYTES_OF_FIGURE[name]


def _by_logarithm(curve: Mapping[int, float], at: float) -> float:
    """Linear in log2 between points, and beyond them with the slope of the nearest two; never below a third point."""
    points = [(math.log2(x), y) for x, y in sorted(curve.items())]
    x = math.log2(max(1, at))
    pair = next(((a, b) for a, b in pairwise(points) if x <= b[0]), (points[-2], points[-1]))
    (x0, y0), (x1, y1) = pair
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
