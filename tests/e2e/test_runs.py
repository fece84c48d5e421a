"""Whole runs with real processes: they train, survive, stop, resume, and leave nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.observe.replay import replay
from tests.e2e.runs import ROOT, Run, actor_process, survivors

pytestmark = pytest.mark.timeout(400)


def test_two_small_runs_at_once_train_report_and_replay(tmp_path: Path):
    runs = [
        Run(tmp_path / "a", "trainer.num_steps=4"),
        Run(tmp_path / "b", "trainer.num_steps=2", "schedule.kind=synchronous"),
    ]
    runs[0].wait_for("a step", lambda: bool(runs[0].events("MiniBatchTrained")))
    processes = runs[0].processes() + runs[1].processes()
    outputs = [run.wait() for run in runs]
    for run, output, num_steps in zip(runs, outputs, (4, 2), strict=True):
        assert run.status == 0, output
        summary = run.summary()
        assert summary["num_steps"] == num_steps
        assert summary["num_trajectories_trained"] == num_steps * 16
        assert summary["num_trajectories_lost"] == 0
        assert summary["trajectory_spans_max"] == 1
        assert summary["heldout_accuracy_last"] is not None
        assert (run.run_dir / "report.html").stat().st_size > 10_000
        report = replay(run.run_dir)
        assert report.difference is None
        assert report.num_events > 20
    assert runs[1].summary()["staleness_at_train"] == {"0": 32}
    assert survivors(processes) == []


@pytest.mark.parametrize("kind", ["one_step_stale", "streaming", "partial_rollout"])
def test_the_other_schedules_train_lose_nothing_and_keep_their_promise(tmp_path: Path, kind: str):
    run = Run(tmp_path / "run", "trainer.num_steps=5", f"schedule.kind={kind}", "buffer.capacity_steps=2")
    output = run.wait()
    assert run.status == 0, output
    summary = run.summary()
    assert summary["num_steps"] == 5
    assert summary["num_trajectories_trained"] == 5 * 16
    assert summary["num_trajectories_lost"] == 0
    staleness_max = max(map(int, summary["staleness_at_train"]))
    if kind == "partial_rollout":
        assert staleness_max <= 4
        assert any(load["version"] > 0 for load in run.events("Loaded"))
    else:
        assert summary["trajectory_spans_max"] == 1
        assert staleness_max == 1
    assert replay(run.run_dir).difference is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_lost_replica_costs_the_run_nothing_that_was_finished(tmp_path: Path, number: signal.Signals):
    run = Run(
        tmp_path / "run",
        "trainer.num_steps=6",
        "faults.report_deadline_s=3",
        "engine.paced.time_scale=0.5",
        "engine.kv_capacity_tokens=2048",
    )
    run.wait_for("a step", lambda: len(run.events("MiniBatchTrained")) >= 2)
    processes = run.processes()
    os.kill(actor_process(run, "RolloutActor").pid, number)
    output = run.wait()
    assert run.status == 0, output
    summary = run.summary()
    assert summary["num_steps"] == 6
    assert summary["num_replicas_lost"] == 1
    assert summary["num_trajectories_trained"] == 6 * 16
    assert summary["num_trajectories_lost"] == 0
    assert len(run.events("ReplicaStarted")) == 3, "the replacement came up"
    assert replay(run.run_dir).difference is None
    assert survivors(processes) == []


def test_a_killed_driver_leaves_nothing_and_its_run_resumes(tmp_path: Path):
    run = Run(tmp_path / "run", "trainer.num_steps=6")
    run.wait_for("a checkpoint", lambda: bool(run.events("CheckpointSaved")))
    processes = run.processes()
    run.kill()
    resumed = Run(tmp_path / "run", "trainer.num_steps=6", "--resume")
    output = resumed.wait()
    assert resumed.status == 0, output
    assert survivors(processes) == []
    summary = resumed.summary()
    assert summary["num_steps"] == 6
    assert summary["num_trajectories_trained"] == 6 * 16
    assert replay(run.run_dir).difference is None


def test_ctrl_c_ends_the_step_saves_it_and_leaves_nothing(tmp_path: Path):
    run = Run(tmp_path / "run", "trainer.num_steps=200", "checkpoint.interval_steps=100")
    run.wait_for("a step", lambda: len(run.events("MiniBatchTrained")) >= 2)
    processes = run.processes()
    os.killpg(run.process.pid, signal.SIGINT)
    output = run.wait()
    assert run.status == 1
    assert "stopped by SIGINT" in output
    assert run.events("CheckpointSaved"), "the step was not saved"
    assert survivors(processes) == []


def test_a_partial_last_step_two_epochs_and_a_clean_end(tmp_path: Path):
    rows = tmp_path / "ten.jsonl"
    rows.write_text(
        "".join(
            f'{{"prompt": "f(x)=x+{i + 1} mod 10. x={i}. Apply f 01 times.\\n", "data_source": "iterate", '
            f'"reward_model": {{"ground_truth": "{(2 * i + 1) % 10}"}}}}\n'
            for i in range(9)
        )
    )
    run = Run(
        tmp_path / "run",
        "trainer.learning_rate_schedule=constant",
        f"data.train_files=[{rows}]",
        "trainer.num_steps=null",
        "data.num_epochs=2",
        "evaluation.interval_steps=null",
    )
    output = run.wait()
    assert run.status == 0, output
    assert "end of data" in output
    summary = run.summary()
    assert summary["num_steps"] == 5, "18 prompt groups, 4 a step"
    assert summary["num_trajectories_trained"] == 18 * 4


def test_the_environment_of_the_documentation_trains_over_two_turns(tmp_path: Path):
    page = (ROOT / "docs" / "add-an-environment.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "second_try.py").write_text(code)
    subprocess.run(
        [sys.executable, "second_try.py"], cwd=tmp_path, check=True, timeout=60, env={"PYTHONPATH": str(ROOT)}
    )
    run = Run(
        tmp_path / "run",
        f"rollout.environment={tmp_path}/second_try.py:SecondTry",
        "rollout.num_turns_max=2",
        "reward.function=null",
        f"data.train_files=[{tmp_path}/second_try.jsonl]",
        "data.val_files=[]",
        "evaluation.interval_steps=null",
        "trainer.num_steps=3",
    )
    output = run.wait()
    assert run.status == 0, output
    summary = run.summary()
    assert summary["num_trajectories_trained"] == 3 * 16
    assert summary["num_trajectories_lost"] == 0
    scores = {score["score"] for event in run.events("Scored") for score in event["scores"]}
    assert 0.5 in scores, "the reward of an answer that was right at the second try"


BAD = [
    ("an unknown key", ["trainer.learning_rat=1"], "did you mean trainer.learning_rate?"),
    ("a missing model", ["model.path=nowhere"], "model.path=nowhere"),
    ("a missing file", ["data.train_files=[nowhere.parquet]"], "nowhere.parquet"),
    ("a missing reward", ["reward.function=nowhere.py:score"], "nowhere.py"),
    ("a wrong name", ["reward.function=examples/iterate/task.py:compute_scor"], "compute_score"),
    ("a capacity below one step", ["buffer.capacity_steps=0.5"], "buffer.capacity_steps"),
    ("a wrong column", ["data.prompt_key=question"], "question"),
    ("a response that never fits", ["data.response_tokens_max=100000"], "engine.kv_capacity_tokens"),
]


@pytest.mark.parametrize(("overrides", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_one_clear_message(tmp_path: Path, overrides: list[str], message: str):
    command = [sys.executable, "-m", "laminar", "run", "configs/quickstart.yaml", f"run_dir={tmp_path}/run", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
