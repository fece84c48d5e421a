"""What this machine has to confine code with, and pools on it."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from laminar.envs.sandbox.confinement import Backend, confinements
from laminar.envs.sandbox.inside.limits import Limits
from laminar.envs.sandbox.pool import LocalSandbox
from laminar.envs.sandbox.slot import Slot, SlotDied
from laminar.envs.sandbox.users import FIRST_USER

BACKENDS: tuple[Backend, ...] = ("bubblewrap", "landlock")


@asynccontextmanager
async def pool(
    backend: Backend,
    limits: Limits | None = None,
    *,
    num_slots: int = 2,
    num_queued_max: int = 100,
    queue_deadline_s: float = 60.0,
    packages: tuple[Path, ...] = (),
    preloaded: tuple[str, ...] = (),
) -> AsyncIterator[LocalSandbox]:
    """Raises ValueError or SlotDied where the backend is not to be had."""
    (confinement,) = confinements(
        limits or Limits(),
        backend=backend,
        packages=packages,
        preloaded=preloaded,
        user=FIRST_USER if os.getuid() == 0 else None,
    )
    sandbox = LocalSandbox(
        confinement, num_slots=num_slots, num_queued_max=num_queued_max, queue_deadline_s=queue_deadline_s
    )
    await sandbox.start()
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def lacking(backend: Backend) -> str | None:
    """Why this machine cannot have the backend; none if it can."""
    try:
        (confinement,) = confinements(Limits(), backend=backend, user=FIRST_USER if os.getuid() == 0 else None)
        slot = Slot(confinement)
        await slot.start()
        await slot.kill()
    except (ValueError, SlotDied) as error:
        return str(error)
    return None
