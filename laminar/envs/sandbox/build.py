"""Builds the sandbox that the configuration asks for, and proves it, or refuses to go on."""

import os

from laminar.config import HttpSandboxConfig, LocalSandboxConfig, SandboxConfig
from laminar.envs.sandbox.channel import Address
from laminar.envs.sandbox.client import SharedSandbox
from laminar.envs.sandbox.confinement import Backend, Confinement, confinements
from laminar.envs.sandbox.inside.limits import Limits
from laminar.envs.sandbox.pool import LocalSandbox
from laminar.envs.sandbox.sandbox import Sandbox, SandboxUnavailable
from laminar.envs.sandbox.selftest import SandboxBroken, prove
from laminar.envs.sandbox.slot import SlotDied
from laminar.envs.sandbox.users import FIRST_USER


async def start_sandbox(config: SandboxConfig) -> Sandbox:
    """Ready to run code. Raises ValueError if this machine has none that holds, saying why.

    A backend that cannot start here is passed over. One that starts and lets an attack through is not: then something
    is wrong that a change of backend would only hide.
    """
    match config:
        case LocalSandboxConfig():
            return await _start_local(config)
        case HttpSandboxConfig():
            return await _try_service(config)


def reach_sandbox(config: SandboxConfig, address: Address) -> Sandbox:
    """As one process of a machine uses it: the machine's own, or the service elsewhere. Starts nothing."""
    match config:
        case LocalSandboxConfig():
            return SharedSandbox(address, deadline_s=config.queue_deadline_s + config.wall_s)
        case HttpSandboxConfig():
            from laminar.envs.sandbox.http import HttpSandbox  # another's client, so only when chosen

            return HttpSandbox(config)


async def _try_service(config: HttpSandboxConfig) -> Sandbox:
    """How it confines code is its own affair; that it runs some is seen here."""
    from laminar.envs.sandbox.http import HttpSandbox  # another's client, so only when chosen

    sandbox = HttpSandbox(config)
    try:
        answer = await sandbox.run("print('stands')")
        if answer.output.strip() != "stands":
            raise SandboxUnavailable(f"{config.url} ran print('stands') as {answer.text()!r} ({answer.status})")
    except SandboxUnavailable as error:
        await sandbox.close()
        raise ValueError(f"sandbox.url={config.url}: {error}") from error
    return sandbox


async def _start_local(config: LocalSandboxConfig) -> Sandbox:
    refusals: list[str] = []
    for confinement in _confinements(config):
        sandbox = LocalSandbox(
            confinement,
            num_slots=config.num_slots,
            num_queued_max=config.num_queued_max,
            queue_deadline_s=config.queue_deadline_s,
        )
        try:
            await sandbox.start()
        except SlotDied as error:
            refusals.append(f"{confinement.backend}: {error}")
            continue
        try:
            await prove(sandbox)
        except (SandboxBroken, SandboxUnavailable) as error:
            await sandbox.close()
            raise ValueError(f"sandbox.backend={confinement.backend}: {error}. No code is run in it") from error
        return sandbox
    raise ValueError(
        f"no sandbox for the code of models: {'; '.join(refusals)}. It is never run without one: install bubblewrap, "
        "use a kernel with Landlock, or name a service with sandbox.kind=http"
    )


def _confinements(config: LocalSandboxConfig) -> list[Confinement]:
    backend: Backend | None = None if config.backend == "auto" else config.backend
    limits = Limits(
        wall_s=config.wall_s,
        cpu_s=config.cpu_s,
        memory_bytes=config.memory_bytes,
        num_processes=config.num_processes,
        file_bytes=config.file_bytes,
        num_files=config.num_files,
        output_bytes=config.output_bytes,
    )
    return confinements(
        limits,
        backend=backend,
        python=config.python,
        packages=config.packages,
        preloaded=config.preloaded,
        # As root the code runs as somebody else, who may read less.
        user=FIRST_USER if os.getuid() == 0 else None,
    )
