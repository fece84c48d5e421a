"""Holds engine steps back to the rate of an accelerator, so that replicas leave the CPU as accelerators would."""

import asyncio
import time

from laminar.config import PacedConfig
from laminar.control.costs import PROFILES, decode_step_s, scale_profile


class Pacer:
    """Gives each step an absolute deadline that follows from the last one's.

    A sleep may end a millisecond late; the next deadline does not move for that, so the rate holds. A step that is
    late by more than its own length makes later ones hurry for that length only: lost time is not caught up.
    """

    def __init__(self, config: PacedConfig, *, kv_capacity_tokens: int) -> None:
        self.profile = scale_profile(
            PROFILES[config.accelerator],
            time_scale=config.time_scale,
            batch_scale=config.batch_scale,
            kv_capacity_tokens=kv_capacity_tokens,
        )
        self.deadline_s: float | None = None
        """When the step last charged may end (time.perf_counter); None after a restart."""

    def restart(self) -> None:
        """The engine was idle: the next step owes nothing and is owed nothing."""
        self.deadline_s = None

    def charge(self, *, started_s: float, num_running: int, num_kv_tokens: int, num_prefill_tokens: int) -> None:
        """Set the deadline of the step that began at `started_s` (time.perf_counter)."""
        step_s = decode_step_s(self.profile.decode, num_running=num_running, num_kv_tokens=num_kv_tokens)
        step_s += num_prefill_tokens * self.profile.prefill_s_per_token
        begins_s = started_s if self.deadline_s is None else max(self.deadline_s, started_s - step_s)
        self.deadline_s = begins_s + step_s

    async def hold(self) -> None:
        """Sleep until the charged step may end. Cancelled, it can be called again."""
        assert self.deadline_s is not None, "no step was charged"
        remaining_s = self.deadline_s - time.perf_counter()
        if remaining_s > 0:
            await asyncio.sleep(remaining_s)
