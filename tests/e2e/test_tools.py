"""Whole runs with a tool: the real sandbox, the real schedule, and processes killed under their calls."""

import os
import signal
from pathlib import Path

import pytest

from laminar.observe.replay import replay
from tests.e2e.runs import Run, actor_process, survivors
from tests.envs.sandbox.machine import BACKENDS, lacking

pytestmark = pytest.mark.timeout(400)
CONFIG = "configs/quickstart_tools.yaml"


@pytest.fixture(autouse=True)
async def _some_sandbox():
    if all([await lacking(backend) for backend in BACKENDS]):
        pytest.skip("this machine has no sandbox")


@pytest.mark.parametrize("victim", ["SandboxActor", "RolloutActor"])
def test_what_is_killed_under_a_call_costs_no_trajectory(tmp_path: Path, victim: str):
    run = Run(tmp_path / "run", "trainer.num_steps=5", "faults.report_deadline_s=5", config=CONFIG)
    run.wait_for("trajectories wait for the tool", lambda: num_waiting(run) >= 3)
    processes = run.processes()
    os.kill(actor_process(run, victim).pid, signal.SIGKILL)
    output = run.wait()
    assert run.status == 0, output
    summary = run.summary()
    assert summary["num_steps"] == 5
    assert summary["num_trajectories_trained"] == 5 * 16
    assert summary["num_trajectories_lost"] == 0
    assert summary["num_replicas_lost"] == (victim == "RolloutActor")
    assert summary["tool_use"]["used_ratio_first"] > 0.3
    assert replay(run.run_dir).difference is None
    assert survivors(processes) == []


def num_waiting(run: Run) -> int:
    return sum(
        progress["waiting_for_tool"] for report in run.events("ReplicaReport") for progress in report["progress"]
    )


def test_a_machine_without_a_sandbox_is_refused_before_anything_starts(tmp_path: Path):
    run = Run(
        tmp_path / "run",
        "sandbox.kind=http",
        "sandbox.url=http://127.0.0.1:9",
        config=CONFIG,
    )
    output = run.wait()
    assert run.status == 2, output
    assert "sandbox.url=http://127.0.0.1:9: http://127.0.0.1:9/run_code: ConnectError" in output
    assert not (tmp_path / "run").exists()
