"""Whole runs whose rewards are of no use: they end well, with finite weights and everything counted by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from laminar.observe.metrics import read_metrics
from laminar.train.export import export_checkpoint
from tests.e2e.runs import Run

pytestmark = pytest.mark.timeout(400)

FUNCTIONS = '''
def odd(data_source, solution_str, ground_truth, extra_info=None):
    """Anything that people have been seen to return, by the length of the response."""
    match len(solution_str) % 16:
        case 0:
            return None
        case 1:
            return float("nan")
        case 2:
            return float("-inf")
        case 3:
            return "1.0"
        case 4:
            return {"acc": 1.0}
        case 5:
            raise KeyError("answer")
        case 6:
            return True
        case 7:
            return {"score": 0.5, "acc": 1, "pred": "text"}
        case rest:
            return rest / 16

def equal(data_source, solution_str, ground_truth, extra_info=None):
    return 0.25
'''


def weights(folder: Path) -> dict[str, torch.Tensor]:
    export_checkpoint(folder, folder / "export")
    return load_file(folder / "export" / "model.safetensors")


def test_rewards_that_are_none_are_dropped_by_name_and_the_rest_is_trained(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    run = Run(
        tmp_path / "run", "trainer.num_steps=3", f"reward.function={tmp_path}/rewards.py:odd", "batch.group_size=8"
    )
    output = run.wait()
    assert run.status == 0, output
    summary = run.summary()
    assert summary["num_steps"] == 3
    assert summary["dropped"]["reward_invalid_score"] > 0
    assert summary["dropped"]["reward_exception"] > 0
    assert summary["num_trajectories_lost"] == sum(summary["dropped"].values())
    rows = [row for row in read_metrics(run.run_dir) if "critic/score/min" in row.values]
    # A failure is never a score of zero: the least that the function gives is 0.5.
    assert len(rows) == 3 and min(row.values["critic/score/min"] for row in rows) == 0.5
    assert any("reward/acc" in row.values for row in rows)
    assert all(row.values["actor/num_updates_skipped"] == 0 for row in rows)
    assert all(tensor.isfinite().all() for tensor in weights(run.run_dir).values())


def test_a_run_without_anything_to_learn_changes_no_weight(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    equal = Run(tmp_path / "equal", "trainer.num_steps=2", f"reward.function={tmp_path}/rewards.py:equal")
    cut = Run(tmp_path / "cut", "trainer.num_steps=2", "data.response_tokens_max=4", "trainer.overlong.filtered=true")
    for run, name in ((equal, "frac_reward_zero_std"), (cut, "response_length/clip_ratio")):
        output = run.wait()
        assert run.status == 0, output
        assert run.summary()["num_steps"] == 2
        rows = [row for row in read_metrics(run.run_dir) if name in row.values]
        assert [row.values[name] for row in rows] == [1.0, 1.0]
        assert [row.values["actor/num_updates_skipped"] for row in rows] == [0.0, 0.0]
        assert [row.values["actor/forwarded_token_ratio"] for row in rows] == [0.0, 0.0]
    ours, theirs = weights(equal.run_dir), weights(cut.run_dir)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()), "both are the initial weights"
