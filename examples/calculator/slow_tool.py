"""Slows the tool down as published for a code sandbox under load, scaled: one call in a hundred takes very long.

`rollout.environment=examples/calculator/slow_tool.py:SlowTool`. The latencies are those that the simulator draws
(`simulation.tools`; mean 51 s, median 21 s, p99 395 s), times TIME_SCALE. How long a call takes follows from the turn,
so that a run that is repeated, or that asks twice, waits as long.
"""

import asyncio
import hashlib

import numpy as np

from laminar.config import PublishedLatency
from laminar.envs.env import Observation, Turn
from laminar.envs.math_with_code import MathWithCode
from laminar.sim.distributions import build_latency

TIME_SCALE = 1 / 200
"""Seconds here for a second there."""
PUBLISHED = build_latency(PublishedLatency())


class SlowTool(MathWithCode):
    async def observe(self, turn: Turn) -> Observation | None:
        observation = await super().observe(turn)
        if observation is not None:
            digest = hashlib.blake2b(turn.response_text.encode(), digest_size=8).digest()
            # 53 bits, as many as a float between 0 and 1 has.
            await asyncio.sleep(latency_s((int.from_bytes(digest) >> 11) / 2**53))
        return observation


def latency_s(share: float) -> float:
    """What this share of calls stays below, scaled; share in [0, 1)."""
    return TIME_SCALE * float(PUBLISHED.draw(np.array([share]))[0])
