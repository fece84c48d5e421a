"""Whole simulated runs: what holds under every schedule, at every event."""

from collections.abc import Sequence

import msgspec
import pytest

from laminar.control.messages import AnyCommand, AnyEvent, MachineId, ReplicaId, Resume
from laminar.control.state import ClusterState
from laminar.sim import faults
from laminar.sim.outcome import outcome
from laminar.sim.run import Simulated, simulate
from laminar.sim.workload import Workload
from tests.sim.worlds import SCHEDULES, small


class Record:
    """Checks control's state after every event, and writes everything down."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.kv_utilization_max = 0.0

    def __call__(self, now: float, event: AnyEvent, commands: Sequence[AnyCommand], state: ClusterState) -> None:
        state.check()
        self.lines.append(msgspec.json.encode((now, event, tuple(commands))))
        self.kv_utilization_max = max(self.kv_utilization_max, *(r.kv_utilization for r in state.replicas.values()), 0)

    def commands(self, kind: type[AnyCommand]) -> list[AnyCommand]:
        decoder = msgspec.json.Decoder(tuple[float, AnyEvent, tuple[AnyCommand, ...]])
        return [c for line in self.lines for c in decoder.decode(line)[2] if isinstance(c, kind)]


def run(schedule: str = "trajectory_level", *, struck: Sequence[faults.AnyFault] = (), seed: int = 0, **simulation):
    record = Record()
    return simulate(small(seed=seed, schedule=schedule, **simulation), faults=struck, after_event=record), record


@pytest.fixture(scope="module", params=SCHEDULES)
def ran(request) -> tuple[Simulated, Record]:
    return run(request.param)


def test_a_run_makes_its_steps_and_its_state_holds_after_every_event(ran):
    simulated, _ = ran
    assert simulated.state.trainer.step == 8
    assert simulated.ended is None
    assert simulated.state.counters.num_replicas_lost == simulated.state.counters.num_relays_lost == 0
    assert simulated.state.counters.num_late_messages == simulated.state.counters.num_controller_stalls == 0


def test_kv_is_used_up_and_never_above_its_budget(ran):
    simulated, record = ran
    assert record.kv_utilization_max <= 1.0
    if simulated.config.schedule.kind in ("trajectory_level", "partial_rollout"):
        assert record.kv_utilization_max > 0.9


def test_the_step_trains_exactly_what_its_trajectories_are_long(ran):
    simulated, _ = ran
    workload, prompt_tokens = Workload(simulated.config), simulated.config.simulation.prompt_tokens
    groups = [g for g in simulated.state.groups.values() if g.trained_step == 8]
    assert len(groups) == 32
    members = [id for group in groups for id in group.trajectories]
    assert simulated.measures.steps[-1].num_tokens == sum(
        prompt_tokens + workload.response(id).num_tokens for id in members
    )


def test_staleness_is_what_the_schedule_promises(ran):
    simulated, _ = ran
    seen = set(outcome(simulated).staleness_at_train)
    match simulated.config.schedule.kind:
        case "synchronous":
            assert seen == {0}
        case "one_step_stale":
            assert seen == {1}
        case "streaming":
            assert seen <= {0, 1}
        case "partial_rollout":
            assert max(seen) <= 4
        case _:
            assert max(seen) >= 1


def test_the_same_seed_gives_the_same_run_to_the_last_bit():
    assert run("trajectory_level")[1].lines == run("trajectory_level")[1].lines
    assert run("trajectory_level")[1].lines != run("trajectory_level", seed=1)[1].lines


def test_every_schedule_meets_the_same_trajectories():
    """So that a difference between two runs is the schedules', not chance's."""
    of_one, of_other = (
        Workload(small(schedule=kind, num_gpus=n)) for kind, n in (("synchronous", 16), ("streaming", 32))
    )
    assert [of_one.response(id) for id in range(50)] == [of_other.response(id) for id in range(50)]


STRIKES = {
    faults.KillReplica(20.0, ReplicaId(1)): ("num_replicas_lost", 1),
    faults.HangReplica(20.0, ReplicaId(1)): ("num_replicas_lost", 1),
    faults.PauseReplica(20.0, ReplicaId(1), 8.0): ("num_replicas_lost", 0),
    faults.PauseReplica(20.0, ReplicaId(1), 90.0): ("num_replicas_lost", 1),
    faults.KillMachine(20.0, MachineId(2)): ("num_replicas_lost", 2),
    faults.KillRelay(20.0, MachineId(0)): ("num_relays_lost", 1),
    faults.HangRelay(20.0, MachineId(1)): ("num_relays_lost", 1),
    faults.SlowLink(10.0, MachineId(1), 50.0, 60.0): ("num_relays_lost", 0),
    faults.KillTrainer(20.0): ("num_trainers_lost", 1),
    faults.StallController(20.0, 45.0): ("num_controller_stalls", 1),
}
"""What strikes, and which of control's counts tells of it."""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("fault", "told"), STRIKES.items(), ids=lambda value: type(value).__name__)
def test_a_fault_costs_time_and_no_trajectory(fault, told, schedule):
    simulated, _ = run(schedule, struck=[fault])
    counter, count = told
    assert msgspec.structs.asdict(simulated.state.counters)[counter] == count
    assert simulated.state.trainer.step == 8
    assert simulated.state.ledger.dropped == {}


def test_trajectories_of_a_killed_replica_go_on_from_their_tokens():
    simulated, record = run(struck=[faults.KillReplica(20.0, ReplicaId(1))])
    resumed = [a for command in record.commands(Resume) for a in command.trajectories]
    assert simulated.state.counters.num_trajectories_rescued > 0
    assert any(assignment.num_tokens > 0 for assignment in resumed)


def test_a_trainer_that_is_lost_again_and_again_ends_the_run_by_name():
    simulated, _ = run(struck=[faults.KillTrainer(20.0 + 60 * i) for i in range(10)])
    assert simulated.ended is not None
    assert "the trainer was lost" in simulated.ended.cause
    with pytest.raises(ValueError, match=r"made \d of simulation.num_steps=8 steps"):
        outcome(simulated)


class LossyWire:
    """Every fifth report comes late, every seventh twice, every eleventh never."""

    def __init__(self) -> None:
        self.num_sent = 0

    def arrivals(self, event: AnyEvent, now: float) -> Sequence[float]:
        if type(event).__name__ != "ReplicaReport" or event.finished:
            return (now,)
        self.num_sent += 1
        late_s = now + 2.0 if self.num_sent % 5 == 0 else now
        return () if self.num_sent % 11 == 0 else (late_s, now + 1.0) if self.num_sent % 7 == 0 else (late_s,)


def test_late_lost_and_repeated_reports_change_no_outcome():
    record = Record()
    simulated = simulate(small(), wire=LossyWire(), after_event=record)
    assert simulated.state.trainer.step == 8
    assert simulated.state.ledger.dropped == {}
