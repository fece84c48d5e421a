"""The trainer as the driver sees it: a process for each rank, spoken to as one.

Every call goes to all ranks, and rank 0's answer is the trainer's. A rank that fails or dies takes the trainer with it:
the others would wait for it in their next collective call.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from laminar.cluster.actors import RunSecrets, TrainerActor
from laminar.cluster.member import Member, cause_of
from laminar.cluster.processes import ProcessRegistry
from laminar.cluster.ray_session import RaySession
from laminar.config import Config
from laminar.control.messages import SenderReport
from laminar.data.records import Experience
from laminar.relay.happenings import VersionSent

log = logging.getLogger(__name__)

RANK_LOSS_S = 1.0
"""By then Ray tells that a process has died. The others fail sooner, for want of it, and would be blamed."""
CONCURRENCY_GROUPS = {"links": 1, "watch": 1, "checkpoint": 1}
"""Of a rank's actor: what goes on beside training, each in a thread of its own."""


class RankFailed(Exception):
    """died: its process is gone; else it raised, and the trainer must not go on either."""

    def __init__(self, cause: str, *, died: bool) -> None:
        super().__init__(cause)
        self.died = died


class TrainerRanks:
    def __init__(self, config: Config, session: RaySession, secrets: RunSecrets, attempt: int) -> None:
        machines = session.machines_of_ranks(config.trainer)
        num_gpus = 1 if config.trainer.device == "cuda" else 0
        self.attempt = attempt
        self.is_up = False
        self.members = [
            Member(
                session.place(TrainerActor, machine, concurrency_groups=CONCURRENCY_GROUPS, num_gpus=num_gpus).remote(
                    rank, machine.host, config, secrets
                ),
                machine,
            )
            for rank, machine in enumerate(machines)
        ]

    async def start(self, registry: ProcessRegistry, restore_from: Path | None) -> int:
        """Returns the step whose weights it holds. Raises RankFailed."""
        try:
            for member in self.members:
                await member.register(registry)
            address = await self.members[0].actor.rendezvous.remote()
        except RayError as error:
            raise _failed(0, error) from error
        step = await self.ask(lambda actor: actor.start.remote(address, restore_from))
        self.is_up = True
        return step

    async def ask(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Call every rank; rank 0's result once all have done it. Raises RankFailed for the rank that is to blame."""
        calls = [asyncio.ensure_future(call(member.actor)) for member in self.members]
        _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if waiting and all(isinstance(error, RayTaskError) for _, error in _failures(calls)):
            await asyncio.wait(waiting, timeout=RANK_LOSS_S)
        failures = _failures(calls)
        for unfinished in calls:
            unfinished.cancel()
        for _, error in failures:
            if not isinstance(error, RayError):
                raise error
        if failures:
            # One that died says more than those that missed it.
            rank, error = min(failures, key=lambda failure: (isinstance(failure[1], RayTaskError), failure[0]))
            raise _failed(rank, error) from error
        return calls[0].result()

    async def train(self, step: int, index: int, experiences: Sequence[Experience]) -> dict[str, float]:
        # Put once, whatever the number of ranks; they get a reference.
        shared: Any = ray.put(experiences) if len(self.members) > 1 else experiences
        return await self.ask(lambda actor: actor.train_mini_batch.remote(step, index, shared))

    async def watch(self) -> None:
        """Until it is closed. Raises RankFailed as soon as a rank's process is gone."""
        await self.ask(lambda actor: actor.until_closed.remote())

    async def sender_report(self) -> SenderReport:
        """How far the ranks' senders together are with the newest hand-over; the log hears what befell them."""
        told = await asyncio.gather(*(member.actor.sender_report.remote() for member in self.members))
        for rank, (_, happenings) in enumerate(told):
            for happening in happenings:
                if not isinstance(happening, VersionSent):
                    log.warning("the sender of the trainer's rank %d: %s", rank, happening)
        reports: list[SenderReport] = [report for report, _ in told]
        version = reports[0].version
        num_bytes = sum(report.num_bytes for report in reports if report.version == version)
        return SenderReport(version, num_bytes, any(report.master_is_lost for report in reports))

    def end(self) -> None:
        for member in self.members:
            member.end()


def _failures(calls: Sequence["asyncio.Future[Any]"]) -> list[tuple[int, BaseException]]:
    """What the ranks raised so far, by rank."""
    return [(rank, error) for rank, c in enumerate(calls) if c.done() and (error := c.exception()) is not None]


def _failed(rank: int, error: BaseException) -> RankFailed:
    assert isinstance(error, RayError)
    return RankFailed(f"rank {rank}: {cause_of(error)}", died=not isinstance(error, RayTaskError))
