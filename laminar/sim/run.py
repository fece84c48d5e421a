"""The simulated run: the live run's loop, on a virtual clock."""

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from laminar.config import Config, SynchronousSchedule
from laminar.control.messages import AnyCommand, AnyEvent, EndRun
from laminar.control.plane import ControlPlane
from laminar.control.state import ClusterState
from laminar.observe.event_log import EventLogWriter
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


AfterEvent = Callable[[float, AnyEvent, Sequence[AnyCommand], ClusterState], None]
"""Called with what happened and when, what followed from it, and the state that it left."""


def simulate(
    config: Config,
    *,
    faults: Sequence[AnyFault] = (),
    wire: Wire | None = None,
    fitted: Calibration | None = None,
    record_in: Path | None = None,
    after_event: AfterEvent | None = None,
    step_done: Callable[[int], None] | None = None,
) -> Simulated:
    """Run a configuration against a world that exists on the virtual clock only. Raises ValueError for bad settings.

    fitted: other constants than those that come with Laminar. record_in: a folder for an event log like a live run's.
    """
    shape = shape_of(config, fitted)
    own = control_config(config, shape)
    num_prompts, num_heldout = _num_prompts(own), own.evaluation.num_prompts_max
    control = ControlPlane(own, num_prompts=num_prompts, num_evaluation_prompts=num_heldout)
    world, history = World(own, shape, Workload(own), faults=faults, wire=wire, step_done=step_done), History()
    hooks = [history.observe, *([after_event] if after_event is not None else [])]
    with ExitStack() as stack:
        stack.enter_context(_collector_off())
        log = None
        if record_in is not None:
            log = EventLogWriter(
                record_in,
                config=own,
                num_prompts=num_prompts,
                num_evaluation_prompts=num_heldout,
                state=control.state,
                simulated=True,
            )
            stack.callback(log.close)
        num_events, ended = _loop(world, control, log, hooks)
    return Simulated(own, shape, history, control.state, world.measures, num_events, ended)


def _loop(
    world: World, control: ControlPlane, log: EventLogWriter | None, hooks: Sequence[AfterEvent]
) -> tuple[int, EndRun | None]:
    """Events in, commands out, as live. Returns how many, and the end if control ended it."""
    num_events, ended = 0, None
    for now, event in world.events():
        if log is not None:
            log.append(now, event)
        commands = control.handle(event, now)
        for command in commands:
            world.execute(command)
        if log is not None:
            log.handled(commands, control.state)
        for hook in hooks:
            hook(now, event, commands, control.state)
        num_events += 1
        if commands and isinstance(commands[-1], EndRun):
            ended = commands[-1]
    return num_events, ended


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


@contextmanager
def _collector_off() -> Generator[None]:
    """A run leaves no garbage in cycles, and the collector would walk all its live records again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _num_prompts(config: Config) -> int:
    """More than the steps can use, whatever is under way at the end."""
    num_steps = config.simulation.num_steps + int(config.buffer.capacity_steps * config.buffer.max_refill_factor) + 2
    return num_steps * config.batch.num_prompts_per_step
