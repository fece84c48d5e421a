"""The simulated run: the live run's loop, on a virtual clock."""

from collections.abc import Callable, Sequence

import msgspec

from laminar.config import Config, SynchronousSchedule
from laminar.control.messages import AnyCommand, AnyEvent, EndRun
from laminar.control.plane import ControlPlane
from laminar.control.state import ClusterState
from laminar.observe.history import History
from laminar.sim.calibration import Calibration, calibration
from laminar.sim.faults import AnyFault, Wire
from laminar.sim.measures import Measures
from laminar.sim.shape import Shape, resolve
from laminar.sim.workload import Workload
from laminar.sim.world import World

SILENCE_IN_HEARTBEATS = 2.5
"""Heartbeats that may fail to come before a replica is taken for lost."""


class Simulated(msgspec.Struct, frozen=True):
    """What a simulated run leaves. config: control's own; ended: why control ended it, if it did."""

    config: Config
    shape: Shape
    history: History
    state: ClusterState
    measures: Measures
    num_events: int
    ended: EndRun | None


def simulate(
    config: Config,
    *,
    faults: Sequence[AnyFault] = (),
    wire: Wire | None = None,
    fitted: Calibration | None = None,
    step_done: Callable[[int], None] | None = None,
    after_event: Callable[[float, AnyEvent, Sequence[AnyCommand], ClusterState], None] | None = None,
) -> Simulated:
    """Run a configuration against a world that exists on the virtual clock only. Raises ValueError for bad settings.

    fitted: other constants than those that come with Laminar. step_done, after_event: called after each.
    """
    shape = shape_of(config, fitted)
    own = control_config(config, shape)
    control = ControlPlane(own, num_prompts=_num_prompts(own), num_evaluation_prompts=own.evaluation.num_prompts_max)
    world, history = World(own, shape, Workload(own), faults=faults, wire=wire), History()
    num_events, ended, num_steps = 0, None, 0
    for now, event in world.events():
        commands = control.handle(event, now)
        for command in commands:
            world.execute(command)
        history.observe(now, event, commands, control.state)
        num_events += 1
        if after_event is not None:
            after_event(now, event, commands, control.state)
        if step_done is not None and control.state.trainer.step != num_steps:
            num_steps = control.state.trainer.step
            step_done(num_steps)
        if commands and isinstance(commands[-1], EndRun):
            ended = commands[-1]
    return Simulated(own, shape, history, control.state, world.measures, num_events, ended)


def shape_of(config: Config, fitted: Calibration | None = None) -> Shape:
    """The simulated cluster. Raises ValueError where settings do not fit together."""
    return resolve(config, fitted or calibration(), colocated=is_colocated(config))


def is_colocated(config: Config) -> bool:
    """Whether trainer and replicas share the GPUs: synchronous training never needs both at once."""
    return isinstance(config.schedule, SynchronousSchedule)


def control_config(config: Config, shape: Shape) -> Config:
    """The same configuration for as many replicas and machines as the shape has, and deadlines that the clock allows.

    It does not stop at the last step, since a run that ends runs empty before; the world stops there.
    """
    simulation, faults = config.simulation, config.faults
    silence_s = max(faults.report_deadline_s, SILENCE_IN_HEARTBEATS * simulation.heartbeat_interval_s)
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"num_epochs": 1, "shuffle": False}),
            "rollout": config.rollout.model_copy(update={"num_replicas": shape.num_replicas}),
            "trainer": config.trainer.model_copy(update={"num_steps": None}),
            "cluster": config.cluster.model_copy(update={"num_machines": shape.num_machines}),
            "faults": faults.model_copy(update={"report_deadline_s": silence_s}),
        }
    )


def _num_prompts(config: Config) -> int:
    """More than the steps can use, whatever is under way at the end."""
    num_steps = config.simulation.num_steps + int(config.buffer.capacity_steps * config.buffer.max_refill_factor) + 2
    return num_steps * config.batch.num_prompts_per_step
