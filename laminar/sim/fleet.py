"""Pretends to be the replicas' side of the cluster: starts and stops them, and carries orders and reports.

Live replicas report ten times a second. Here a report comes when a batch has ended, else at a regular look, and only
from those that have something to tell; what a lost one would have told until then comes with its loss.
"""

from collections.abc import Callable, Iterable, Iterator

from laminar.config import Config
from laminar.control.messages import (
    AnyEvent,
    Assignment,
    Load,
    Loaded,
    LoadFailed,
    Release,
    ReplicaId,
    ReplicaReport,
    ReplicaStarted,
    StartReplica,
)
from laminar.control.schedules.schedule import build_schedule
from laminar.sim.clock import Clock
from laminar.sim.engine import SimulatedEngine, Usage
from laminar.sim.measures import Measures, Wait
from laminar.sim.relays import SimulatedRelays
from laminar.sim.replica import SimulatedReplica
from laminar.sim.shape import Shape
from laminar.sim.trainer import SimulatedTrainer
from laminar.sim.workload import Workload


class Fleet:
    def __init__(
        self,
        clock: Clock,
        config: Config,
        shape: Shape,
        workload: Workload,
        relays: SimulatedRelays,
        trainer: SimulatedTrainer,
        measures: Measures,
    ) -> None:
        self.replicas: dict[ReplicaId, SimulatedReplica] = {}
        self._clock = clock
        self._config = config
        self._shape = shape
        self._workload = workload
        self._relays = relays
        self._trainer = trainer
        self._measures = measures
        self._tells_kv = build_schedule(config).may_repack and config.repack.enabled
        self._usage_of_gone: list[Usage] = []
        self._next_look_s = 0.0

    def usage(self) -> list[Usage]:
        """Of every replica there ever was, up to now."""
        for replica in self.replicas.values():
            if not replica.is_silent(self._clock.now):
                replica.engine.advance(self._clock.now)
        return [*self._usage_of_gone, *(replica.engine.usage for replica in self.replicas.values())]

    # ----------------------------------------------------------------------------------------------------- orders

    def start(self, command: StartReplica, delay_s: float) -> None:
        def come_up() -> Iterable[AnyEvent]:
            shape, simulation = self._shape, self._config.simulation
            engine = SimulatedEngine(
                shape.cost,
                num_blocks=shape.num_kv_blocks,
                block_tokens=simulation.block_tokens,
                num_running_max=simulation.num_running_max,
                kv_utilization_max=self._config.repack.kv_utilization_max,
            )
            self.replicas[command.replica] = SimulatedReplica(
                command.replica, command.machine, engine, self._workload, simulation.prompt_tokens
            )
            capacity_tokens = shape.num_kv_blocks * simulation.block_tokens
            return (ReplicaStarted(command.replica, command.machine, capacity_tokens, shape.cost.linear()),)

        self._clock.at(self._clock.now + delay_s, come_up)

    def stop(self, id: ReplicaId) -> bool:
        """Whether there was one to stop; what it held goes with it."""
        replica = self.replicas.pop(id, None)
        if replica is not None:
            self._usage_of_gone.append(replica.engine.usage)
        return replica is not None

    def load(self, command: Load) -> None:
        self._on(command.replica, lambda replica: self._load(command, replica))

    def take(self, id: ReplicaId, assignments: tuple[Assignment, ...], version: int) -> None:
        def submit(replica: SimulatedReplica) -> None:
            assert replica.version == version, f"work of version {version} for {id}, which holds {replica.version}"
            replica.take(assignments, self._clock.now)
            self._arm(replica)

        self._on(id, submit)

    def release(self, command: Release) -> None:
        """They leave between two steps, so the answer comes when the step under way has ended."""

        def let_go(replica: SimulatedReplica) -> None:
            released = replica.release(command.id, command.trajectories, self._clock.now)
            self._arm(replica)
            at_s = max(self._clock.now, replica.engine.now_s)
            replica.emptied_at_s = at_s
            self._clock.at(at_s, lambda: (released,) if self._is_there(replica) else ())

        self._on(command.replica, let_go)

    def _on(self, id: ReplicaId, do: Callable[[SimulatedReplica], None]) -> None:
        """On a replica that is there; one that stands still does it when it goes on."""
        replica = self.replicas.get(id)
        if replica is None:
            return
        if not replica.is_silent(self._clock.now):
            do(replica)
            return

        def try_again() -> Iterable[AnyEvent]:
            self._on(id, do)
            return ()

        if replica.silent_until_s < float("inf"):
            self._clock.at(replica.silent_until_s, try_again)

    def _load(self, command: Load, replica: SimulatedReplica) -> None:
        now, load_s = self._clock.now, self._shape.load_s
        # A load that the version's arrival set off was waited for, from the publish on; any other was not.
        waited_for = self._relays.came_now(replica.machine, command.version)
        since_s = max(replica.emptied_at_s, self._trainer.published_at_s) if waited_for else now
        begins_s = now
        if command.interrupt:
            begins_s = replica.engine.interrupt(now)
            self._arm(replica)
            self._clock.at(begins_s, lambda: self._tell_now(replica))
            replica.engine.pause(load_s)
        else:
            assert replica.engine.empty, f"{command} reached a replica that decodes"
        self._clock.at(begins_s + load_s, lambda: self._end_load(command, replica, since_s))

    def _end_load(self, command: Load, replica: SimulatedReplica, since_s: float) -> Iterator[AnyEvent]:
        if not self._is_there(replica):
            return
        if self._relays.has(replica.machine, command.version):
            replica.version = command.version
            self._measures.waits.append(Wait(self._clock.now, self._clock.now - since_s))
            yield Loaded(command.id, replica.id, command.version, self._shape.load_s)
        else:
            yield LoadFailed(command.id, replica.id, command.version, "version_gone: not on the relay", True)

    def _is_there(self, replica: SimulatedReplica) -> bool:
        return self.replicas.get(replica.id) is replica and not replica.is_silent(self._clock.now)

    # ---------------------------------------------------------------------------------------------------- reports

    def look(self, next_look_s: float) -> Iterator[AnyEvent]:
        """At every replica: the news of those that have any. The next look is at next_look_s."""
        self._next_look_s = next_look_s
        for replica in list(self.replicas.values()):
            if not self._is_there(replica):
                continue
            replica.engine.advance(self._clock.now)
            if self._has_news(replica):
                yield self._report(replica)
            self._arm(replica)

    def last_words(self, replica: SimulatedReplica) -> ReplicaReport:
        """What it has told by now, if it reports as often as live ones do."""
        replica.engine.advance(self._clock.now)
        return self._report(replica, with_progress=True)

    def rouse(self, replica: SimulatedReplica) -> None:
        """It goes on after a pause, if it ever does; what it missed to tell comes then."""
        if replica.silent_until_s < float("inf"):
            self._clock.at(replica.silent_until_s, lambda: self._tell_now(replica))

    def _tell_now(self, replica: SimulatedReplica) -> Iterator[AnyEvent]:
        if self._is_there(replica):
            replica.engine.advance(self._clock.now)
            yield self._report(replica, with_progress=True)
            self._arm(replica)

    def _has_news(self, replica: SimulatedReplica) -> bool:
        """Its KV utilization, where tails are looked for; a prompt group's worth of responses; or its turn has come."""
        engine = replica.engine
        if self._tells_kv and not engine.empty:
            return True
        enough = len(engine.finished) >= self._config.batch.group_size or (engine.empty and bool(engine.finished))
        return enough or replica.is_due(self._clock.now, self._config.simulation.heartbeat_interval_s)

    def _report(self, replica: SimulatedReplica, *, with_progress: bool = False) -> ReplicaReport:
        for sequence in replica.engine.finished:
            self._measures.finished(sequence)
        if replica.engine.empty:
            replica.emptied_at_s = self._clock.now
        return replica.report(self._clock.now, with_progress=with_progress)

    def _arm(self, replica: SimulatedReplica) -> None:
        """Come back when its batch may have ended before the next look."""
        replica.wake += 1
        engine, number = replica.engine, replica.wake
        if engine.empty and engine.finished:
            self._clock.at(engine.now_s, lambda: self._wake(replica, number))
        elif not engine.empty and engine.ends_not_before_s() < self._next_look_s:
            self._clock.at(engine.next_moment_s(), lambda: self._wake(replica, number))

    def _wake(self, replica: SimulatedReplica, number: int) -> Iterator[AnyEvent]:
        if replica.wake != number or not self._is_there(replica):
            return
        replica.engine.advance(self._clock.now)
        if replica.engine.empty:
            yield self._report(replica)
        else:
            self._arm(replica)
