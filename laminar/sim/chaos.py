"""Answers `laminar chaos`: disturbs simulated runs, seed by seed, until one breaks a law, gets stuck or falls over.

seed ──► scenario (schedule, faults, a bad wire) ──► simulated run, audited after every event ──► failure ──► shrunk
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from laminar.config import Config
from laminar.control import messages as m
from laminar.control.state import ClusterState
from laminar.sim import faults
from laminar.sim.audit import Audit
from laminar.sim.compare import SCHEDULES, with_schedule
from laminar.sim.run import control_config, shape_of, simulate

NUM_FAULTS = (7, 11)
"""At least and at most, in one scenario."""
STRUCK_S = (5.0, 140.0)
"""When faults strike: while even the fastest schedule still runs."""
STUCK_S = 4000.0
"""Simulated; an undisturbed run takes at most 320 s, and whatever is lost comes back in two minutes."""
NUM_TRAINER_KILLS_MAX = 2
"""One more in the same step would end the run, as it should."""
LATE_S = 4.0
DESCENT_MAX = 200
"""Runs that shrinking a scenario may take."""


class Trouble(msgspec.Struct, frozen=True):
    """What the wire does to messages: shares of those that come late, come again later, and never come.

    Messages of one process stay in order, as one connection keeps them; a repeated one comes whenever it likes. Only
    reports without news are lost: whoever reports tells of the rest again until it is taken in.
    """

    late: float = 0.0
    again: float = 0.0
    lost: float = 0.0


class Scenario(msgspec.Struct, frozen=True):
    seed: int
    schedule: str
    faults: tuple[faults.AnyFault, ...]
    trouble: Trouble


class Failure(msgspec.Struct, frozen=True):
    """at_s: simulated time of the event whose handling broke something."""

    scenario: Scenario
    cause: str
    at_s: float


class BadWire:
    def __init__(self, trouble: Trouble, seed: int) -> None:
        self._trouble = trouble
        self._random = random.Random(f"wire {seed}")
        self._newest_s: dict[object, float] = {}
        """When the last message of each process arrives."""

    def arrivals(self, event: m.AnyEvent, now: float) -> Sequence[float]:
        chance, trouble = self._random, self._trouble
        if now == 0.0:
            return (now,)
        if isinstance(event, m.ReplicaReport) and not event.finished and not event.failed:
            if chance.random() < trouble.lost:
                return ()
        at_s = now + (chance.uniform(0, LATE_S) if chance.random() < trouble.late else 0.0)
        source = _source(event)
        at_s = self._newest_s[source] = max(at_s, self._newest_s.get(source, 0.0))
        if chance.random() < trouble.again:
            return (at_s, at_s + chance.uniform(0, LATE_S))
        return (at_s,)


def draw(config: Config, seed: int) -> Scenario:
    """The scenario of a seed: as many for each schedule."""
    chance = random.Random(seed)
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    shape = shape_of(with_schedule(config, schedule))
    num_trainer_kills, struck = 0, list[faults.AnyFault]()
    for at_s in sorted(chance.uniform(*STRUCK_S) for _ in range(chance.randint(*NUM_FAULTS))):
        fault = _draw_fault(chance, at_s, shape.num_replicas, shape.num_machines)
        num_trainer_kills += isinstance(fault, faults.KillTrainer)
        if not isinstance(fault, faults.KillTrainer) or num_trainer_kills <= NUM_TRAINER_KILLS_MAX:
            struck.append(fault)
    trouble = Trouble(late=chance.uniform(0, 0.3), again=chance.uniform(0, 0.2), lost=chance.uniform(0, 0.2))
    return Scenario(seed, schedule, tuple(struck), trouble)


def examine(config: Config, scenario: Scenario) -> Failure | None:
    """Run it. A failure: an invariant or law broken, an exception, a run that is stuck, or one that lost something."""
    chosen = with_schedule(config, scenario.schedule).model_copy(update={"seed": scenario.seed})
    audit, clock = Audit(control_config(chosen, shape_of(chosen))), [0.0]

    def look(now: float, event: m.AnyEvent, commands: Sequence[m.AnyCommand], state: ClusterState) -> None:
        clock[0] = now
        audit(event, commands, state)
        assert now < STUCK_S, f"stuck: step {state.trainer.step + 1} is not done after {STUCK_S:g} s"

    try:
        wire = BadWire(scenario.trouble, scenario.seed)
        simulated = simulate(chosen, faults=scenario.faults, wire=wire, after_event=look)
        ended, ledger = simulated.ended, simulated.state.ledger
        assert ended is None, f"the run ended before its last step: {ended.cause}"
        assert not ledger.dropped, f"law 2: trajectories were dropped, {dict(ledger.dropped)}"
    except Exception as error:  # whatever it is, the scenario shall be told
        return Failure(scenario, f"{type(error).__name__}: {error}", clock[0])
    return None


def shrink(config: Config, failure: Failure) -> Failure:
    """The same kind of trouble with as little as possible: faults and the wire's misdeeds taken away one by one."""
    left = DESCENT_MAX
    while True:
        for smaller in _smaller(failure.scenario):
            left -= 1
            if (found := examine(config, smaller)) is not None:
                failure = found
                break
            if left == 0:
                return failure
        else:
            return failure


def hunt(config: Config, seeds: Iterable[int], examined: Callable[[int, Failure | None], None]) -> Failure | None:
    """Examine seeds in order until one fails; examined is called after each."""
    for seed in seeds:
        failure = examine(config, draw(config, seed))
        examined(seed, failure)
        if failure is not None:
            return failure
    return None


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    change = partial(msgspec.structs.replace, scenario)
    for index in range(len(scenario.faults)):
        yield change(faults=scenario.faults[:index] + scenario.faults[index + 1 :])
    for what in ("late", "again", "lost"):
        if getattr(scenario.trouble, what):
            yield change(trouble=msgspec.structs.replace(scenario.trouble, **{what: 0.0}))


def _draw_fault(chance: random.Random, at_s: float, num_replicas: int, num_machines: int) -> faults.AnyFault:
    # Those that replace lost ones have higher ids.
    replica = m.ReplicaId(chance.randrange(num_replicas + 3))
    machine = m.MachineId(chance.randrange(num_machines))
    kinds: tuple[faults.AnyFault, ...] = (
        faults.KillReplica(at_s, replica),
        faults.HangReplica(at_s, replica),
        faults.PauseReplica(at_s, replica, chance.uniform(2, 90)),
        faults.KillMachine(at_s, machine),
        faults.KillRelay(at_s, machine),
        faults.HangRelay(at_s, machine),
        faults.SlowLink(at_s, machine, chance.uniform(2, 100), chance.uniform(5, 60)),
        faults.KillTrainer(at_s),
        faults.StallController(at_s, chance.uniform(1, 60)),
    )
    return chance.choice(kinds)


def _source(event: m.AnyEvent) -> object:
    """Whose connection it comes over. Deaths are told by another way than what the dead one said last."""
    match event:
        case m.ReplicaStarted() | m.ReplicaReport() | m.Released() | m.Loaded() | m.LoadFailed():
            return "replica", event.replica
        case m.RelayStarted() | m.RelayReport() | m.VersionComplete() | m.VersionEvicted():
            return "relay", event.machine
        case m.ReplicaLost() | m.RelayLost() | m.TrainerLost() | m.Tick():
            return event
        case m.Scored():
            return "rewards"
        case _:
            return "trainer"
