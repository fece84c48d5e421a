"""Runs calls on the slots of one machine: as many at once as there are slots, the others wait, within limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from laminar.envs.sandbox.confinement import Confinement
from laminar.envs.sandbox.sandbox import Outcome, SandboxUnavailable
from laminar.envs.sandbox.slot import Slot, SlotDied

NUM_TRIES = 2
"""A call whose slot dies under it is made once more: it cannot have changed anything."""


class LocalSandbox:
    """Sandbox on this machine. Use it from one event loop, whose thread must outlive it: the slots die with it.

    num_queued_max: calls that may wait for a slot. queue_deadline_s: how long each of them may.
    """

    def __init__(
        self, confinement: Confinement, *, num_slots: int, num_queued_max: int, queue_deadline_s: float
    ) -> None:
        self._limits = confinement.limits
        self._slots = [Slot(confinement) for _ in range(num_slots)]
        self._num_queued_max = num_queued_max
        self._queue_deadline_s = queue_deadline_s
        self._free: asyncio.Queue[Slot] = asyncio.Queue()
        self._num_queued = 0
        self._refilling: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_free(self) -> int:
        """Slots that a call could have at once."""
        return self._free.qsize()

    @property
    def num_queued(self) -> int:
        """Calls that wait for a slot."""
        return self._num_queued

    async def start(self) -> None:
        """Raises SlotDied if a slot does not start."""
        try:
            await asyncio.gather(*(slot.start() for slot in self._slots))
        except BaseException:
            await self.close()
            raise
        for slot in self._slots:
            self._free.put_nowait(slot)

    async def run(self, code: str, *, wall_s: float | None = None) -> Outcome:
        limits = self._limits if wall_s is None else replace(self._limits, wall_s=min(wall_s, self._limits.wall_s))
        for number in range(1, NUM_TRIES + 1):
            slot = await self._take_slot()
            try:
                if not slot.alive:
                    await slot.start()
                return await slot.run(code, limits)
            except SlotDied as error:
                if number == NUM_TRIES:
                    raise SandboxUnavailable(f"{error} (tried {NUM_TRIES} times)") from error
            finally:
                self._refill(slot)
        raise AssertionError("unreachable: the last try returns or raises")

    async def close(self) -> None:
        """End every slot and whatever runs there. Closing again does nothing."""
        self._closed = True
        for task in self._refilling:
            task.cancel()
        await asyncio.gather(*self._refilling, return_exceptions=True)
        await asyncio.gather(*(slot.kill() for slot in self._slots))

    async def _take_slot(self) -> Slot:
        if self._closed:
            raise SandboxUnavailable("the sandbox is closed")
        if self._free.empty() and self._num_queued >= self._num_queued_max:
            raise SandboxUnavailable(
                f"{self._num_queued} calls wait for the sandbox already (sandbox.num_queued_max={self._num_queued_max})"
            )
        self._num_queued += 1
        try:
            async with asyncio.timeout(self._queue_deadline_s):
                return await self._free.get()
        except TimeoutError as error:
            raise SandboxUnavailable(
                f"no slot of the sandbox became free within sandbox.queue_deadline_s={self._queue_deadline_s:g}"
            ) from error
        finally:
            self._num_queued -= 1

    def _refill(self, slot: Slot) -> None:
        """In the background: the caller has its outcome, or is being cancelled."""
        task = asyncio.get_running_loop().create_task(self._make_ready(slot))
        self._refilling.add(task)
        task.add_done_callback(self._refilling.discard)

    async def _make_ready(self, slot: Slot) -> None:
        """Free again, even if it cannot be made ready now: the next call tries, and says what is wrong."""
        try:
            await (slot.ready() if slot.alive else slot.start())
        except SlotDied:
            pass
        finally:
            self._free.put_nowait(slot)
