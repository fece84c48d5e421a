"""Whole runs whose trainer has two ranks: they train, and one that dies costs steps, not the run."""

import os
import re
import signal
from pathlib import Path

import pytest

from laminar.observe.replay import replay
from scripts.crash_history import check_history
from tests.e2e.runs import Run, actor_processes, survivors

pytestmark = pytest.mark.timeout(400)


def test_a_rank_that_dies_brings_the_trainer_back_to_its_checkpoint_and_the_run_goes_on(tmp_path: Path):
    run = Run(tmp_path / "run", "trainer.num_steps=8", "trainer.num_ranks=2")
    run.wait_for("a checkpoint and a step beyond", lambda: len(run.events("MiniBatchTrained")) >= 6)
    processes = run.processes()
    os.kill(actor_processes(run, "TrainerActor")[1].pid, signal.SIGKILL)
    run.wait_for("its loss", lambda: bool(run.events("TrainerLost")))
    processes += run.processes()
    output = run.wait()
    assert run.status == 0, output
    summary = run.summary()
    assert summary["num_trainers_lost"] == 1
    assert summary["num_replicas_lost"] == summary["num_relays_lost"] == 0
    assert summary["num_steps"] == 8
    assert summary["num_trajectories_trained"] == 8 * 16
    assert summary["num_trajectories_lost"] == 0
    (lost,) = run.events("TrainerLost")
    # The other one may die of it before Ray tells of the first.
    assert re.match(r"rank [01]: its process died", lost["cause"]), lost["cause"]
    assert [started["attempt"] for started in run.events("TrainerStarted")] == [0, 1]
    check_history(run.run_dir, num_steps=8)
    assert replay(run.run_dir).difference is None
    assert survivors(processes) == []
