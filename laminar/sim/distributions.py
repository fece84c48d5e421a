"""Draws from distributions: by digitised quantiles, lognormal, or a list of values; a block at a time, from a seed."""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from laminar.config import (
    LatencyFile,
    LengthsConfig,
    LengthsFile,
    LengthsOfRun,
    LognormalLatency,
    LognormalLengths,
    PublishedLatency,
    PublishedLengths,
)
from laminar.sim.numbers_file import read_numbers
from laminar.sim.published import published

Values = NDArray[np.float64]
_NORMAL = NormalDist()


class Distribution(Protocol):
    def draw(self, uniform: Values) -> Values:
        """One value for each number in [0, 1): the inverse of the distribution function."""
        ...


class ByQuantiles:
    """Linear between quantiles; the last piece, whose end is the largest value ever seen, is an exponential tail.

    A straight line to that one value would make it a thousand times too likely.
    """

    def __init__(self, quantiles: Sequence[tuple[float, float]]) -> None:
        self._shares = np.array([share for share, _ in quantiles])
        self._values = np.array([value for _, value in quantiles])

    def draw(self, uniform: Values) -> Values:
        shares, values = self._shares, self._values
        drawn = np.interp(uniform, shares, values)
        # The scale of the tail is that between the 99 % quantile and the last one but the largest.
        before = float(np.interp(0.99, shares, values))
        scale = (values[-2] - before) / np.log(0.01 / (1 - shares[-2])) if shares[-2] > 0.99 else 0.0
        in_tail = uniform > shares[-2]
        tail = values[-2] + scale * np.log((1 - shares[-2]) / (1 - uniform[in_tail]))
        drawn[in_tail] = np.minimum(tail, values[-1])
        return drawn


class Lognormal:
    def __init__(self, median: float, log_sd: float) -> None:
        self._median = median
        self._log_sd = log_sd

    def draw(self, uniform: Values) -> Values:
        deviates = np.array([_NORMAL.inv_cdf(share) for share in np.maximum(uniform, 1e-12)])
        return self._median * np.exp(self._log_sd * deviates)


class OneOf:
    """Each of the values equally likely."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = np.sort(np.array(values, dtype=np.float64))

    def draw(self, uniform: Values) -> Values:
        return self._values[(uniform * len(self._values)).astype(np.int64)]


def build_lengths(config: LengthsConfig) -> Distribution:
    """Raises ValueError for a file or a run that gives no lengths."""
    match config:
        case PublishedLengths():
            return ByQuantiles(published().response_tokens[config.name].quantiles)
        case LognormalLengths():
            return Lognormal(config.median_tokens, config.log_sd)
        case LengthsFile():
            return OneOf(read_numbers(config.path, what="length in tokens", whole=True))
        case LengthsOfRun():
            return OneOf(_lengths_of_run(config))


def build_latency(config: PublishedLatency | LognormalLatency | LatencyFile) -> Distribution:
    match config:
        case PublishedLatency():
            return ByQuantiles(published().tool_latency_s["sandbox"].quantiles)
        case LognormalLatency():
            return Lognormal(config.median_s, config.log_sd)
        case LatencyFile():
            return OneOf(read_numbers(config.path, what="latency in seconds", whole=False))


def _lengths_of_run(config: LengthsOfRun) -> list[float]:
    from laminar.observe.run_folder import read_run

    lengths = read_run(config.path).history.lengths
    if not lengths:
        raise ValueError(
            f"simulation.lengths.path={config.path} is a run in which no training trajectory finished, so it has no "
            "lengths; name another, or use simulation.lengths.kind=lognormal"
        )
    return [float(length) for length, count in lengths.items() for _ in range(count)]
