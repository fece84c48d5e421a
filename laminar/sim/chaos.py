"""Disturbs a simulated run, as a seed says, and tells whether it breaks a law, gets stuck or falls over.

seed ──► scenario (schedule, faults, a bad wire) ──► simulated run, audited after every event ──► failure ──► shrunk
"""

import random
from collections.abc import Iterator, Sequence
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
NUM_DESCENTS_MAX = 20
"""More than there are faults and misdeeds to take away."""


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


class Examined(msgspec.Struct, frozen=True):
    """cause: what broke, none: nothing did; at_s: simulated time of the event that broke it, or of the end."""

    scenario: Scenario
    cause: str | None
    at_s: float
    num_trajectories: int
    num_lost: int
    """Replicas, relays and trainers that control took for lost."""


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
        if _tells_nothing_new(event) and chance.random() < trouble.lost:
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


def examine(config: Config, scenario: Scenario) -> Examined:
    """Run it. It fails by a broken invariant or law, an exception, being stuck, or having lost something."""
    chosen = with_schedule(config, scenario.schedule).model_copy(update={"seed": scenario.seed})
    audit = Audit(control_config(chosen, shape_of(chosen)))
    at_s, seen = 0.0, ClusterState()

    def look(now: float, event: m.AnyEvent, commands: Sequence[m.AnyCommand], state: ClusterState) -> None:
        nonlocal at_s, seen
        at_s, seen = now, state
        audit(event, commands, state)
        assert now < STUCK_S, f"stuck: step {state.trainer.step + 1} is not done after {STUCK_S:g} s"

    cause = None
    try:
        wire = BadWire(scenario.trouble, scenario.seed)
        simulated = simulate(chosen, faults=scenario.faults, wire=wire, after_event=look)
        assert simulated.ended is None, f"the run ended before its last step: {simulated.ended.cause}"
        assert not seen.ledger.dropped, f"law 2: trajectories were dropped, {dict(seen.ledger.dropped)}"
    except Exception as error:  # noqa: BLE001  Whatever it is, the scenario shall be told.
        cause = f"{type(error).__name__}: {error}"
    counters = seen.counters
    num_lost = counters.num_replicas_lost + counters.num_relays_lost + counters.num_trainers_lost
    return Examined(scenario, cause, at_s, seen.ledger.dispatched, num_lost)


def shrink(config: Config, failed: Examined) -> Examined:
    """A failure with as little as possible: faults and the wire's misdeeds are taken away while it still fails."""
    for _ in range(NUM_DESCENTS_MAX):
        smaller = (examine(config, scenario) for scenario in _smaller(failed.scenario))
        found = next((examined for examined in smaller if examined.cause is not None), None)
        if found is None:
            break
        failed = found
    return failed


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


def _tells_nothing_new(event: m.AnyEvent) -> bool:
    return isinstance(event, m.ReplicaReport) and not event.finished and not event.failed


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
