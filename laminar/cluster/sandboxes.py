"""Keeps a sandbox on every machine, where the environment runs code in one; a lost one is replaced."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ray.exceptions import RayError

from laminar.cluster.actors import RunSecrets, SandboxActor
from laminar.cluster.member import Member, cause_of
from laminar.cluster.processes import ProcessRegistry
from laminar.cluster.ray_session import Machine, RaySession
from laminar.config import Config, LocalSandboxConfig
from laminar.envs.env import load_environment

log = logging.getLogger(__name__)


class SandboxWorkers:
    """on_failed hears why none can be had on a machine; that ends the run. Control need not know of these: a call whose
    sandbox is lost waits for the next one, within a deadline of its own.
    """

    def __init__(
        self,
        config: Config,
        session: RaySession,
        secrets: RunSecrets,
        registry: ProcessRegistry,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_failed: Callable[[str], None],
    ) -> None:
        self.members: list[Member] = []
        """Those that are up."""
        self._config = config
        self._session = session
        self._secrets = secrets
        self._registry = registry
        self._spawn = spawn
        self._on_failed = on_failed
        self._num_replacements = 0

    def start(self, machine: Machine) -> None:
        """Nothing, if no environment runs code, or if it runs it elsewhere."""
        if needs_sandbox(self._config) and isinstance(self._config.sandbox, LocalSandboxConfig):
            self._spawn(self._keep(machine))

    async def _keep(self, machine: Machine) -> None:
        while (member := await self._start(machine)) is not None:
            self.members.append(member)
            try:
                await member.actor.serve.remote()
            except RayError as error:
                cause = cause_of(error)
            else:
                cause = "it stopped serving"
            self.members.remove(member)
            member.end()
            self._num_replacements += 1
            if self._num_replacements > self._config.faults.num_replacements_max:
                self._on_failed(
                    f"the sandbox of machine {machine.id} was lost ({cause}), and "
                    f"faults.num_replacements_max={self._config.faults.num_replacements_max} were replaced"
                )
                return
            log.warning("the sandbox of machine %d was lost (%s); another is started", machine.id, cause)

    async def _start(self, machine: Machine) -> Member | None:
        actor = self._session.place(SandboxActor, machine).remote(machine.id, self._config, self._secrets)
        member = Member(actor, machine)
        deadline_s = self._config.faults.start_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await member.register(self._registry)
                await member.actor.start.remote()
        except (RayError, TimeoutError) as error:
            member.end()
            cause = cause_of(error) if isinstance(error, RayError) else f"not ready after {deadline_s:g} s"
            self._on_failed(f"the sandbox of machine {machine.id} did not start: {cause}")
            return None
        return member


def needs_sandbox(config: Config) -> bool:
    environment = config.rollout.environment
    return environment is not None and load_environment(environment).uses_sandbox
