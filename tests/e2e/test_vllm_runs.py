"""A whole run whose replicas decode with vLLM on CPU: it learns, it loses an engine on the way, and leaves nothing."""

import importlib.util
import json
import os
import signal
import statistics
from pathlib import Path

import pytest

from laminar.observe.replay import replay
from tests.e2e.runs import Run, survivors

DEADLINE_S = 1500.0
"""Two minutes on an idle machine of two cores; engines start in minutes where others have the cores."""
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(DEADLINE_S + 60),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; `make test-vllm` runs these"
    ),
]
NUM_STEPS = 24
NUM_STEPS_COMPARED = 6


def test_a_run_with_vllm_learns_and_goes_on_where_a_killed_engine_stopped(tmp_path: Path):
    """An engine's scheduler is killed while it decodes; its trajectories go on elsewhere, from their tokens."""
    run = Run(
        tmp_path / "run",
        f"trainer.num_steps={NUM_STEPS}",
        "evaluation.interval_steps=100",
        "faults.start_deadline_s=1000",
        "faults.report_deadline_s=100",
        "faults.load_deadline_s=200",
        "relay.publish_deadline_s=200",
        "observe.tensorboard=false",
        config="configs/quickstart_vllm.yaml",
        overrides=(),
        deadline_s=DEADLINE_S,
    )
    run.wait_for("three steps", lambda: len(run.events("HandedOver")) >= 3)
    run.wait_for("both replicas to decode", lambda: num_decoding(run) == {0, 1})
    processes = run.processes()
    victim = next(p for p in processes if "EngineCore" in p.name())
    os.kill(victim.pid, signal.SIGKILL)
    run.wait_for("the loss", lambda: bool(run.events("ReplicaLost")))
    run.wait_for("the replacement", lambda: len(run.events("ReplicaStarted")) == 3)
    processes += run.processes()
    output = run.wait()
    assert run.status == 0, output

    summary = run.summary()
    assert summary["num_steps"] == NUM_STEPS
    assert summary["num_trajectories_trained"] == NUM_STEPS * 256
    assert summary["num_trajectories_lost"] == 0
    assert summary["trajectory_spans_max"] == 1, "a trajectory is of several versions"
    assert_learned(run)
    assert_rescued(run)
    assert run.events("LoadFailed") == [], "a version that was served was not the one published"
    assert replay(run.run_dir).difference is None
    assert survivors(processes) == []


def num_decoding(run: Run) -> set[int]:
    """Replicas whose last report says that they decode."""
    last = {report["replica"]: report for report in run.events("ReplicaReport")}
    return {id_ for id_, report in last.items() if report["num_running"] >= 8 and report.get("progress")}


def assert_learned(run: Run) -> None:
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [values for line in lines if "critic/rewards/mean" in (values := json.loads(line)["values"])]
    rewards = [step["critic/rewards/mean"] for step in steps]
    assert len(rewards) == NUM_STEPS
    first, last = (statistics.mean(part) for part in (rewards[:NUM_STEPS_COMPARED], rewards[-NUM_STEPS_COMPARED:]))
    assert last > first + 0.1, rewards
    # Law 5, as the trainer measures it: engine and trainer agree on how likely was what was sampled.
    ratios = [step["rollout_corr/rollout_is_mean"] for step in steps]
    assert all(0.97 < ratio < 1.03 for ratio in ratios), ratios


def assert_rescued(run: Run) -> None:
    """From their tokens so far, and never twice; the replacement is given nothing before it has loaded."""
    (lost,) = run.events("ReplicaLost")
    assert "vLLM's processes are gone" in lost["cause"]
    assert run.summary()["num_replicas_lost"] == 1
    assert run.summary()["num_trajectories_rescued"] > 0
    messages = list(run.messages())
    since = next(index for index, (kind, _) in enumerate(messages) if kind == "ReplicaLost")
    resumed = [a for kind, m in messages[since:] if kind == "Resume" for a in m["trajectories"]]
    given = {
        a["trajectory"]
        for kind, m in messages[:since]
        if kind in ("Generate", "Resume") and m["replica"] == lost["replica"]
        for a in m["trajectories"]
    }
    assert any(a["trajectory"] in given and a["num_tokens"] > 0 for a in resumed), "all that was rescued began anew"
    replacement = max(event["replica"] for event in run.events("ReplicaStarted"))
    told = [kind for kind, message in messages if message.get("replica") == replacement]
    ordered = [kind for kind in told if kind in ("Load", "Loaded", "Generate", "Resume")]
    assert ordered[:2] == ["Load", "Loaded"], ordered
