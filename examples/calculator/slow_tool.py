"""Slows the tool down as published for a code sandbox under load, scaled: one call in a hundred takes very long.

`rollout.environment=examples/calculator/slow_tool.py:SlowTool`. The latencies are those of Laminar's figure 2 (mean
51 s, median 21 s, p99 395 s), times TIME_SCALE. Which call takes how long follows from the turn, so that a run that is
repeated, or asks twice, waits as long.
"""

import asyncio
import bisect
import hashlib

from laminar.envs.env import Observation, Turn
from laminar.envs.math_with_code import MathWithCode

TIME_SCALE = 1 / 500
"""Seconds here for a second there."""
LATENCY_S = ((0.0, 4.9), (0.1, 8), (0.25, 11), (0.5, 21), (0.75, 48), (0.9, 144), (0.95, 236), (0.99, 395), (1.0, 600))
"""Share of calls that take at most so long; straight lines in between."""


class SlowTool(MathWithCode):
    async def observe(self, turn: Turn) -> Observation | None:
        observation = await super().observe(turn)
        if observation is not None:
            digest = hashlib.blake2b(turn.response_text.encode(), digest_size=8).digest()
            await asyncio.sleep(TIME_SCALE * latency_s(int.from_bytes(digest) / 2**64))
        return observation


def latency_s(share: float) -> float:
    """The latency that this share of calls stays below; share in 0..1."""
    position = min(bisect.bisect_right(LATENCY_S, (share, float("inf"))), len(LATENCY_S) - 1)
    (low, short_s), (high, long_s) = LATENCY_S[position - 1], LATENCY_S[position]
    return short_s + (long_s - short_s) * (share - low) / (high - low)
