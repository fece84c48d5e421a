"""A small seeded world that answers the control plane's commands with events, on a virtual clock.

Replicas advance at every report: each running trajectory gains `tokens_per_report` tokens; admission is by a KV budget.
Kills, hangs, late and repeated messages can be scripted. Not the simulator: just enough world to test decisions.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import assert_never

import msgspec

from laminar.config import (
    BatchConfig,
    BufferConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    FaultsConfig,
    ModelConfig,
    RepackConfig,
    RolloutConfig,
    ScheduleConfig,
    TrainerConfig,
    TrajectoryLevelSchedule,
)
from laminar.control import messages as m
from laminar.control.placement import spread
from laminar.control.plane import ControlPlane
from laminar.control.state import ClusterState

COST = m.DecodeCost(floor_s=0.01, per_kv_token_s=1e-6, per_running_s=1e-4)


def make_config(
    *,
    schedule: ScheduleConfig | None = None,
    num_steps: int | None = 6,
    num_replicas: int = 4,
    num_machines: int = 2,
    num_epochs: int = 1,
    interval_steps: int | None = 2,
    filter_equal_rewards: bool = False,
    repack: bool = True,
    num_replacements_max: int = 16,
) -> Config:
    return Config(
        model=ModelConfig(path=Path("model")),
        data=DataConfig(
            train_files=(Path("train.parquet"),),
            val_files=(Path("val.parquet"),),
            response_tokens_max=400,
            num_epochs=num_epochs,
        ),
        batch=BatchConfig(num_prompts_per_step=8, group_size=4, num_mini_batches=4),
        schedule=schedule or TrajectoryLevelSchedule(),
        rollout=RolloutConfig(num_replicas=num_replicas, num_groups_per_replica_max=4, report_interval_s=0.1),
        repack=RepackConfig(enabled=repack, check_interval_s=0.3, decode_batch_max=12),
        trainer=TrainerConfig(num_steps=num_steps),
        buffer=BufferConfig(capacity_steps=2, filter_equal_rewards=filter_equal_rewards),
        checkpoint=CheckpointConfig(interval_steps=2),
        evaluation=EvaluationConfig(interval_steps=interval_steps, num_prompts_max=12),
        cluster=ClusterConfig(num_machines=num_machines),
        faults=FaultsConfig(report_deadline_s=2.0, num_replacements_max=num_replacements_max),
    )


class Running(msgspec.Struct):
    """A trajectory on a replica. versions: of each of its tokens so far, those from earlier replicas included."""

    assignment: m.Assignment
    versions: list[int]
    length: int

    @property
    def num_tokens(self) -> int:
        return len(self.versions)


class FakeReplica(msgspec.Struct):
    id: m.ReplicaId
    machine: m.MachineId
    version: int | None = None
    running: dict[int, Running] = {}
    waiting: dict[int, Running] = {}
    hung: bool = False
    loading: bool = False
    sent_until_s: float = 0.0
    """When its last event arrives: they arrive in the order in which they were sent."""


class FakeWorld:
    def __init__(self, config: Config, seed: int, *, num_prompts: int = 400, step: int = 0) -> None:
        self.config = config
        self.now = 0.0
        self.random = random.Random(seed)
        self.num_prompts = num_prompts
        self.replicas: dict[int, FakeReplica] = {}
        self.relays: dict[int, list[int]] = {}
        self.commands: list[tuple[float, m.AnyCommand]] = []
        self.outcome: m.EndRun | None = None
        self.kv_capacity_tokens = 1600
        self.tokens_per_report = 20
        self.train_s = 0.25
        self.hand_over_s = 0.02
        self.trainer_start_s = 1.0
        self.stuck_relays: list[int] = []
        """Machines whose relay reports and never completes a version."""
        self.score: Callable[[int], float] = lambda trajectory: float(trajectory % 3 == 0)
        self.repeat_share = 0.0
        self.late_share = 0.0
        self.fail_share = 0.0
        self._heap: list[tuple[float, int, Callable[[], Iterator[m.AnyEvent]]]] = []
        self._order = 0
        self.versions: dict[int, list[int]] = {}
        """Of each trajectory's reported tokens, the version that each was sampled from."""
        self._lengths: dict[int, int] = {}
        self.write_s = 0.6
        """From the copy of a checkpoint to its being complete on disk."""
        self._attempt = 0
        self._saved_step = step
        machines = tuple(m.MachineId(i) for i in range(config.cluster.num_machines))
        self.send(0.0, m.RunStarted(spread(config.rollout.num_replicas, dict.fromkeys(machines))))
        for machine in machines:
            self._start_relay(machine, 0.1)
        self.send(0.5, m.TrainerStarted(step))
        self._at(0.1, self._tick)

    # ---------------------------------------------------------------------------------------------- driving it

    def run(self, control: ControlPlane, execute: Callable[[m.AnyCommand], None] | None = None) -> None:
        """Until the run ends, its invariants checked after every event. execute: a test's own, in place of ours."""
        for now, event in self.events():
            for command in control.handle(event, now):
                (execute or self.execute)(command)
            control.state.check()

    def events(self, limit_s: float = 2000.0) -> Iterator[tuple[float, m.AnyEvent]]:
        while self.outcome is None:
            self.now, _, produce = heapq.heappop(self._heap)
            assert self.now < limit_s, f"the run did not end within {limit_s} virtual seconds"
            for event in produce():
                if self.outcome is None:
                    yield self.now, event

    def send(self, delay_s: float, event: m.AnyEvent) -> None:
        self._at(delay_s, lambda: iter((event,)))
        if not isinstance(event, m.RunStarted | m.TrainerStarted) and self.random.random() < self.repeat_share:
            self._at(delay_s + self.random.uniform(0, 1), lambda: iter((event,)))

    def kill(self, id: int, at_s: float) -> None:
        """The process dies; its death is seen soon after."""

        def die() -> Iterator[m.AnyEvent]:
            if self.replicas.pop(id, None) is not None:
                self.send(0.05, m.ReplicaLost(m.ReplicaId(id), "killed"))
            return iter(())

        self._at(at_s - self.now, die)

    def hang(self, id: int, at_s: float) -> None:
        """The process goes silent; nobody tells."""

        def stop() -> Iterator[m.AnyEvent]:
            if id in self.replicas:
                self.replicas[id].hung = True
            return iter(())

        self._at(at_s - self.now, stop)

    def kill_relay(self, machine: int, at_s: float) -> None:
        def die() -> Iterator[m.AnyEvent]:
            self.relays.pop(machine, None)
            self.send(0.01, m.RelayLost(m.MachineId(machine), "killed"))
            return iter(())

        self._at(at_s - self.now, die)

    def kill_trainer(self, at_s: float) -> None:
        """One of its ranks dies: what it was doing is never heard of again."""

        def die() -> Iterator[m.AnyEvent]:
            attempt, self._attempt = self._attempt, -1
            if attempt >= 0:
                self.send(0.05, m.TrainerLost("rank 1: killed", attempt))
            return iter(())

        self._at(at_s - self.now, die)

    # ------------------------------------------------------------------------------------------------ commands

    def execute(self, command: m.AnyCommand) -> None:
        self.commands.append((self.now, command))
        match command:
            case m.StartReplica():
                replica = FakeReplica(command.replica, command.machine)
                self.replicas[command.replica] = replica
                started = m.ReplicaStarted(command.replica, command.machine, self.kv_capacity_tokens, COST)
                self.send(self.random.uniform(0.2, 1.0), started)
                self._at(1.1, lambda: self._report(replica))
            case m.StopReplica():
                self.replicas.pop(command.replica, None)
            case m.StartRelay():
                self.stuck_relays = [machine for machine in self.stuck_relays if machine != command.machine]
                self._start_relay(command.machine, 0.5)
            case m.Load():
                self._begin_load(command)
            case m.Generate() | m.Resume():
                self._take(command)
            case m.Release():
                self._at(0.02, lambda: self._release(command))
            case m.ScoreTrajectories():
                scores = tuple(m.Score(a.trajectory, a.attempt, self.score(a.trajectory)) for a in command.trajectories)
                self.send(self.random.uniform(0.01, 0.2), m.Scored(command.id, scores))
            case m.TrainMiniBatch():
                self._trainer_sends(self.train_s, m.MiniBatchTrained(command.id, command.step, command.index))
            case m.Publish():
                self._trainer_sends(self.hand_over_s, m.HandedOver(command.id, command.version, 0.01))
                for i, machine in enumerate(list(self.relays)):
                    self._at(0.05 * (i + 1), lambda machine=machine: self._arrive(machine, command.version))
            case m.SaveCheckpoint():
                self._trainer_sends(0.05, m.CheckpointCopied(command.id, command.step))
                self._write_checkpoint(command)
            case m.StartTrainer():
                self._attempt = command.attempt
                self._trainer_sends(self.trainer_start_s, m.TrainerStarted(self._saved_step, command.attempt))
            case m.Fetch():
                self._at(0.1, lambda: self._fetch(command))
            case m.SetChain() | m.RetainVersions() | m.Forget():
                pass
            case m.EndRun():
                self.outcome = command
            case _:
                assert_never(command)

    def _take(self, command: m.Generate | m.Resume) -> None:
        replica = self.replicas.get(command.replica)
        if replica is None:
            return
        assert replica.version == command.version, f"{command} reached a replica at version {replica.version}"
        for a in command.trajectories:
            assert a.trajectory not in replica.running and a.trajectory not in replica.waiting
            versions = self.versions.get(a.trajectory, [])[: a.num_tokens]
            assert len(versions) == a.num_tokens, f"{a} goes on from tokens that were never reported"
            replica.waiting[a.trajectory] = Running(a, versions, self._length(a.trajectory))

    def _begin_load(self, command: m.Load) -> None:
        """Stop decoding, and say where; what had to be prefilled again waits for a place in the KV cache."""
        replica = self.replicas.get(command.replica)
        if replica is None or replica.hung:
            return
        assert command.interrupt or not (replica.running or replica.waiting), f"{command} reached one that decodes"
        replica.loading = True
        if command.interrupt:
            self._send_report(replica)
        replica.waiting = replica.running | replica.waiting
        replica.running = {}
        self._at(0.05, lambda: self._end_load(command, replica))

    def _end_load(self, command: m.Load, replica: FakeReplica) -> Iterator[m.AnyEvent]:
        if self.replicas.get(replica.id) is not replica or replica.hung:
            return iter(())
        replica.loading = False
        if command.version in self.relays.get(replica.machine, []):
            replica.version = command.version
            self._send_from(replica, m.Loaded(command.id, command.replica, command.version, 0.05))
        else:
            gone = "version_gone: not on the relay"
            self._send_from(replica, m.LoadFailed(command.id, command.replica, command.version, gone, serves_on=True))
        return iter(())

    def _release(self, command: m.Release) -> Iterator[m.AnyEvent]:
        replica = self.replicas.get(command.replica)
        if replica is None or replica.hung:
            return iter(())
        progress = []
        for id in command.trajectories:
            held = replica.running.get(id) or replica.waiting.get(id)
            # Now and then one is in its last step: it stays, and the next report says that it has finished.
            if held is not None and self.random.random() < 0.9:
                replica.running.pop(id, None)
                replica.waiting.pop(id, None)
                progress.append(m.Progress(m.TrajectoryId(id), held.assignment.attempt, held.num_tokens))
                self.versions[id] = held.versions
        self._send_from(replica, m.Released(command.id, command.replica, tuple(progress)))
        return iter(())

    def _trainer_sends(self, delay_s: float, event: m.AnyEvent) -> None:
        attempt = self._attempt
        delays_s = [delay_s]
        if self.random.random() < self.repeat_share:
            delays_s.append(delay_s + self.random.uniform(0, 1))
        for delay_s in delays_s:
            self._at(delay_s, lambda: iter((event,) if attempt == self._attempt else ()))

    def _write_checkpoint(self, command: m.SaveCheckpoint) -> None:
        attempt = self._attempt

        def complete() -> Iterator[m.AnyEvent]:
            if attempt == self._attempt:
                self._saved_step = command.step
            return iter(())

        self._at(self.write_s, complete)
        # A trainer may die in between: then the checkpoint is there and nobody has heard of it.
        self._trainer_sends(self.write_s + 0.1, m.CheckpointSaved(command.id, command.step))

    # ---------------------------------------------------------------------------------------------- background

    def _report(self, replica: FakeReplica) -> Iterator[m.AnyEvent]:
        if self.replicas.get(replica.id) is not replica or replica.hung:
            return iter(())
        self._at(self.config.rollout.report_interval_s, lambda: self._report(replica))
        if not replica.loading:
            self._admit(replica)
            for held in replica.running.values():
                assert replica.version is not None
                num_new = min(self.tokens_per_report, held.length - held.num_tokens)
                held.versions = held.versions + [replica.version] * num_new
        self._send_report(replica)
        return iter(())

    def _admit(self, replica: FakeReplica) -> None:
        used = sum(60 + r.num_tokens for r in replica.running.values())
        while replica.waiting:
            id, next_one = next(iter(replica.waiting.items()))
            if replica.running and used + 100 + next_one.num_tokens > self.kv_capacity_tokens:
                break
            used += 60 + next_one.num_tokens
            replica.running[id] = replica.waiting.pop(id)

    def _send_report(self, replica: FakeReplica) -> None:
        progress, finished, failed = [], [], []
        for id, held in list(replica.running.items()):
            a = held.assignment
            self.versions[id] = held.versions
            if self.random.random() < self.fail_share:
                failed.append(m.Failed(a.trajectory, a.attempt, "environment: scripted"))
                del replica.running[id]
            elif held.num_tokens == held.length:
                finished.append(m.Finished(a.trajectory, a.attempt, held.length, held.length == 400))
                del replica.running[id]
            else:
                progress.append(m.Progress(a.trajectory, a.attempt, held.num_tokens))
        used = sum(60 + r.num_tokens for r in replica.running.values())
        report = m.ReplicaReport(
            replica.id,
            min(1.0, used / self.kv_capacity_tokens),
            len(replica.running),
            len(replica.waiting),
            0,
            tuple(progress),
            tuple(finished),
            tuple(failed),
        )
        self._send_from(replica, report)

    def _send_from(self, replica: FakeReplica, event: m.AnyEvent) -> None:
        """Now and then it takes a while; what is sent later arrives later, as in a worker's one stream."""
        late_s = self.random.uniform(0, 0.05) if self.random.random() < self.late_share else 0.0
        replica.sent_until_s = max(self.now + late_s, replica.sent_until_s)
        self.send(replica.sent_until_s - self.now, event)

    def _length(self, trajectory: int) -> int:
        if trajectory not in self._lengths:
            self._lengths[trajectory] = max(5, min(400, int(50 * self.random.lognormvariate(0.0, 1.0))))
        return self._lengths[trajectory]

    def _start_relay(self, machine: m.MachineId, delay_s: float) -> None:
        def come_up() -> Iterator[m.AnyEvent]:
            self.relays[machine] = []
            self._at(0.1, lambda: self._relay_report(machine))
            yield m.RelayStarted(machine)
            newest = max((v for held in self.relays.values() for v in held), default=None)
            if newest is not None:
                self._at(0.1, lambda: self._arrive(machine, newest))

        self._at(delay_s, come_up)

    def _arrive(self, machine: m.MachineId, version: int) -> Iterator[m.AnyEvent]:
        if machine in self.relays and version not in self.relays[machine] and machine not in self.stuck_relays:
            self.relays[machine].append(version)
            yield m.VersionComplete(machine, version)
            if len(self.relays[machine]) > self.config.relay.num_versions_kept:
                yield m.VersionEvicted(machine, self.relays[machine].pop(0))

    def _fetch(self, command: m.Fetch) -> Iterator[m.AnyEvent]:
        if command.version in self.relays.get(command.source, []):
            yield from self._arrive(command.machine, command.version)
        else:
            yield m.CommandFailed(command.id, f"machine {command.source} has not got version {command.version}")

    def _relay_report(self, machine: m.MachineId) -> Iterator[m.AnyEvent]:
        if machine in self.relays:
            self._at(0.2, lambda: self._relay_report(machine))
            yield m.RelayReport(machine, None, 0)

    def _tick(self) -> Iterator[m.AnyEvent]:
        self._at(0.1, self._tick)
        yield m.Tick()

    def _at(self, delay_s: float, produce: Callable[[], Iterator[m.AnyEvent]]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + max(0.0, delay_s), self._order, produce))


def make_plane(config: Config, *, num_prompts: int = 400, state: ClusterState | None = None) -> ControlPlane:
    return ControlPlane(config, num_prompts=num_prompts, num_evaluation_prompts=12, state=state)
