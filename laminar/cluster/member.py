"""One process of a run as the driver sees it: its actor, where it is, how it is ended, and what its failures say."""

import asyncio
import os
import signal
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from laminar.cluster.processes import ProcessRegistry
from laminar.cluster.ray_session import Machine


class Member(msgspec.Struct):
    actor: Any
    machine: Machine
    pid: int = 0
    listening: asyncio.Task[None] | None = None
    """The task that takes its reports in."""
    address: tuple[str, int] | None = None
    """Of a relay: where its upstream reaches it."""

    async def register(self, registry: ProcessRegistry) -> None:
        """Note its pid; the registry is about this machine, where the same number may mean something else."""
        self.pid = await self.actor.pid.remote()
        if self.machine.is_local:
            registry.add(self.pid)

    def end(self) -> None:
        """Kill it, hung or not: a stopped process cannot hear Ray ask it to leave, so the kernel is asked too."""
        if self.listening is not None:
            self.listening.cancel()
        ray.kill(self.actor)
        if self.pid and self.machine.is_local:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def leaves(self) -> bool:
        """Ask it to close; whether it went. One that was still starting has nothing to close yet."""
        try:
            await self.actor.close.remote()
        except RayTaskError:
            return False
        except RayError:
            return True
        return False


async def quietly(call: Awaitable[Any]) -> None:
    """For calls whose failure shows elsewhere: the process is gone, and whoever listens to it says so."""
    with suppress(RayError):
        await call


def cause_of(error: RayError) -> str:
    """What happened, in one line, without Ray's traceback."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    return f"its process died ({type(error).__name__})"
