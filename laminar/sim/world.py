"""Pretends to be the cluster: answers control's commands with events, on a virtual clock.

execute(command) ──► what it sets off, at its time ──► events() ──► control ──► execute …
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import assert_never

from laminar.config import Config
from laminar.control import messages as m
from laminar.control.placement import spread
from laminar.sim.clock import Clock
from laminar.sim.faults import AnyFault, IdealWire, Wire
from laminar.sim.fleet import Fleet
from laminar.sim.measures import Measures, StepEnd, total
from laminar.sim.relays import SimulatedRelays
from laminar.sim.shape import Shape
from laminar.sim.strikes import strike
from laminar.sim.trainer import SimulatedTrainer
from laminar.sim.workload import Workload


class World:
    """config: control's own, as `control_config` makes it. The same arguments give the same events, to the last bit."""

    def __init__(
        self,
        config: Config,
        shape: Shape,
        workload: Workload,
        *,
        faults: Sequence[AnyFault] = (),
        wire: Wire | None = None,
        step_done: Callable[[int], None] | None = None,
    ) -> None:
        self.clock = Clock()
        self.measures = Measures()
        self.relays = SimulatedRelays(self.clock, shape, num_versions_kept=config.relay.num_versions_kept)
        self.trainer = SimulatedTrainer(
            self.clock, shape, workload, self.relays, prompt_tokens=config.simulation.prompt_tokens
        )
        self.fleet = Fleet(self.clock, config, shape, workload, self.relays, self.trainer, self.measures)
        self.control_stalled_until_s = 0.0
        self._config = config
        self._workload = workload
        self._wire = wire or IdealWire()
        self._step_done = step_done
        self._ended = False
        self._begin(tuple(m.MachineId(i) for i in range(shape.num_machines)))
        for fault in faults:
            self.clock.at(fault.at_s, lambda fault=fault: strike(self, fault))

    def events(self) -> Iterator[tuple[float, m.AnyEvent]]:
        """Until control ends the run, or the trainer has handed over the last step that is to be simulated."""
        clock, num_steps = self.clock, self._config.simulation.num_steps
        while True:
            happen, has_arrived = clock.next()
            for event in happen():
                if has_arrived or self._arrives_now(event):
                    yield clock.now, event
                if self._ended:
                    return
            if self.trainer.step >= num_steps:
                return

    def execute(self, command: m.AnyCommand) -> None:
        """Set off what is ordered; a process that is gone or hangs does nothing."""
        simulation = self._config.simulation
        match command:
            case m.StartReplica():
                self.fleet.start(command, simulation.replica_start_s if self.clock.now > 0 else 0.0)
            case m.StopReplica():
                self.fleet.stop(command.replica)
            case m.StartRelay():
                self.relays.start(command.machine, simulation.replica_start_s)
            case m.StartTrainer():
                self.trainer.start(command, simulation.trainer_start_s)
                del self.measures.steps[self.trainer.step :]
            case m.Load():
                self.fleet.load(command)
            case m.Generate():
                for assignment in command.trajectories:
                    self.measures.dispatched(assignment.trajectory, self.clock.now)
                self.fleet.take(command.replica, command.trajectories, command.version)
            case m.Resume():
                self.fleet.take(command.replica, command.trajectories, command.version)
            case m.Release():
                self.fleet.release(command)
            case m.ScoreTrajectories():
                self.clock.tell(simulation.reward_s, self._scored(command))
            case m.TrainMiniBatch():
                self.trainer.train(command)
            case m.Publish():
                self._end_step(command)
                self.trainer.publish(command)
            case m.SaveCheckpoint():
                self.trainer.save(command)
            case m.SetChain():
                self.relays.set_chain(command.machines)
            case m.Fetch():
                self.relays.fetch(command)
            case m.RetainVersions():
                self.relays.retain(command.versions)
            case m.Forget():
                pass
            case m.EndRun():
                self._ended = True
            case _:
                assert_never(command)

    def _scored(self, command: m.ScoreTrajectories) -> m.Scored:
        scores = [
            m.Score(a.trajectory, a.attempt, self._workload.response(a.trajectory).score) for a in command.trajectories
        ]
        return m.Scored(command.id, tuple(scores))

    def _begin(self, machines: tuple[m.MachineId, ...]) -> None:
        simulation = self._config.simulation
        nums_replicas = spread(self._config.rollout.num_replicas, dict.fromkeys(machines))
        self.clock.at(0.0, lambda: (m.RunStarted(nums_replicas), m.TrainerStarted(0)))
        for machine in machines:
            self.relays.start(machine, 0.0)
        # A rounding error must not put control's look for tails off to the next tick.
        interval_s = simulation.report_interval_s * (1 + 1e-6)

        def look() -> Iterator[m.AnyEvent]:
            next_s = self.clock.now + interval_s
            self.clock.at(next_s, look)
            self.measures.decoded.append((self.clock.now, total(self.fleet.usage()).num_tokens))
            yield from self.fleet.look(next_s)
            yield m.Tick()

        def hear_relays() -> Iterable[m.AnyEvent]:
            self.clock.at(self.clock.now + simulation.heartbeat_interval_s, hear_relays)
            return self.relays.reports()

        self.clock.at(interval_s, look)
        self.clock.at(simulation.heartbeat_interval_s, hear_relays)

    def _arrives_now(self, event: m.AnyEvent) -> bool:
        """Whether it does; what arrives later, or once more, is put into the clock."""
        arrives_now = False
        for wire_s in self._wire.arrivals(event, self.clock.now):
            at_s = max(wire_s, self.control_stalled_until_s)
            if at_s > self.clock.now or arrives_now:
                self.clock.at(at_s, lambda: (event,), has_arrived=True)
            else:
                arrives_now = True
        return arrives_now

    def _end_step(self, command: m.Publish) -> None:
        if command.step > self.trainer.step:
            usage = total(self.fleet.usage())
            self.measures.steps.append(
                StepEnd(self.clock.now, self.trainer.tokens_of_step, usage, self.trainer.training_s)
            )
            if self._step_done is not None:
                self._step_done(command.step)
