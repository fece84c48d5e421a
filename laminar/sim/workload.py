"""Says what each trajectory will be: its length and its tool calls, a function of the seed and its id alone.

So every schedule, split and fault meets the same trajectories, and a trajectory that moves or restarts stays itself.
"""

import msgspec
import numpy as np

from laminar.config import Config, DataConfig, SimulationConfig
from laminar.control.messages import TrajectoryId
from laminar.sim.distributions import build_latency, build_lengths

SHARE_CORRECT = 0.5
"""Responses that are scored 1, the others 0, each on its own."""
BLOCK = 4096
"""Trajectories drawn at once."""


class Call(msgspec.Struct, frozen=True):
    """A tool call after so many response tokens, and how long its answer takes."""

    at_token: int
    latency_s: float


class Response(msgspec.Struct, frozen=True):
    """A whole response: its tokens (tool output included), whether the limit cut it, its calls in order, its score."""

    num_tokens: int
    truncated: bool
    calls: tuple[Call, ...] = ()
    score: float = 0.0


class Workload:
    """Raises ValueError when built from a length or latency file that holds none."""

    def __init__(self, config: Config) -> None:
        self._simulation: SimulationConfig = config.simulation
        self._data: DataConfig = config.data
        self._seed = config.seed
        self._lengths = build_lengths(self._simulation.lengths)
        tools = self._simulation.tools
        self._latency = build_latency(tools.latency) if tools is not None else None
        self._blocks: dict[int, list[Response]] = {}

    def response(self, trajectory: TrajectoryId) -> Response:
        block, index = divmod(trajectory, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block)
        return self._blocks[block][index]

    def _draw(self, block: int) -> list[Response]:
        generator = np.random.default_rng((self._seed, block))
        limit = self._data.response_tokens_max
        drawn = np.maximum(1, np.rint(self._lengths.draw(generator.random(BLOCK)))).astype(np.int64)
        lengths = np.minimum(drawn, limit).tolist()
        truncated = (drawn > limit).tolist()
        scores = (generator.random(BLOCK) < SHARE_CORRECT).astype(float).tolist()
        calls = self._draw_calls(generator, lengths)
        return [Response(*values) for values in zip(lengths, truncated, calls, scores, strict=True)]

    def _draw_calls(self, generator: np.random.Generator, lengths: list[int]) -> list[tuple[Call, ...]]:
        if self._latency is None or self._simulation.tools is None:
            return [()] * len(lengths)
        nums_calls = generator.integers(0, self._simulation.tools.num_calls_max + 1, len(lengths)).tolist()
        latencies = iter(self._latency.draw(generator.random(sum(nums_calls))).tolist())
        return [_calls(n, [next(latencies) for _ in range(k)]) for n, k in zip(lengths, nums_calls, strict=True)]


def _calls(num_tokens: int, latencies_s: list[float]) -> tuple[Call, ...]:
    """Evenly spread; a response shorter than its calls are many makes one a token at most."""
    at = [(i + 1) * num_tokens // (len(latencies_s) + 1) for i in range(len(latencies_s))]
    before = [0, *at]
    return tuple(Call(token, s) for token, s, last in zip(at, latencies_s, before, strict=False) if token > last)
