"""Imitates a cluster of 256 replicas under load on a virtual clock: enough of it to keep the control plane busy.

Every running trajectory gains tokens at each report and ends at a length that was drawn for it; scores, mini-batches,
hand-overs, arrivals and loads take the times below. Nothing is modelled that control does not see. One machine is lost
in the middle. What is asked of it comes back as events, at the rate at which real workers and relays report.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from typing import assert_never

import msgspec

from laminar.config import Config
from laminar.control import costs
from laminar.control import messages as m
from laminar.control.placement import spread

TOKENS_PER_REPORT = 20
RESPONSE_TOKENS_MEDIAN, RESPONSE_TOKENS_SIGMA = 800, 0.5
PROMPT_TOKENS = 200
KV_CAPACITY_TOKENS = 100_000
"""A batch does not fit at once, so that some of it waits, and utilization falls when no more does."""
DECODE_COST = costs.PROFILES["h800-qwen2.5-32b-tp4"].decode
SCORE_S = (0.05, 0.5)
MINI_BATCH_S = 0.3
HAND_OVER_S = 0.3
HOP_S = 0.01
"""From one relay to the next: version complete here, version complete there."""
LOAD_S = 1.0
RELAY_REPORT_S = 0.1
TICK_S = 0.1
START_S = 2.0
LOST_AT_S = 20.0
LOST_MACHINE = m.MachineId(5)


class Running(msgspec.Struct):
    attempt: int
    num_tokens: int
    length: int


class BusyReplica(msgspec.Struct):
    id: m.ReplicaId
    machine: m.MachineId
    running: dict[m.TrajectoryId, Running] = {}
    waiting: dict[m.TrajectoryId, Running] = {}
    loading: bool = False


class BusyCluster:
    """`events` gives what happens, in order of time; `execute` takes the commands that control answered with."""

    def __init__(self, config: Config, seed: int) -> None:
        self.now = 0.0
        self._config = config
        self._random = random.Random(seed)
        self._replicas: dict[m.ReplicaId, BusyReplica] = {}
        self._lengths: dict[m.TrajectoryId, int] = {}
        self._complete: dict[m.MachineId, list[int]] = {}
        self._chain: tuple[m.MachineId, ...] = ()
        self._heap: list[tuple[float, int, Callable[[], Iterator[m.AnyEvent]]]] = []
        self._order = 0
        machines = tuple(m.MachineId(i) for i in range(config.cluster.num_machines))
        self._send(0.0, m.RunStarted(spread(config.rollout.num_replicas, dict.fromkeys(machines))))
        for machine in machines:
            self._start_relay(machine)
        self._send(START_S, m.TrainerStarted(0))
        self._at(TICK_S, self._tick)
        self._at(LOST_AT_S, self._lose_machine)

    def events(self) -> Iterator[tuple[float, m.AnyEvent]]:
        while True:
            self.now, _, produce = heapq.heappop(self._heap)
            for event in produce():
                yield self.now, event

    def execute(self, command: m.AnyCommand) -> None:
        match command:
            case m.StartReplica():
                self._start_replica(command)
            case m.StopReplica():
                self._replicas.pop(command.replica, None)
            case m.StartRelay():
                self._start_relay(command.machine)
            case m.Load():
                self._load(command)
            case m.Generate() | m.Resume():
                self._take(command)
            case m.Release():
                self._at(0.02, lambda: self._release(command))
            case m.ScoreTrajectories():
                scores = tuple(m.Score(a.trajectory, a.attempt, a.trajectory % 2) for a in command.trajectories)
                self._send(self._random.uniform(*SCORE_S), m.Scored(command.id, scores))
            case m.TrainMiniBatch():
                self._send(MINI_BATCH_S, m.MiniBatchTrained(command.id, command.step, command.index))
            case m.Publish():
                self._publish(command)
            case m.SaveCheckpoint():
                self._send(0.1, m.CheckpointCopied(command.id, command.step))
                self._send(0.5, m.CheckpointSaved(command.id, command.step))
            case m.SetChain():
                self._chain = command.machines
            case m.Fetch():
                self._at(1.0, lambda: self._arrive(command.machine, command.version))
            case m.RetainVersions() | m.Forget():
                pass
            case m.StartTrainer() | m.EndRun():
                raise AssertionError(f"nothing makes control order this here: {command.cause}")
            case _:
                assert_never(command)

    # -------------------------------------------------------------------------------------------------- replicas

    def _start_replica(self, command: m.StartReplica) -> None:
        replica = BusyReplica(command.replica, command.machine)

        def come_up() -> Iterator[m.AnyEvent]:
            self._replicas[replica.id] = replica
            yield m.ReplicaStarted(replica.id, replica.machine, KV_CAPACITY_TOKENS, DECODE_COST)

        self._at(START_S, come_up)
        self._at(START_S + self._random.uniform(0, self._config.rollout.report_interval_s), lambda: self._go(replica))

    def _take(self, command: m.Generate | m.Resume) -> None:
        if replica := self._replicas.get(command.replica):
            for a in command.trajectories:
                if a.trajectory not in self._lengths:
                    drawn = RESPONSE_TOKENS_MEDIAN * self._random.lognormvariate(0.0, RESPONSE_TOKENS_SIGMA)
                    self._lengths[a.trajectory] = max(1, min(self._config.data.response_tokens_max, int(drawn)))
                replica.waiting[a.trajectory] = Running(a.attempt, a.num_tokens, self._lengths[a.trajectory])

    def _load(self, command: m.Load) -> None:
        if replica := self._replicas.get(command.replica):
            replica.loading = True
            self._at(LOAD_S, lambda: self._end_load(replica, command))

    def _end_load(self, replica: BusyReplica, command: m.Load) -> Iterator[m.AnyEvent]:
        replica.loading = False
        if command.version in self._complete.get(replica.machine, ()):
            yield m.Loaded(command.id, command.replica, command.version, LOAD_S)
        else:
            yield m.LoadFailed(command.id, command.replica, command.version, "version_gone", serves_on=True)

    def _release(self, command: m.Release) -> Iterator[m.AnyEvent]:
        if replica := self._replicas.get(command.replica):
            held = {id: replica.running.pop(id, None) or replica.waiting.pop(id, None) for id in command.trajectories}
            progress = tuple(m.Progress(id, one.attempt, one.num_tokens) for id, one in held.items() if one is not None)
            yield m.Released(command.id, command.replica, progress)

    def _go(self, replica: BusyReplica) -> Iterator[m.AnyEvent]:
        """One report interval: decode, and tell; then admit what waits, as far as the KV cache has room."""
        if self._replicas.get(replica.id) is not replica:
            return
        self._at(self._config.rollout.report_interval_s, lambda: self._go(replica))
        progress: list[m.Progress] = []
        finished: list[m.Finished] = []
        kv_tokens = 0
        for id, one in list(replica.running.items()) if not replica.loading else ():
            one.num_tokens = min(one.num_tokens + TOKENS_PER_REPORT, one.length)
            if one.num_tokens == one.length:
                del replica.running[id], self._lengths[id]
                finished.append(m.Finished(id, one.attempt, one.length, truncated=False))
            else:
                kv_tokens += PROMPT_TOKENS + one.num_tokens
                progress.append(m.Progress(id, one.attempt, one.num_tokens))
        kv_tokens += self._admit(replica, kv_tokens)
        yield m.ReplicaReport(
            replica.id,
            min(1.0, kv_tokens / KV_CAPACITY_TOKENS),
            len(replica.running),
            len(replica.waiting),
            0,
            tuple(progress),
            tuple(finished),
        )

    def _admit(self, replica: BusyReplica, kv_tokens: int) -> int:
        """KV tokens of those admitted."""
        num_admitted = 0
        for id, one in list(replica.waiting.items()):
            if kv_tokens + num_admitted > self._config.repack.kv_utilization_max * KV_CAPACITY_TOKENS:
                break
            replica.running[id] = replica.waiting.pop(id)
            num_admitted += PROMPT_TOKENS + one.num_tokens
        return num_admitted

    # ---------------------------------------------------------------------------------------------------- relays

    def _start_relay(self, machine: m.MachineId) -> None:
        def come_up() -> Iterator[m.AnyEvent]:
            self._complete[machine] = []
            self._at(self._random.uniform(0, RELAY_REPORT_S), lambda: self._report_relay(machine, 0))
            yield m.RelayStarted(machine)
            if newest := max((held[-1] for held in self._complete.values() if held), default=None):
                self._at(1.0, lambda: self._arrive(machine, newest))

        self._at(1.0, come_up)

    def _report_relay(self, machine: m.MachineId, num_reports: int) -> Iterator[m.AnyEvent]:
        if held := self._complete.get(machine):
            # It forwards all the time, which is the most that it may have to tell.
            yield m.RelayReport(machine, held[-1], num_reports, held[-1], num_reports)
        elif held is not None:
            yield m.RelayReport(machine, None, 0)
        if held is not None:
            self._at(RELAY_REPORT_S, lambda: self._report_relay(machine, num_reports + 1))

    def _publish(self, command: m.Publish) -> None:
        self._send(HAND_OVER_S, m.HandedOver(command.id, command.version, HAND_OVER_S))
        for hop, machine in enumerate(self._chain, start=1):
            self._at(HAND_OVER_S + hop * HOP_S, lambda machine=machine: self._arrive(machine, command.version))

    def _arrive(self, machine: m.MachineId, version: int) -> Iterator[m.AnyEvent]:
        held = self._complete.get(machine)
        if held is not None and version not in held:
            held.append(version)
            held.sort()
            yield m.VersionComplete(machine, version)
            if len(held) > self._config.relay.num_versions_kept:
                yield m.VersionEvicted(machine, held.pop(0))

    def _lose_machine(self) -> Iterator[m.AnyEvent]:
        self._complete.pop(LOST_MACHINE, None)
        lost = [r.id for r in self._replicas.values() if r.machine == LOST_MACHINE]
        for id in lost:
            del self._replicas[id]
        yield m.RelayLost(LOST_MACHINE, "killed")
        for id in lost:
            yield m.ReplicaLost(id, "killed")

    # ----------------------------------------------------------------------------------------------------- clock

    def _tick(self) -> Iterator[m.AnyEvent]:
        self._at(TICK_S, self._tick)
        yield m.Tick()

    def _send(self, delay_s: float, event: m.AnyEvent) -> None:
        self._at(delay_s, lambda: iter((event,)))

    def _at(self, delay_s: float, produce: Callable[[], Iterator[m.AnyEvent]]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, produce))
