"""Serves one replica: decodes what it is given, and reports everything in one ordered stream.

    generate ─► episodes ─► engine.next() ─► deltas ─► episodes ─► outbox ─► reports()
    release, load ──────────────┘      environment ◄──┘  └──►           (one list a report interval)

One event loop, one thread. Reports, releases and loads leave through the same stream, so the tokens behind an outcome
are always stored before the outcome is handled.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress

import msgspec

from laminar.control.messages import (
    CommandId,
    Failed,
    Finished,
    Loaded,
    LoadFailed,
    MachineId,
    Progress,
    Released,
    ReplicaId,
    ReplicaReport,
    ReplicaStarted,
    TrajectoryId,
)
from laminar.data.records import KvParcel, Task, TokenDelta, WorkerReport
from laminar.envs.env import Environment, Observation, ObservationFailed, observe
from laminar.relay.chunks import version_checksum
from laminar.relay.lease import RelayUnreachable, VersionGone
from laminar.relay.manifest import LeasedVersion
from laminar.rollout.engines.engine import Delta, Engine, WrongWeights
from laminar.rollout.episode import Episode, EpisodeRules, EpisodeState
from laminar.rollout.kv_shelf import KvShelf
from laminar.rollout.observations import encode_observation

LONG_OBSERVATION_CHARACTERS = 10_000

Lease = Callable[[int], AbstractContextManager[LeasedVersion]]
"""Maps a version of the machine's relay for as long as the context lasts."""


class DamagedVersion(RuntimeError):
    """The bytes that the relay lends are not those that were published; none of them was taken in."""


class Turns(msgspec.Struct, frozen=True):
    """What a worker needs to run an environment: it, its time limit, and the way between text and tokens."""

    environment: Environment
    timeout_s: float
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


class RolloutWorker:
    """One replica. After start() it decodes until close(); all methods belong to one event loop."""

    def __init__(
        self,
        replica: ReplicaId,
        machine: MachineId,
        engine: Engine,
        lease: Lease,
        *,
        rules: EpisodeRules,
        evaluation_rules: EpisodeRules,
        report_interval_s: float,
        turns: Turns | None = None,
        move_kv: bool = False,
    ) -> None:
        """move_kv: trajectories that are released leave their KV cache for a replica of the same machine."""
        self._replica = replica
        self._machine = machine
        self._engine = engine
        self._lease = lease
        self._rules = rules
        self._evaluation_rules = evaluation_rules
        self._report_interval_s = report_interval_s
        self._turns = turns
        self._shelf = KvShelf(machine) if move_kv else None
        self._version: int | None = None
        self._episodes: dict[int, Episode] = {}
        self._kv: dict[int, memoryview | None] = {}
        """Caches that trajectories brought along, while they are taken in."""
        self._observing: dict[int, asyncio.Task[None]] = {}
        self._ended: list[Episode] = []
        self._outbox: list[WorkerReport] = []
        self._urgent = asyncio.Event()
        self._reported_at_s = 0.0
        self._last_words_said = False
        self._decoding: asyncio.Task[None] | None = None
        self._delivered = asyncio.Event()
        """Set whenever the engine's deltas, or its end, have been taken in."""
        self._paused = False
        """While weights load under trajectories: none is submitted."""

    def start(self) -> ReplicaStarted:
        self._decoding = asyncio.get_running_loop().create_task(self._decode())
        stats = self._engine.stats()
        return ReplicaStarted(self._replica, self._machine, stats.kv_capacity_tokens, self._engine.decode_cost())

    def generate(self, tasks: Sequence[Task], *, evaluation: bool) -> None:
        """Take trajectories, fresh or resumed, at the version that is loaded."""
        assert self._version is not None, "trajectories came before weights"
        rules = self._evaluation_rules if evaluation else self._rules
        for task in tasks:
            episode = Episode(task, rules, self._version)
            self._episodes[task.trajectory] = episode
            if episode.asked_before and self._turns is not None and not self._turns.environment.repeatable:
                name = type(self._turns.environment).__name__
                episode.fail(f"environment: its replica was lost while {name}, which is not repeatable, was asked")
            if self._shelf is not None and task.kv is not None:
                self._kv[task.trajectory] = self._shelf.take(task.kv, self._version)
            self._go_on(episode)
        # Of those that wait for their environment there is nothing to go on with at once.
        self._kv.clear()

    async def release(self, command: CommandId, trajectories: Sequence[TrajectoryId]) -> None:
        """Stop these; their last tokens, and where they stopped, leave in a Released.

        One whose environment has been asked, and must not be asked twice, stays.
        """
        held = [self._episodes[id] for id in trajectories if id in self._episodes]
        if self._turns is not None and not self._turns.environment.repeatable:
            held = [e for e in held if e.state is not EpisodeState.TURN_ENDED]
        for episode in held:
            observing = self._observing.pop(episode.trajectory, None)
            if observing is not None and not observing.cancel():
                observing.result()
        kv = self._leave_kv([e.trajectory for e in held if e.state is EpisodeState.DECODING])
        # KV that is kept for one that waits is given up too.
        for delta in await self._engine.abort([e.trajectory for e in held]):
            self._take(delta)
        self._outbox.append(self._report())
        # One that is decoding still has ended in a step whose deltas are on their way: it will be reported as finished.
        stopped = [e for e in held if e.state in (EpisodeState.INTERRUPTED, EpisodeState.TURN_ENDED)]
        for episode in stopped:
            del self._episodes[episode.trajectory]
        progress = tuple(_progress(e) for e in stopped)
        self._send(Released(command, self._replica, progress), kv)

    async def load(self, command: CommandId, version: int, *, interrupt: bool = False) -> None:
        """Take the version from the machine's relay; what went wrong leaves in a LoadFailed, by name.

        interrupt: trajectories stop where they are, which a report says before the outcome, and go on from their
        tokens afterwards: under the new version, or the old one if the relay could not give it. Without it, raises
        RuntimeError while a trajectory lives: also one that waits for its environment, of which the engine does not
        know, would be of two versions.
        """
        if interrupt:
            await self._interrupt()
        elif self._episodes:
            raise RuntimeError(
                f"version {version} cannot be loaded while {len(self._episodes)} trajectories of version "
                f"{self._version} live; release them first"
            )
        began_s = time.monotonic()
        try:
            lease = self._lease(version)
            leased = await asyncio.to_thread(lease.__enter__)
            with ExitStack() as stack:
                stack.push(lease)
                await asyncio.to_thread(_refuse_damage, leased)
                await self._engine.load(leased)
        except (VersionGone, RelayUnreachable, DamagedVersion) as error:
            self._go_on_with_all()
            self._send(LoadFailed(command, self._replica, version, str(error), serves_on=True))
        except WrongWeights as error:
            self._send(LoadFailed(command, self._replica, version, str(error), serves_on=False))
        else:
            self._version = version
            for episode in self._episodes.values():
                episode.change_version(version)
            self._go_on_with_all()
            self._send(Loaded(command, self._replica, version, time.monotonic() - began_s))

    async def _interrupt(self) -> None:
        """Stop all that decode, and report where. Control's deadline for the load bounds the wait."""
        self._paused = True
        decoding = [id for id, episode in self._episodes.items() if episode.state is EpisodeState.DECODING]
        for delta in await self._engine.abort(decoding):
            self._take(delta)
        assert self._decoding is not None, "start() comes first"
        # One that is decoding still has ended in a step whose deltas are on their way.
        while any(e.state is EpisodeState.DECODING for e in self._episodes.values()) and not self._decoding.done():
            self._delivered.clear()
            await self._delivered.wait()
        self._outbox.append(self._report())

    def _go_on_with_all(self) -> None:
        """Submit again what an interrupt stopped, from its tokens."""
        self._paused = False
        for episode in list(self._episodes.values()):
            if episode.state is EpisodeState.INTERRUPTED:
                self._submit(episode)

    async def reports(self) -> list[WorkerReport]:
        """What happened since the last call, in order; waits a report interval for it, or until something is urgent.

        Raises what ended the decoding (EngineDied, or an error of ours) or the talk with an environment; but not before
        a last call has returned what came until then: tokens that were decoded need not be decoded again.
        """
        wait_s = self._reported_at_s + self._report_interval_s - time.monotonic()
        if wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._urgent.wait()
        assert self._decoding is not None, "start() comes first"
        self._urgent.clear()
        for task in (self._decoding, *self._observing.values()):
            if task.done():
                if self._last_words_said:
                    task.result()
                self._last_words_said = True
                self._urgent.set()
        self._reported_at_s = time.monotonic()
        if self._shelf is not None:
            self._shelf.tidy()
        reports, self._outbox = [*self._outbox, self._report()], []
        return reports

    async def close(self) -> None:
        for task in (self._decoding, *self._observing.values()):
            if task is not None:
                task.cancel()
        if self._shelf is not None:
            self._shelf.close()
        await self._engine.close()

    async def _decode(self) -> None:
        try:
            while True:
                for delta in await self._engine.next():
                    self._take(delta)
                self._delivered.set()
        finally:
            self._delivered.set()
            self._urgent.set()

    def _take(self, delta: Delta) -> None:
        episode = self._episodes[delta.request]
        episode.take(delta)
        if episode.state is EpisodeState.FAILED:
            episode.fail(f"engine: {delta.cause}")
        if delta.stop_reason is not None:
            self._go_on(episode)

    def _go_on(self, episode: Episode) -> None:
        """Whatever comes next for it."""
        match episode.state:
            case EpisodeState.DECODING:
                self._submit(episode)
            case EpisodeState.TURN_ENDED:
                task = asyncio.get_running_loop().create_task(self._observe(episode))
                self._observing[episode.trajectory] = task
            case EpisodeState.FINISHED | EpisodeState.FAILED:
                del self._episodes[episode.trajectory]
                self._ended.append(episode)
                if not self._episodes:
                    self._urgent.set()
            case EpisodeState.INTERRUPTED:
                pass

    def _submit(self, episode: Episode) -> None:
        if self._paused:
            episode.interrupt()
            return
        try:
            kv = self._kv.pop(episode.trajectory, None)
            self._engine.submit([msgspec.structs.replace(episode.request(), kv=kv)])
        except ValueError as error:
            episode.fail(f"engine: {error}")
            self._go_on(episode)

    async def _observe(self, episode: Episode) -> None:
        """Ask the environment about the turn that ended, and go on with its answer."""
        assert self._turns is not None, f"trajectory {episode.trajectory} has turns and there is no environment"
        try:
            answer = await observe(
                self._turns.environment, episode.turn(self._turns.decode), timeout_s=self._turns.timeout_s
            )
            token_ids = await self._encode(answer, episode.num_observation_tokens_max) if answer is not None else None
            if answer is not None and token_ids is None:
                episode.truncate()
            else:
                episode.observe(token_ids)
        except (ObservationFailed, ValueError) as error:
            episode.fail(f"environment: {error}")
        del self._observing[episode.trajectory]
        self._go_on(episode)
        if episode.state is not EpisodeState.DECODING:
            await self._engine.abort([episode.trajectory])  # it has ended, and its KV may have been kept

    async def _encode(self, answer: Observation, num_tokens_max: int) -> Sequence[int] | None:
        """In a thread if it is long, since it may then have to be encoded more than once."""
        assert self._turns is not None, "there is an answer"
        if len(answer.text) <= LONG_OBSERVATION_CHARACTERS:
            return encode_observation(answer, self._turns.encode, num_tokens_max=num_tokens_max)
        return await asyncio.to_thread(encode_observation, answer, self._turns.encode, num_tokens_max=num_tokens_max)

    def _leave_kv(self, trajectories: Sequence[TrajectoryId]) -> tuple[KvParcel, ...]:
        if self._shelf is None or self._version is None:
            return ()
        return self._shelf.leave(self._engine, trajectories, self._version)

    def _send(self, event: Released | Loaded | LoadFailed, kv: tuple[KvParcel, ...] = ()) -> None:
        self._outbox.append(WorkerReport(event, (), kv))
        self._urgent.set()

    def _report(self) -> WorkerReport:
        """Everything that happened since the last one. Also a heartbeat, so it may say nothing new."""
        progress: list[Progress] = []
        tokens: list[TokenDelta] = []
        for episode in self._episodes.values():
            new_tokens = episode.take_unreported()
            tokens += new_tokens
            if new_tokens or episode.state is EpisodeState.TURN_ENDED:
                progress.append(_progress(episode))
        for episode in self._ended:
            tokens += episode.take_unreported()
        finished = [e for e in self._ended if e.state is EpisodeState.FINISHED]
        failed = [e for e in self._ended if e.state is EpisodeState.FAILED]
        self._ended = []
        stats = self._engine.stats()
        num_waiting_for_tool = sum(e.state is EpisodeState.TURN_ENDED for e in self._episodes.values())
        event = ReplicaReport(
            self._replica,
            stats.kv_utilization,
            stats.num_running,
            stats.num_waiting,
            stats.num_preemptions,
            tuple(progress),
            tuple(Finished(e.trajectory, e.attempt, e.num_tokens, e.truncated) for e in finished),
            tuple(Failed(e.trajectory, e.attempt, e.cause) for e in failed),
            max(0, num_waiting_for_tool - stats.num_kept),
        )
        return WorkerReport(event, tuple(tokens))


def _refuse_damage(leased: LeasedVersion) -> None:
    """Prove that the lent bytes are the published ones; a probe has a tolerance, a checksum has none."""
    found = version_checksum(leased.data, leased.manifest.chunk_bytes)
    if found != leased.checksum:
        raise DamagedVersion(
            f"version {leased.manifest.version} on this machine's relay has checksum {found:016x}, "
            f"{leased.checksum:016x} was published"
        )


def _progress(episode: Episode) -> Progress:
    waiting = episode.state is EpisodeState.TURN_ENDED
    return Progress(episode.trajectory, episode.attempt, episode.num_tokens, waiting)
