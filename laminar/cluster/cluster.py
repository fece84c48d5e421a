"""The real world: turns what processes report into events, and commands into calls on them.

    processes ── reports (long polls) ──► pumps ──► queue ──► events() ──► control.handle
        ▲                                                                      │
        └───────────────────────── calls ◄──────── execute ◄───── commands ◄───┘

Every call is awaited somewhere, and its failure becomes an event. Nothing here decides.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, assert_never

from ray.exceptions import RayError

from laminar.cluster.actors import RelayActor, RolloutActor, RunSecrets
from laminar.cluster.member import Member, cause_of, quietly
from laminar.cluster.payload import Payload
from laminar.cluster.processes import ProcessRegistry
from laminar.cluster.ray_session import RaySession
from laminar.cluster.rewards import RewardWorkers
from laminar.cluster.sandboxes import SandboxWorkers
from laminar.cluster.trainer_ranks import RankFailed, TrainerRanks
from laminar.config import Config
from laminar.control import messages as m
from laminar.train.checkpoint import CHECKPOINTS_FOLDER, newest_complete

log = logging.getLogger(__name__)

TICK_S = 0.1
SENDER_REPORT_INTERVAL_S = 0.1
CLOSE_DEADLINE_S = 15.0
"""For processes to end by themselves when the run ends; then they are killed."""


class Sink(Protocol):
    """Where what is worth knowing but decides nothing goes."""

    def mini_batch(self, step: int, metrics: dict[str, float]) -> None: ...

    def reward_extras(self, extras: dict[str, list[float | str]]) -> None: ...


class Cluster:
    """Executes commands by starting work; the outcomes arrive as events."""

    def __init__(
        self,
        config: Config,
        session: RaySession,
        secrets: RunSecrets,
        payload: Payload,
        registry: ProcessRegistry,
        sink: Sink,
        *,
        restore_from: Path | None,
        start_s: float,
    ) -> None:
        self._config = config
        self._session = session
        self._secrets = secrets
        self._payload = payload
        self._registry = registry
        self._sink = sink
        self._restore_from = restore_from
        self._checkpoints = config.run_dir / CHECKPOINTS_FOLDER
        self._epoch_s = time.monotonic() - start_s
        self._queue: asyncio.Queue[tuple[float, m.AnyEvent] | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._replicas: dict[m.ReplicaId, Member] = {}
        self._relays: dict[m.MachineId, Member] = {}
        self._rewards = RewardWorkers(config, session, registry, self._spawn, self._fail_start)
        self._sandboxes = SandboxWorkers(config, session, secrets, registry, self._spawn, self._fail_start)
        self._trainer: TrainerRanks | None = None
        self._chain: m.SetChain | None = None
        self._retained: tuple[int, ...] = ()

    def start(self) -> None:
        """Begin to bring everything up; what is ready says so by an event."""
        machines = self._session.machines
        self._emit(m.RunStarted(self._session.spread_replicas(self._config)))
        for machine in machines:
            self._start_relay(machine.id)
            self._rewards.start(machine)
            self._sandboxes.start(machine)
        self._start_trainer(0, self._restore_from)
        self._spawn(self._tick())

    async def events(self) -> AsyncIterator[tuple[float, m.AnyEvent]]:
        """Events with the time of their arrival, in order, for as long as the caller goes on.

        Raises what went wrong in here: a mistake of ours must end the run, not hang it.
        """
        while True:
            item = await self._queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self, cause: str) -> None:
        """Ask control to end the run."""
        self._emit(m.StopRequested(cause))

    async def close(self) -> None:
        """End every process of the run; those that do not end within the deadline are killed."""
        for task in self._tasks:
            task.cancel()
        members = [*self._replicas.values(), *self._relays.values(), *self._rewards.members, *self._sandboxes.members]
        if self._trainer is not None:
            members += self._trainer.members
        closing = [asyncio.ensure_future(member.leaves()) for member in members]
        if not closing:
            return
        await asyncio.wait(closing, timeout=CLOSE_DEADLINE_S)
        for member, call in zip(members, closing, strict=True):
            if not call.done() or not call.result():
                member.end()

    # ------------------------------------------------------------------------------------------------ commands

    def execute(self, command: m.AnyCommand) -> None:
        """Start the work and return; its outcome arrives later as an event."""
        match command:
            case m.StartReplica():
                self._start_replica(command.replica, command.machine)
            case m.StopReplica():
                self._stop_replica(command.replica)
            case m.StartRelay():
                self._start_relay(command.machine)
            case m.StartTrainer():
                newest = newest_complete(self._checkpoints)
                self._start_trainer(command.attempt, newest.folder if newest is not None else None)
            case m.Load():
                self._tell_replica(
                    command.replica, lambda actor: actor.load.remote(command.id, command.version, command.interrupt)
                )
            case m.Generate() | m.Resume():
                tasks = self._payload.tasks(command.trajectories, evaluation=command.evaluation)
                self._tell_replica(command.replica, lambda actor: actor.generate.remote(tasks, command.evaluation))
            case m.Release():
                self._tell_replica(
                    command.replica, lambda actor: actor.release.remote(command.id, command.trajectories)
                )
            case m.ScoreTrajectories():
                self._spawn(self._score(command))
            case m.TrainMiniBatch():
                self._spawn(self._train(command))
            case m.Publish():
                self._spawn(self._publish(command))
            case m.SaveCheckpoint():
                self._spawn(self._save(command))
            case m.SetChain():
                self._chain = command
                self._link_chain()
            case m.Fetch():
                self._fetch(command)
            case m.RetainVersions():
                self._retained = command.versions
                for relay in self._relays.values():
                    self._spawn(quietly(relay.actor.retain.remote(command.versions)))
            case m.Forget():
                self._payload.forget(command.trajectories)
            case m.EndRun():
                pass
            case _:
                assert_never(command)

    # ------------------------------------------------------------------------------------------------ replicas

    def _start_replica(self, id: m.ReplicaId, machine_id: m.MachineId) -> None:
        machine = self._session.machine(machine_id)
        placed = self._session.place(RolloutActor, machine, num_gpus=self._config.engine.num_gpus)
        actor = placed.remote(id, machine_id, self._config, self._secrets)
        member = self._replicas[id] = Member(actor, machine)
        member.listening = self._spawn(self._listen_to_replica(id, member))

    async def _listen_to_replica(self, id: m.ReplicaId, member: Member) -> None:
        started = False
        try:
            await member.register(self._registry)
            self._emit(await member.actor.start.remote())
            started = True
            while True:
                for report in await member.actor.reports.remote():
                    self._payload.store(report)
                    self._emit(report.event)
        except RayError as error:
            lost = m.ReplicaLost if started else m.ReplicaFailedToStart
            self._emit(lost(id, cause_of(error)))

    def _tell_replica(self, id: m.ReplicaId, call: Callable[[Any], Awaitable[None]]) -> None:
        """Call one that may be gone already; its failure is its loss."""
        member = self._replicas.get(id)
        if member is not None:
            self._spawn(self._report_failure(call(member.actor), lambda cause: m.ReplicaLost(id, cause)))

    def _stop_replica(self, id: m.ReplicaId) -> None:
        member = self._replicas.pop(id, None)
        if member is not None:
            member.end()

    # -------------------------------------------------------------------------------------------------- relays

    def _start_relay(self, id: m.MachineId) -> None:
        if (former := self._relays.pop(id, None)) is not None:
            former.end()
        machine = self._session.machine(id)
        actor = self._session.place(RelayActor, machine).remote(id, machine.host, self._config, self._secrets)
        member = self._relays[id] = Member(actor, machine)
        member.listening = self._spawn(self._listen_to_relay(id, member))

    async def _listen_to_relay(self, id: m.MachineId, member: Member) -> None:
        started = False
        try:
            await member.register(self._registry)
            member.address = await member.actor.start.remote()
            await member.actor.retain.remote(self._retained)
            started = True
            self._emit(m.RelayStarted(id))
            while True:
                events, happenings = await member.actor.reports.remote()
                for happening in happenings:
                    if not isinstance(happening, m.VersionComplete | m.VersionEvicted):
                        log.warning("relay of machine %d: %s", id, happening)
                for event in events:
                    self._emit(event)
        except RayError as error:
            lost = m.RelayLost if started else m.RelayFailedToStart
            self._emit(lost(id, cause_of(error)))

    def _link_chain(self) -> None:
        """Tell each relay of the chain its next one, and the trainer its master."""
        assert self._chain is not None, "a chain is set before it is linked"
        relays = [self._relays[id] for id in self._chain.machines if id in self._relays]
        for position, relay in enumerate(relays, start=1):
            address = relays[position].address if position < len(relays) else None
            self._spawn(quietly(relay.actor.set_next.remote(address, self._chain.id)))
        if self._trainer is not None and self._trainer.is_up:
            master = relays[0].address if relays else None
            for rank in self._trainer.members:
                self._spawn(quietly(rank.actor.set_master.remote(master, self._chain.id)))

    def _fetch(self, command: m.Fetch) -> None:
        source, target = self._relays.get(command.source), self._relays.get(command.machine)
        if source is None or target is None or target.address is None:
            self._emit(m.CommandFailed(command.id, "a relay of it is not up any more"))
            return
        call = source.actor.send_version.remote(command.version, target.address)
        self._spawn(self._report_failure(call, lambda cause: m.CommandFailed(command.id, cause)))

    # ------------------------------------------------------------------------------------------------- trainer

    def _start_trainer(self, attempt: int, restore_from: Path | None) -> None:
        if self._trainer is not None:
            self._trainer.end()
        self._trainer = TrainerRanks(self._config, self._session, self._secrets, attempt)
        self._spawn(self._lead_trainer(self._trainer, restore_from))

    async def _lead_trainer(self, trainer: TrainerRanks, restore_from: Path | None) -> None:
        """Bring its ranks up and stay with them, until one is lost."""
        try:
            step = await trainer.start(self._registry, restore_from)
            # The last to come up, and by then Ray's agents, which nobody announces, are there too.
            self._registry.add_descendants()
            if self._chain is not None:
                self._link_chain()
            self._emit(m.TrainerStarted(step, trainer.attempt))
            self._spawn(self._listen_to_senders(trainer))
            await trainer.watch()
        except RankFailed as error:
            self._emit(m.TrainerLost(str(error), trainer.attempt))

    async def _listen_to_senders(self, trainer: TrainerRanks) -> None:
        """How far a hand-over is, for control, while one is on its way."""
        told: int | None = None
        with suppress(RayError):
            while trainer is self._trainer:
                await asyncio.sleep(SENDER_REPORT_INTERVAL_S)
                report = await trainer.sender_report()
                if report.version is not None or told is not None:
                    self._emit(report)
                told = report.version

    async def _train(self, command: m.TrainMiniBatch) -> None:
        experiences = self._payload.experiences(command)
        metrics = await self._ask_trainer(command.id, lambda t: t.train(command.step, command.index, experiences))
        if metrics is not None:
            self._sink.mini_batch(command.step, metrics)
            self._emit(m.MiniBatchTrained(command.id, command.step, command.index))

    async def _publish(self, command: m.Publish) -> None:
        num_relays = len(self._chain.machines) if self._chain is not None else 1
        stall_s = await self._ask_trainer(
            command.id, lambda t: t.ask(lambda rank: rank.publish.remote(command.version, command.step, num_relays))
        )
        if stall_s is not None:
            self._emit(m.HandedOver(command.id, command.version, stall_s))

    async def _save(self, command: m.SaveCheckpoint) -> None:
        if not await self._ask_trainer(command.id, lambda t: t.ask(lambda rank: rank.begin_save.remote(command.step))):
            return
        self._emit(m.CheckpointCopied(command.id, command.step))
        if await self._ask_trainer(command.id, lambda t: t.ask(lambda rank: rank.finish_save.remote())):
            self._emit(m.CheckpointSaved(command.id, command.step))

    async def _ask_trainer(self, command: m.CommandId, work: Callable[[TrainerRanks], Awaitable[Any]]) -> Any | None:
        """What the work gives, or None: after its failure has become an event, or when whoever leads the trainer tells
        of its loss."""
        assert self._trainer is not None, "work was ordered before the trainer started"
        try:
            return await work(self._trainer)
        except RankFailed as error:
            if not error.died:
                self._emit(m.CommandFailed(command, str(error)))
        return None

    # ------------------------------------------------------------------------------------------------- rewards

    async def _score(self, command: m.ScoreTrajectories) -> None:
        tasks = self._payload.scoring_tasks(command.trajectories, evaluation=command.evaluation)
        try:
            event, extras = await self._rewards.score(command.id, tasks)
        except RayError as error:
            self._emit(m.CommandFailed(command.id, cause_of(error)))
            return
        self._payload.store_scores(command, event)
        self._sink.reward_extras(extras)
        self._emit(event)

    # ------------------------------------------------------------------------------------------------ plumbing

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._emit(m.Tick())

    async def _report_failure(self, call: Awaitable[Any], event: Callable[[str], m.AnyEvent]) -> None:
        try:
            await call
        except RayError as error:
            self._emit(event(cause_of(error)))

    def _fail_start(self, cause: str) -> None:
        self._emit(m.ServiceFailedToStart(cause))

    def _emit(self, event: m.AnyEvent) -> None:
        self._queue.put_nowait((time.monotonic() - self._epoch_s, event))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._retire)
        return task

    def _retire(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._queue.put_nowait(error)
