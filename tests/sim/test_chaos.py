"""Chaos in simulation: a hundred seeds break nothing, and whoever breaks control on purpose is found out."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from laminar.cli import main
from laminar.control import broadcast, faults, groups, manager, recovery, scoring
from laminar.control.messages import ReplicaId, ReplicaReport, SetChain
from laminar.control.plane import ControlPlane
from laminar.control.state import Replica
from laminar.control.trajectory_state import TrajectoryState
from laminar.sim.chaos import BadWire, Trouble, draw, examine, shrink
from laminar.sim.hunt import default_config

NUM_SEEDS = 100
CONFIG = default_config()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_disturbed_run_keeps_every_law_and_makes_its_steps(seed: int):
    scenario = draw(CONFIG, seed)
    examined = examine(CONFIG, scenario)
    assert examined.cause is None, f"laminar chaos --first {seed} --seeds 1: {examined.cause}"
    assert CONFIG.simulation.num_steps >= 10
    assert len(scenario.faults) >= 5
    assert examined.num_trajectories >= 1000


# --------------------------------------------------------------------------------------- control, broken on purpose


def forget_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "make_homeless", lambda state, ids: None)


def answer_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told once more is taken in once more."""
    monkeypatch.setattr(ControlPlane, "_was_pending", lambda self, command: self.state.pending.pop(command, 0) != -1)


def start_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's start is taken in as often as it is told; chaos found this one in control as it was."""
    is_trainer = ControlPlane._is_trainer
    monkeypatch.setattr(ControlPlane, "_is_trainer", lambda self, attempt, phase=None: is_trainer(self, attempt))


def keep_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = manager.settle

    def settle_alike(state: Any, trajectory: Any, home: Replica) -> None:
        settle(state, trajectory, home)
        trajectory.attempt -= 1

    monkeypatch.setattr(manager, "settle", settle_alike)


def house_at_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = manager.Manager._homes_for
    monkeypatch.setattr(
        manager.Manager,
        "_homes_for",
        lambda self, state, version, *, evaluation: homes(self, state, None, evaluation=evaluation),
    )


def keep_tokens_of_a_version_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    restart = groups.restart

    def restart_in_the_middle(state: Any, trajectory: Any) -> None:
        num_tokens = trajectory.num_tokens
        restart(state, trajectory)
        trajectory.num_tokens = num_tokens

    monkeypatch.setattr(groups, "restart", restart_in_the_middle)


def begin_again_from_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost replica's trajectories lose their tokens."""
    make_homeless = faults.make_homeless

    def forget_tokens(state: Any, ids: Any) -> None:
        make_homeless(state, ids)
        for id in ids:
            state.trajectories[id].num_tokens = 0

    monkeypatch.setattr(faults, "make_homeless", forget_tokens)


def leave_dead_relays_in_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        broadcast, "leave", lambda state, machine, now: SetChain(state.new_command(), tuple(state.chain))
    )


def wait_for_the_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_deadline(*arguments: Any) -> Iterator[Any]:
        yield from ()

    monkeypatch.setattr(faults, "check_deadlines", no_deadline)


def leave_out_what_was_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps after the checkpoint of a trainer that was lost are not trained again."""
    monkeypatch.setattr(recovery, "roll_back", lambda state, step: None)


def take_scores_of_any_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_any_attempt(state: Any, message: Any) -> Any:
        trajectory = state.trajectories.get(message.trajectory)
        return None if trajectory is None or trajectory.state is TrajectoryState.TRAINED else trajectory

    monkeypatch.setattr(scoring, "_awaiting", of_any_attempt)


BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    forget_what_was_lost,
    answer_twice,
    start_twice,
    keep_attempts,
    house_at_any_version,
    keep_tokens_of_a_version_that_is_gone,
    begin_again_from_the_prompt,
    leave_dead_relays_in_the_chain,
    wait_for_the_silent,
    leave_out_what_was_rolled_back,
    take_scores_of_any_attempt,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_that_is_planted_is_found(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    bug(monkeypatch)
    assert any(examine(CONFIG, draw(CONFIG, seed)).cause for seed in range(NUM_SEEDS))


# ------------------------------------------------------------------------------------------------- around the hunt


def test_a_failure_is_shrunk_to_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    leave_dead_relays_in_the_chain(monkeypatch)
    failed = next(e for e in (examine(CONFIG, draw(CONFIG, seed)) for seed in range(NUM_SEEDS)) if e.cause)
    smallest = shrink(CONFIG, failed)
    assert smallest.cause is not None
    assert len(smallest.scenario.faults) <= 2 < len(failed.scenario.faults)
    assert smallest.scenario.trouble == Trouble()
    assert examine(CONFIG, smallest.scenario) == smallest


def test_the_wire_keeps_each_process_in_order_and_repeats_and_loses_some():
    wire, chance = BadWire(Trouble(late=0.5, again=0.3, lost=0.3), 0), random.Random(0)
    firsts: list[float] = []
    counts = [0, 0, 0]
    now = 0.0
    for _ in range(500):
        now += chance.random()
        arrivals = wire.arrivals(ReplicaReport(ReplicaId(0), 0.5, 1, 0, 0), now)
        counts[min(len(arrivals), 2)] += 1
        assert all(at_s >= now for at_s in arrivals)
        firsts += arrivals[:1]
    assert firsts == sorted(firsts)
    assert min(counts) > 50


def test_the_command_tells_what_it_tried_and_runs_a_scenario_again(tmp_path, capsys):
    assert main(["chaos", "--seeds", "2", "--first", "7"]) == 0
    assert "2 seeds" in capsys.readouterr().out
    file = tmp_path / "scenario.json"
    file.write_bytes(msgspec.json.encode(draw(CONFIG, 7)))
    assert main(["chaos", "--scenario", str(file), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["scenario"]["seed"] == 7
    file.write_text("{}")
    assert main(["chaos", "--scenario", str(file)]) == 2
    assert f"--scenario {file}" in capsys.readouterr().err
    assert main(["chaos", "--seeds", "0"]) == 2
