"""Keeps a reward worker on every machine and spreads the scoring over them."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError

from laminar.cluster.actors import RewardActor
from laminar.cluster.member import Member, cause_of
from laminar.cluster.processes import ProcessRegistry
from laminar.cluster.ray_session import Machine, RaySession
from laminar.config import Config
from laminar.control.messages import CommandId, Scored
from laminar.data.records import ScoringTask

log = logging.getLogger(__name__)


class RewardWorkers:
    """on_failed hears why none can be had; that ends the run, since a function that does not load fails everywhere."""

    def __init__(
        self,
        config: Config,
        session: RaySession,
        registry: ProcessRegistry,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_failed: Callable[[str], None],
    ) -> None:
        self.members: list[Member] = []
        """Those that are up."""
        self._config = config
        self._session = session
        self._registry = registry
        self._spawn = spawn
        self._on_failed = on_failed
        self._ready = asyncio.Event()
        self._num_calls = 0

    def start(self, machine: Machine) -> None:
        self._spawn(self._start(machine))

    async def score(
        self, command: CommandId, tasks: Sequence[ScoringTask]
    ) -> tuple[Scored, dict[str, list[float | str]]]:
        """By the next worker in turn, once one is up (the control plane's deadline for scores bounds the wait).

        Raises RayError if that worker is gone; another is then started in its place.
        """
        while not self.members:
            await self._ready.wait()
        self._num_calls += 1
        member = self.members[self._num_calls % len(self.members)]
        try:
            return await member.actor.score.remote(command, tasks)
        except RayError:
            if member in self.members:
                self.members.remove(member)
                member.end()
                self.start(member.machine)
            if not self.members:
                self._ready.clear()
            raise

    async def _start(self, machine: Machine) -> None:
        member = Member(self._session.place(RewardActor, machine).remote(self._config), machine)
        deadline_s = self._config.faults.start_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await member.register(self._registry)
                await member.actor.start.remote()
        except (RayError, TimeoutError) as error:
            member.end()
            cause = cause_of(error) if isinstance(error, RayError) else f"not ready after {deadline_s:g} s"
            if self.members and not isinstance(error, RayTaskError):
                log.warning("machine %d goes on without a reward worker: %s", machine.id, cause)
            else:
                self._on_failed(f"the reward worker of machine {machine.id} did not start: {cause}")
        else:
            self.members.append(member)
            self._ready.set()
